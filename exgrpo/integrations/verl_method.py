"""A method of replay in verl: its options, those of verl that follow, the columns of a stored answer, the loss, and
what a run begins with.

Only the last two need verl.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from exgrpo.extras import needs
from exgrpo.kernels import LogProb

PACKAGES = ("verl==0.9.1", "TransferQueue>=0.1.10", "pydantic>=2.14,<3", "pyyaml>=6,<7", "tyro>=1.0.17,<2")
"""What replay in verl needs beside torch, for pip. The extra `train` asks for other packages than verl."""

with needs(__name__, *PACKAGES):
    import numpy as np
    import pydantic  # noqa: F401 - so that what is missing is told as above
    import tyro  # noqa: F401
    import yaml  # noqa: F401

    from exgrpo.integrations.trl_replay import question_text
    from exgrpo.train.common.distributed import ALONE
    from exgrpo.train.common.errors import ConfigError
    from exgrpo.train.common.records import TokenIds
    from exgrpo.train.common.step_batch import Floats, StepBatch
    from exgrpo.train.config.objective import SURROGATES
    from exgrpo.train.config.options import Config
    from exgrpo.train.config.recipe import merged, read_recipe, unfinished
    from exgrpo.train.config.section import flat
    from exgrpo.train.data.questions import Question
    from exgrpo.train.policy.batch import IGNORED, MicroBatch
    from exgrpo.train.policy.loss import LossSettings, LossTerms, loss_of_log_probs
    from exgrpo.train.replay import rules
    from exgrpo.train.replay.contract import PRESENT, Term
    from exgrpo.train.replay.rehearsal import rehearse
    from exgrpo.train.reward.worker import hashed
    from exgrpo.train.run.start_experience import Answer, Beginning, Encoding, Started, start_experience

KEY = "exgrpo"
METHODS = Path(__file__).parents[2] / "recipes" / "replay"
"""Recipes by name, where this package is a checkout."""
SOLUTION = "key"
"""What a reward of verl tells of a solution beside its score: a text, alike for answers that differ only in form."""
AGGREGATED = {
    "constant": "seq-mean-token-sum-norm",
    "token": "token-mean",
    "sequence": "seq-mean-token-mean",
    "answer": "seq-mean-token-sum",
}
"""verl's loss_agg_mode, by objective.normalize."""
ELSEWHERE = {
    "questions": "set data.train_batch_size of verl",
    "optimizer.minibatches": "set actor_rollout_ref.actor.ppo_mini_batch_size of verl",
    "optimizer.passes": "set actor_rollout_ref.actor.ppo_epochs of verl",
    "experience.folder": "stored answers are in memory here: leave it out",
    "objective.kl_coef": "set actor_rollout_ref.actor.use_kl_loss and kl_loss_coef of verl",
    "objective.kl": "set actor_rollout_ref.actor.kl_loss_type of verl",
    "objective.anchor": "log-ratios refer to the policy that wrote the answer: leave it out",
    "objective.kl_corrected": "verl's estimate of the divergence is not corrected: leave it out",
}
"""Options of a recipe that this trainer does without, and what to do."""
HERE = ("experience", "objective", "reward.success", "rollout.refills", "seed")
"""Options of a recipe that count here."""


def configure(config: Any, given: dict[str, Any]) -> Config:
    """Check the options of a run, and set those of verl that follow from the method.

    Args:
        config: verl's configuration. Of the actor the aggregation of the loss and the entropy bonus are set, and of the
            algorithm whether advantages are scaled; the mode of the trainer becomes "sync".
        given: what is under the key `exgrpo`: `recipe`, a name in recipes/replay or a path, or several of them, and
            options as in a recipe.

    Returns:
        Config: options of `exgrpo.train`, of which the sections experience, objective and reward count, and numbers of
        verl stand where they are its own.

    Raises:
        ConfigError: an option is wrong, or excludes replay; one line, which names it and the remedy.
    """
    options = _options(config, given)
    _check(config, options.rollout.refills)
    objective, actor = options.objective, config.actor_rollout_ref.actor
    actor.loss_agg_mode = AGGREGATED[objective.normalize]
    actor.loss_scale_factor = config.data.max_response_length
    actor.entropy_coeff = objective.entropy_coef
    config.algorithm.norm_adv_by_std_in_grpo = objective.scale_by_std
    config.trainer.v1.trainer_mode = "sync"
    return options


