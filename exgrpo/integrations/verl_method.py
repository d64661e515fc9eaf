"""A method of replay in verl: its options, those of verl that follow, the columns of a stored answer, and the loss.

Only the loss needs verl.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exgrpo.extras import needs
from exgrpo.kernels import importance_ratio, shape_ratio

PACKAGES = ("verl==0.9.1", "TransferQueue>=0.1.10", "pydantic>=2.14,<3", "pyyaml>=6,<7", "tyro>=1.0.17,<2")
"""What replay in verl needs beside torch, for pip. The extra `train` asks for other packages than verl."""

with needs(__name__, *PACKAGES):
    import pydantic  # noqa: F401 - so that what is missing is told as above
    import tyro  # noqa: F401
    import yaml  # noqa: F401

    from exgrpo.train.common.errors import ConfigError
    from exgrpo.train.common.records import TokenIds
    from exgrpo.train.common.step_batch import StepBatch
    from exgrpo.train.config.options import Config
    from exgrpo.train.config.recipe import merged, read_recipe, unfinished
    from exgrpo.train.config.section import flat
    from exgrpo.train.replay import rules
    from exgrpo.train.replay.contract import Term
    from exgrpo.train.replay.rehearsal import rehearse

KEY = "exgrpo"
METHODS = Path(__file__).parents[2] / "recipes" / "replay"
"""Recipes by name, where this package is a checkout."""
LOOSE = 1e9
"""A bound of ratios that none reaches: verl's are at most e^20."""
UNCLIPPED = {"clip_ratio_low": 1.0, "clip_ratio_high": LOOSE}
"""Options of an actor by which the ratios of fresh tokens are not clipped."""
AGGREGATED = {
    "constant": "seq-mean-token-sum-norm",
    "token": "token-mean",
    "sequence": "seq-mean-token-mean",
    "answer": "seq-mean-token-sum",
}
"""verl's loss_agg_mode, by objective.normalize."""
ELSEWHERE = {
    "experience.start": "verl's trainer starts with an empty experience: use exgrpo train",
    "experience.start_log_prob": "verl's trainer starts with an empty experience: use exgrpo train",
    "experience.folder": "stored answers are in memory here: leave it out",
    "objective.kl_coef": "set actor_rollout_ref.actor.use_kl_loss and kl_loss_coef of verl",
    "objective.kl": "set actor_rollout_ref.actor.kl_loss_type of verl",
    "objective.anchor": "verl's surrogates have ratios, and no regression: leave it out",
    "objective.kl_corrected": "verl's estimate of the divergence is not corrected: leave it out",
    "rollout.refills": "with replay no further questions are asked: leave it out",
}
"""Options of a recipe that this trainer does without, and what to do."""
HERE = ("experience", "objective", "reward.success", "seed")
"""Options of a recipe that count here."""


def configure(config: Any, given: dict[str, Any]) -> Config:
    """Check the options of a run, and set those of verl that follow from the method.

    Args:
        config: verl's configuration. Of the actor the clip range, the aggregation of the loss and the entropy bonus
            are set, and of the algorithm whether advantages are scaled; the mode of the trainer becomes "sync".
        given: what is under the key `exgrpo`: `recipe`, a name in recipes/replay or a path, or several of them, and
            options as in a recipe.

    Returns:
        Config: options of `exgrpo.train`, of which the sections experience, objective and reward count, and numbers of
        verl stand where they are its own.

    Raises:
        ConfigError: an option is wrong, or excludes replay; one line, which names it and the remedy.
    """
    options = _options(config, given)
    _check(config)
    objective, actor = options.objective, config.actor_rollout_ref.actor
    low, high = objective.clip or (UNCLIPPED["clip_ratio_low"], LOOSE)
    actor.clip_ratio_low, actor.clip_ratio_high = low, high
    actor.clip_ratio_c = objective.dual_clip if objective.surrogate == "dual_clip" else LOOSE
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
    if options.objective.surrogate not in ("clipped", "dual_clip"):
        raise ConfigError(
            f"{KEY}: objective.surrogate={options.objective.surrogate!r}: in verl it is clipped or dual_clip"
        )
    experience = options.experience
    if experience.admit == "nothing" and experience.compose in ("traced", "appended"):
        raise ConfigError(
            f"{KEY}: experience.admit='nothing': compose={experience.compose!r} then waits for answers of "
            "experience.start, and verl's trainer starts without any; use successes"
        )
    if getattr(rules.find("admit", experience.admit), "distinct", None) == "key":
        raise ConfigError(
            f"{KEY}: experience.admit={experience.admit!r}: compares answers by the keys of their solutions, "
            "and rewards in verl give none; use successes"
        )
    rehearse(experience, options.objective, options.rollout.samples, options.reward.success)
    return options


