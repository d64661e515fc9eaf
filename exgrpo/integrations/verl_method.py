"""A replay method in verl: its options, verl's options that follow, loss, and initial experience.

Only the last two need verl.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from exgrpo.extras import needs
from exgrpo.kernels import LogProb

PACKAGES = ("verl==0.9.1", "TransferQueue>=0.1.10", "pydantic>=2.14,<3", "pyyaml>=6,<7", "tyro>=1.0.17,<2")
"""Requirements of replay in verl for pip. The extra `train` has different ones."""

with needs(__name__, *PACKAGES):
    import numpy as np
    import pydantic  # noqa: F401 - imported here so that the error names PACKAGES
    import tyro  # noqa: F401
    import yaml  # noqa: F401

    from exgrpo.integrations.trl_replay import question_text
    from exgrpo.train.common.distributed import ALONE
    from exgrpo.train.common.errors import ConfigError
    from exgrpo.train.common.functions import Needs
    from exgrpo.train.common.records import TokenIds
    from exgrpo.train.common.step_batch import Floats, StepBatch
    from exgrpo.train.config.objective import SURROGATES
    from exgrpo.train.config.options import Config
    from exgrpo.train.config.recipe import merged, read_recipe, unfinished
    from exgrpo.train.config.section import flat
    from exgrpo.train.data.questions import Question
    from exgrpo.train.policy.batch import IGNORED, MicroBatch
    from exgrpo.train.policy.loss import LossTerms, loss_of_log_probs
    from exgrpo.train.replay import rules
    from exgrpo.train.replay.contract import PRESENT
    from exgrpo.train.replay.rehearsal import rehearse
    from exgrpo.train.reward.worker import hashed
    from exgrpo.train.run.start_experience import Answer, Beginning, Encoding, Started, start_experience

KEY = "exgrpo"
METHODS = Path(__file__).parents[2] / "recipes" / "replay"
"""Recipes by name, if this package is a checkout."""
SOLUTION = "key"
"""Item of a reward's result in verl that identifies a solution: a text, equal for answers that differ only in form."""
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
    "experience.prefix": "verl's engines begin every answer anew: leave it out",
    "experience.folder": "stored answers are kept in memory here: leave it out",
    "objective.kl_coef": "set actor_rollout_ref.actor.use_kl_loss and kl_loss_coef of verl",
    "objective.kl": "set actor_rollout_ref.actor.kl_loss_type of verl",
    "objective.anchor": "log-ratios refer to the policy that wrote the answer: leave it out",
    "objective.kl_corrected": "verl's estimate of the divergence is not corrected: leave it out",
}
"""Unsupported options of a recipe, with the remedy."""
HERE = ("experience", "objective", "reward.success", "rollout.refills", "seed")
"""Supported options of a recipe."""
OFF = (None, False)
REQUIRED = {
    "algorithm.adv_estimator": ("grpo",),
    "critic.enable": OFF,
    "algorithm.use_kl_in_reward": OFF,
    "algorithm.filter_groups.enable": OFF,
    "algorithm.rollout_correction.bypass_mode": OFF,
    "actor_rollout_ref.actor.policy_loss.loss_mode": ("vanilla",),
    "actor_rollout_ref.rollout.top_p": (1,),
    "actor_rollout_ref.rollout.top_k": (-1, 0),
    "actor_rollout_ref.rollout.enable_rollout_routing_replay": OFF,
    "trainer.v1.sampler.sync_refill_failed_groups": OFF,
    "distillation.enabled": OFF,
    "skip.rollout_tq.enable": OFF,
    "data.shuffle": (None, True),
    "actor_rollout_ref.actor.megatron.router_replay.mode": (None, "disabled"),
    "actor_rollout_ref.actor.veomni.router_replay.mode": (None, "disabled"),
}
"""Values of verl's options that allow replay; None: the option is absent."""