def _options(config: Any, given: dict[str, Any]) -> Config:
    recipes = given.get("recipe") or ()
    paths = [_path(name) for name in ((recipes,) if isinstance(recipes, str) else recipes)]
    own = {name: value for name, value in given.items() if name != "recipe"}
    method = merged(*map(read_recipe, paths), own)
    for key in flat(method):
        if key in ELSEWHERE:
            raise ConfigError(f"{KEY}: {key}: {ELSEWHERE[key]}")
        if not key.startswith(HERE):
            raise ConfigError(f"{KEY}: {key}: only {', '.join(HERE)} count here, the rest are options of verl")
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    batch = config.data.train_batch_size
    of_verl = {
        "questions": batch,
        "rollout.samples": rollout.n,
        "rollout.temperature": rollout.temperature,
        "optimizer.passes": actor.ppo_epochs,
        "optimizer.minibatches": batch // actor.ppo_mini_batch_size,
    }
    options = unfinished(merged(method, of_verl), KEY)
    surrogate, experience = options.objective.surrogate, options.experience
    if getattr(SURROGATES.find(surrogate), "coupled", False):
        raise ConfigError(
            f"{KEY}: objective.surrogate={surrogate!r}: compares the answers of a group before each optimiser step, of "
            "which verl makes several at once; use oapl"
        )
    if experience.admit == "nothing" and experience.compose in ("traced", "appended") and not experience.start:
        raise ConfigError(
            f"{KEY}: experience.admit='nothing': compose={experience.compose!r} then waits for answers of "
            "experience.start: set that, or admit successes"
        )
    rehearse(experience, options.objective, options.rollout.samples, options.reward.success)
    return options


def _path(name: str) -> Path:
    """Of a recipe, by its name or its path."""
    named = METHODS / f"{name}.yaml"
    return named if Path(name).name == name and named.is_file() else Path(name)


def _check(config: Any, refills: int) -> None:
    """Whether verl's options allow replay, and further questions."""
    rollout, algorithm, actor = config.actor_rollout_ref.rollout, config.algorithm, config.actor_rollout_ref.actor
    batch, generated = config.data.train_batch_size, config.data.get("gen_batch_size")
    correction, filtered = algorithm.get("rollout_correction") or {}, algorithm.get("filter_groups") or {}
    judge = (config.get("reward") or {}).get("reward_model") or {}
    skipped = (config.get("skip") or {}).get("rollout_tq") or {}
    routers = {name: (actor.get(name) or {}).get("router_replay") or {} for name in ("megatron", "veomni")}
    wrong = {
        f"algorithm.adv_estimator={algorithm.adv_estimator}": algorithm.adv_estimator != "grpo",
        "critic.enable=True": bool(config.critic.enable),
        "algorithm.use_kl_in_reward=True": algorithm.use_kl_in_reward,
        "algorithm.filter_groups.enable=True": filtered.get("enable"),
        "algorithm.rollout_correction.bypass_mode=True": correction.get("bypass_mode"),
        f"actor_rollout_ref.actor.policy_loss.loss_mode={actor.policy_loss.loss_mode}": actor.policy_loss.loss_mode
        != "vanilla",
        f"actor_rollout_ref.rollout.top_p={rollout.top_p}": rollout.top_p != 1,
        f"actor_rollout_ref.rollout.top_k={rollout.top_k}": rollout.top_k not in (-1, 0),
        "actor_rollout_ref.rollout.enable_rollout_routing_replay=True": rollout.get("enable_rollout_routing_replay"),
        "trainer.v1.sampler.sync_refill_failed_groups=True": config.trainer.v1.sampler.get("sync_refill_failed_groups"),
        f"data.gen_batch_size={generated}": generated not in (None, batch),
        "distillation.enabled=True": (config.get("distillation") or {}).get("enabled"),
        "skip.rollout_tq.enable=True": skipped.get("enable"),
        "data.shuffle=False": not config.data.get("shuffle", True),
    }
    for name, router in routers.items():
        mode = router.get("mode", "disabled")
        wrong[f"actor_rollout_ref.actor.{name}.router_replay.mode={mode}"] = mode != "disabled"
    remedy = {"algorithm.adv_estimator": "set it to grpo"}
    if refills and judge.get("enable") and not judge.get("enable_resource_pool"):
        raise ConfigError(
            f"{KEY}: rollout.refills: the reward model grades only when all is generated; set "
            "reward.reward_model.enable_resource_pool"
        )
    for option, holds in wrong.items():
        if holds:
            name = option.partition("=")[0]
            raise ConfigError(f"{option}: excludes replay; {remedy.get(name, 'leave it at its default')}")