def _path(name: str) -> Path:
    """Of a recipe, by its name or its path."""
    named = METHODS / f"{name}.yaml"
    return named if Path(name).name == name and named.is_file() else Path(name)


def _check(config: Any) -> None:
    """Whether verl's options allow replay."""
    rollout, algorithm, actor = config.actor_rollout_ref.rollout, config.algorithm, config.actor_rollout_ref.actor
    batch, generated = config.data.train_batch_size, config.data.get("gen_batch_size")
    correction, filtered = algorithm.get("rollout_correction") or {}, algorithm.get("filter_groups") or {}
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
    }
    remedy = {"algorithm.adv_estimator": "set it to grpo"}
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
    config: Any,
    model_output: dict[str, Tensor],
    data: Any,
    dp_group: Any = None,
    *,
    unclipped: Any,
    term: Term,
    beta: float,
) -> tuple[Tensor, dict[str, Any]]:
    """verl's `ppo_loss` of the fresh rows of a micro-batch, and the term of the replayed ones.

    Args:
        config: of the actor.
        model_output: log-probs, and entropies where they count.
        data: rows with `replayed`, and of the step `clip`, whether fresh ratios are clipped, and `rows`, how many rows
            an optimiser step has on average without those that fill up.
        dp_group: as of `ppo_loss`.
        unclipped: the configuration of a step that is not clipped.
        term: of replayed tokens.
        beta: of shaped ones.
    """
    from verl.trainer.ppo.core_algos import agg_loss
    from verl.utils.metric import AggregationType, Metric
    from verl.utils.tensordict_utils import assign_non_tensor_data
    from verl.workers.utils.losses import ppo_loss
    from verl.workers.utils.padding import no_padding_2_padding

    log_prob = no_padding_2_padding(model_output["log_probs"], data)
    columns = data.select("response_mask", "old_log_probs", "advantages").to_padded_tensor()
    present = log_prob.detach()
    old = torch.where(torch.isinf(columns["old_log_probs"]), present, columns["old_log_probs"])
    replayed = data["replayed"][:, None] & (term != "clipped")
    # To verl's loss a replayed row is one without an advantage, whose ratio is 1.
    of_fresh = data.copy()
    of_fresh["old_log_probs"] = torch.where(replayed, present, old)
    of_fresh["advantages"] = torch.where(replayed, 0.0, columns["advantages"])
    assign_non_tensor_data(of_fresh, "global_batch_size", data["rows"])
    config = config if data["clip"] else unclipped
    loss, metrics = ppo_loss(config, model_output, of_fresh, dp_group)
    mask = columns["response_mask"].bool()
    weight = importance_ratio(log_prob, torch.where(replayed & mask, old, present))
    if term == "shaped":
        weight = shape_ratio(weight, beta)
    terms = torch.where(replayed, -weight * columns["advantages"], 0.0)
    of_replayed = agg_loss(terms, mask, config.loss_agg_mode, **config.global_batch_info)
    metrics["actor/replay_loss"] = Metric(value=of_replayed, aggregation=AggregationType.SUM)
    return loss + of_replayed, metrics