def configure(config: Any, given: dict[str, Any]) -> Config:
    """Check the options of a run, and set verl's options that follow from the method.

    In verl's configuration it sets the actor's loss aggregation and entropy bonus, the scaling of advantages, and the
    trainer's mode to "sync".

    Args:
        config: verl's configuration.
        given: content of the key `exgrpo`: `recipe`, one or several names in recipes/replay or paths, and options as in
            a recipe.

    Returns:
        Config: options of `exgrpo.train`, with verl's values where verl has the option; only experience, objective and
        reward are used.

    Raises:
        ConfigError: an option is wrong, or excludes replay; one line with the remedy.
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
            raise ConfigError(f"{KEY}: {key}: only {', '.join(HERE)} are used here; set the rest in verl's options")
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
    if Needs.of(SURROGATES.find(surrogate)).coupled:
        raise ConfigError(
            f"{KEY}: objective.surrogate={surrogate!r}: compares the answers of a group before each optimiser step, "
            "but verl takes several at once; use oapl"
        )
    if experience.admit == "nothing" and experience.compose in ("traced", "appended") and not experience.start:
        raise ConfigError(
            f"{KEY}: experience.admit='nothing': compose={experience.compose!r} then waits for answers of "
            "experience.start: set that, or admit successes"
        )
    rehearse(options.method)
    return options


def _path(name: str) -> Path:
    named = METHODS / f"{name}.yaml"
    return named if Path(name).name == name and named.is_file() else Path(name)


def _check(config: Any, refills: int) -> None:
    judge = "reward.reward_model.enable"
    if refills and _option(config, judge) and not _option(config, f"{judge}_resource_pool"):
        raise ConfigError(
            f"{KEY}: rollout.refills: the reward model grades only after all answers are generated; set "
            f"{judge}_resource_pool"
        )
    for name, values in {**REQUIRED, "data.gen_batch_size": (None, config.data.train_batch_size)}.items():
        if (value := _option(config, name)) not in values:
            remedy = "set it to grpo" if name == "algorithm.adv_estimator" else "leave it at its default"
            raise ConfigError(f"{name}={value}: excludes replay; {remedy}")


def _option(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = None if config is None else config.get(name)
    return config


def answer_columns(batch: StepBatch, row: int, prompt: TokenIds) -> dict[str, Tensor]:
    """Return a stored answer as tensors of a row of verl: [P] prompt, [R] response, and [P + R]."""
    at = batch.at(row)
    question, answer, mask = (
        torch.from_numpy(values).long() for values in (prompt, batch.token[at], batch.response_mask[at])
    )
    whole, old = torch.cat([question, answer]), torch.from_numpy(batch.old_log_prob[at])
    reward = torch.zeros(len(answer))
    reward[-1] = batch.reward[row]
    of_prompt = {"prompts": question}
    of_response = {"responses": answer, "response_mask": mask, "loss_mask": mask, "rm_scores": reward}
    # Equal log-probs of both policies make verl's rollout correction 1 for this row.
    of_response |= {"old_log_probs": old, "rollout_log_probs": old, "entropy": torch.zeros_like(old)}
    of_all = {"input_ids": whole, "attention_mask": torch.ones_like(whole), "position_ids": torch.arange(len(whole))}
    return of_prompt | of_response | of_all | {"log_probs": torch.zeros(len(whole))}


def replay_loss(
    config: Any, model_output: dict[str, Tensor], data: Any, dp_group: Any = None, *, terms: LossTerms
) -> tuple[Tensor, dict[str, Any]]:
    """Compute verl's `ppo_loss` of a micro-batch with the objective of `exgrpo.train`, aggregated as in verl.

    `data` has `replayed` [N] and `weights` per response token; for the step, `clip`, True if fresh ratios are clipped,
    and `rows`, the mean number of rows per optimiser step without padding. `terms` are those of clipped ratios.
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
    mask, replayed = columns["response_mask"].bool(), data["replayed"][:, None].expand_as(old)
    # In verl's own loss all advantages are 0 and the ratios of replayed rows are 1: it adds only its other terms.
    without = data.copy()
    without["old_log_probs"] = torch.where(replayed | (old == PRESENT), log_prob.detach(), old)
    without["advantages"] = torch.zeros_like(advantage)
    assign_non_tensor_data(without, "global_batch_size", data["rows"])
    loss, metrics = ppo_loss(config, model_output, without, dp_group)
    all_rows, length = Needs.of(terms.surrogate).all_rows, mask.sum(1)
    target = torch.where(mask, 0, IGNORED)  # token ids are not used: the log-probs are given
    rows = MicroBatch(
        *(target, target, int(length.sum())),
        old_log_prob=old,
        advantage=advantage if all_rows else advantage * weight,
        replayed=replayed,
        lengths=length[length > 0],
        active=int(length.sum()),
        weight=weight if all_rows else None,
    )
    terms = replace(terms, bounded=data["clip"])
    result = loss_of_log_probs(LogProb(log_prob, torch.zeros_like(log_prob)), rows, terms)
    policy = agg_loss(result.loss[None, None], mask.new_ones(1, 1), config.loss_agg_mode, **config.global_batch_info)
    clipped = float(result.clipped.sum() / length.sum().clamp(min=1))
    metrics["actor/pg_loss"] = Metric(value=policy, aggregation=AggregationType.SUM)
    metrics["actor/pg_clipfrac"] = Metric(value=clipped, aggregation=AggregationType.MEAN)
    del metrics["actor/pg_clipfrac_lower"]  # describes verl's own loss
    return loss + policy, metrics