def answer_columns(batch: StepBatch, row: int, prompt: TokenIds) -> dict[str, Tensor]:
    """A stored answer as tensors of a row of verl: [P] of its prompt, [R] of its response, and [P + R]."""
    at = batch.at(row)
    question, answer, own = (torch.from_numpy(values).long() for values in (prompt, batch.token[at], batch.own[at]))
    whole, old = torch.cat([question, answer]), torch.from_numpy(batch.old_log_prob[at])
    reward = torch.zeros(len(answer))
    reward[-1] = batch.reward[row]
    of_prompt = {"prompts": question}
    of_response = {"responses": answer, "response_mask": own, "loss_mask": own, "rm_scores": reward}
    # With the same log-probs of both policies, verl's correction for its rollout leaves the row as it is.
    of_response |= {"old_log_probs": old, "rollout_log_probs": old, "entropy": torch.zeros_like(old)}
    of_all = {"input_ids": whole, "attention_mask": torch.ones_like(whole), "position_ids": torch.arange(len(whole))}
    return of_prompt | of_response | of_all | {"log_probs": torch.zeros(len(whole))}


def replay_loss(
    config: Any, model_output: dict[str, Tensor], data: Any, dp_group: Any = None, *, settings: LossSettings, term: Term
) -> tuple[Tensor, dict[str, Any]]:
    """verl's `ppo_loss` of a micro-batch, in which the objective is that of `exgrpo.train`, aggregated as verl's is.

    Args:
        config: of the actor.
        model_output: log-probs, and entropies where they count.
        data: rows with `replayed` [N] and `weights`, of each token of an answer, and of the step `clip`, whether fresh
            ratios are clipped, and `rows`, how many rows an optimiser step has on average without those that fill up.
        dp_group: as of `ppo_loss`.
        settings: of the run.
        term: of replayed tokens.
    """
    from verl.trainer.ppo.core_algos import agg_loss
    from verl.utils.metric import AggregationType, Metric
    from verl.utils.tensordict_utils import assign_non_tensor_data
    from verl.workers.utils.losses import ppo_loss
    from verl.workers.utils.padding import no_padding_2_padding

    log_prob = no_padding_2_padding(model_output["log_probs"], data)
    corrected = [name for name in ("rollout_is_weights",) if name in data]
    names = ("response_mask", "old_log_probs", "advantages", "weights")
    columns = data.select(*names, *corrected).to_padded_tensor()
    old, advantage, weight = (columns[name] for name in names[1:])
    for name in corrected:
        weight = weight * columns[name]
    own, replayed = columns["response_mask"].bool(), data["replayed"][:, None].expand_as(old)
    # To verl's loss no row has an advantage, and the ratios of replayed ones are 1.
    without = data.copy()
    without["old_log_probs"] = torch.where(replayed | (old == PRESENT), log_prob.detach(), old)
    without["advantages"] = torch.zeros_like(advantage)
    assign_non_tensor_data(without, "global_batch_size", data["rows"])
    loss, metrics = ppo_loss(config, model_output, without, dp_group)
    all_rows, length = getattr(settings.surrogate, "all_rows", False), own.sum(1)
    target = torch.where(own, 0, IGNORED)  # which of all words they are, the log-probs say
    rows = MicroBatch(
        *(target, target, int(length.sum())),
        old_log_prob=old,
        advantage=advantage if all_rows else advantage * weight,
        replayed=replayed,
        lengths=length[length > 0],
        active=int(length.sum()),
        weight=weight if all_rows else None,
    )
    terms = LossTerms(settings, normalizer=1.0, bounded=data["clip"], term=term)
    result = loss_of_log_probs(LogProb(log_prob, torch.zeros_like(log_prob)), rows, terms)
    policy = agg_loss(result.loss[None, None], own.new_ones(1, 1), config.loss_agg_mode, **config.global_batch_info)
    clipped = float(result.clipped.sum() / length.sum().clamp(min=1))
    metrics["actor/pg_loss"] = Metric(value=policy, aggregation=AggregationType.SUM)
    metrics["actor/pg_clipfrac"] = Metric(value=clipped, aggregation=AggregationType.MEAN)
    del metrics["actor/pg_clipfrac_lower"]  # of verl's loss
    return loss + policy, metrics


def solution_keys(told: Sequence[Mapping[str, Any]], admit: str) -> list[int]:
    """[N] keys of solutions, from what rewards of verl tell beside a score; 0: it tells none.

    Raises:
        ConfigError: `admit` compares answers by them, and none of the rewards tells one.
    """
    if not any(SOLUTION in one for one in told) and getattr(rules.find("admit", admit), "distinct", None) == "key":
        raise ConfigError(
            f"{KEY}: experience.admit={admit!r}: compares answers by the keys of their solutions; let "
            f"reward.custom_reward_function give a dict with score and {SOLUTION!r}, or use successes"
        )
    return [hashed(str(form).strip()) if (form := one.get(SOLUTION)) is not None else 0 for one in told]


def begin(trainer: Any) -> Started | None:
    """Fill the experience of a new run with what `experience.start` names.

    Args:
        trainer: an ExGRPOTrainer of verl, whose workers are ready. Its `prompts` become those of all questions.

    Returns:
        what was stored; None: the option is not given.

    Raises:
        ConfigError: an answer has no key, and the method compares by keys.
        DataError: the file cannot be read, or nothing of it can be used.
    """
    options, tokenizer, data = trainer.options, trainer.tokenizer, trainer.config.data
    if options.experience.start is None:
        return None

    def score(batch: StepBatch) -> Floats:
        nothing = {"reward": np.zeros(len(batch)), "step": np.zeros(len(batch))}
        batch.fill(**nothing, old_log_prob=np.zeros(len(batch.token)))
        return trainer.scores(batch).log_prob

    questions = _questions(trainer.train_dataset, tokenizer, data.get("apply_chat_template_kwargs") or {})
    trainer.prompts = {one.index: one.prompt_ids for one in questions}
    run = Beginning(
        questions=questions,
        replay=trainer.replay,
        max_tokens=data.max_response_length,
        model=trainer.config.actor_rollout_ref.model.path,
        world=ALONE,
        grade=lambda answers: _grade(trainer, answers),
        score=score,
        cuts=False,
    )
    return start_experience(run, Encoding(tokenizer, (tokenizer.eos_token_id,), len(tokenizer)))


def check_prompt(question: int, prompt: TokenIds, known: Mapping[int, TokenIds]) -> None:
    """Whether a question is asked with the prompt [P] behind which a new run has scored its answers, if it has.

    Raises:
        ConfigError: it is not.
    """
    if not np.array_equal(known.get(question, prompt), prompt):
        raise ConfigError(
            f"{KEY}: experience.start: row {question} of data.train_files has another prompt than the chat template "
            "gives, behind which its answers were scored; use an agent loop that takes that one, of a single turn"
        )


def _questions(dataset: Any, tokenizer: Any, template: Mapping[str, Any]) -> list[Question]:
    """The rows of a data set of verl, with the prompts that its agent loop of a single turn makes."""
    from verl.utils.tokenizer.chat_template import apply_chat_template
    from verl.utils.tokenizer.tokenizer import normalize_token_ids

    questions = []
    for index in range(len(dataset)):
        row = dataset[index]
        messages, gold = row["raw_prompt"], (row.get("reward_model") or {}).get("ground_truth", "")
        if not all(isinstance(message["content"], str) for message in messages):
            raise ConfigError(f"{KEY}: row {index} of data.train_files is not text alone, and replay is of text")
        prompt = tuple(normalize_token_ids(apply_chat_template(tokenizer, messages, **template)))
        questions.append(Question(index, prompt, question_text(messages), str(gold).strip(), "data.train_files"))
    return questions


def _grade(trainer: Any, answers: Sequence[Answer]) -> list[tuple[float, int]]:
    """Rewards of answers, and keys of their solutions, by verl's reward workers."""
    from verl import DataProto

    rows = [trainer.train_dataset[answer.question.index] for answer in answers]
    sides = {
        "prompts": [torch.tensor(answer.question.prompt) for answer in answers],
        "responses": [torch.from_numpy(answer.tokens).long() for answer in answers],
    }
    tensors = {name: pad_sequence(ids, batch_first=True) for name, ids in sides.items()}
    masks = [pad_sequence([torch.ones_like(one) for one in ids], batch_first=True) for ids in sides.values()]
    others = {
        name: np.fromiter([row[name] for row in rows], object, len(rows))
        for name, value in rows[0].items()
        if not isinstance(value, Tensor)
    }
    asked = DataProto.from_dict({**tensors, "attention_mask": torch.cat(masks, 1)}, others)
    graded = trainer.reward_loop_manager.compute_rm_score(asked)
    keys = graded.non_tensor_batch.get(SOLUTION)
    told = [{}] * len(rows) if keys is None else [{SOLUTION: key} for key in keys.tolist()]
    rewards = graded.batch["rm_scores"].sum(1).tolist()
    return list(zip(rewards, solution_keys(told, trainer.options.experience.admit), strict=True))