def solution_keys(extras: Sequence[Mapping[str, Any]], admit: str) -> list[int]:
    """Return [N] hashed keys of solutions from the extra items of verl's rewards; 0: the reward has none.

    Raise ConfigError if `admit` compares answers by keys and no reward has one.
    """
    if not any(SOLUTION in one for one in extras) and Needs.of(rules.find("admit", admit)).distinct == "key":
        raise ConfigError(
            f"{KEY}: experience.admit={admit!r}: compares answers by the keys of their solutions; let "
            f"reward.custom_reward_function return a dict with score and {SOLUTION!r}, or use successes"
        )
    return [hashed(str(form).strip()) if (form := one.get(SOLUTION)) is not None else 0 for one in extras]


def begin(trainer: Any) -> Started | None:
    """Fill the experience of a new run of verl's ExGRPOTrainer from `experience.start`; None: the option is not set.

    The workers must be ready. The trainer's `prompts` become those of all questions. Raise ConfigError if an answer
    lacks a key by which the method compares, DataError if the file cannot be read or no answer in it is usable.
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
    """Raise ConfigError if a question's prompt [P] differs from the one used to score its answers at the start."""
    if not np.array_equal(known.get(question, prompt), prompt):
        raise ConfigError(
            f"{KEY}: experience.start: the prompt of row {question} of data.train_files differs from the chat "
            "template's, with which its answers were scored; use a single-turn agent loop, which takes that one"
        )


def _questions(dataset: Any, tokenizer: Any, template: Mapping[str, Any]) -> list[Question]:
    """Return the rows of a data set of verl as questions, with the prompts of its single-turn agent loop."""
    from verl.utils.tokenizer.chat_template import apply_chat_template
    from verl.utils.tokenizer.tokenizer import normalize_token_ids

    questions = []
    for index in range(len(dataset)):
        row = dataset[index]
        messages, gold = row["raw_prompt"], (row.get("reward_model") or {}).get("ground_truth", "")
        if not all(isinstance(message["content"], str) for message in messages):
            raise ConfigError(f"{KEY}: row {index} of data.train_files is not only text; replay supports only text")
        prompt = tuple(normalize_token_ids(apply_chat_template(tokenizer, messages, **template)))
        questions.append(Question(index, prompt, question_text(messages), str(gold).strip(), "data.train_files"))
    return questions


def _grade(trainer: Any, answers: Sequence[Answer]) -> list[tuple[float, int]]:
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
    extras = [{}] * len(rows) if keys is None else [{SOLUTION: key} for key in keys.tolist()]
    rewards = graded.batch["rm_scores"].sum(1).tolist()
    return list(zip(rewards, solution_keys(extras, trainer.options.experience.admit), strict=True))
