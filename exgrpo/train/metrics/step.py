"""Metrics of a training step; docs/metrics.md explains each of them."""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from exgrpo.train.common.step_batch import Floats, Ints, StepBatch
from exgrpo.train.common.success import EPSILON
from exgrpo.train.data.questions import Question
from exgrpo.train.policy.batch import MiniBatch
from exgrpo.train.policy.flops import Work
from exgrpo.train.policy.scores import Scored, compared
from exgrpo.train.policy.update import BINS, UpdateStats, log_ratio_quantiles, mismatch_metrics

UPDATE_MEANS = (
    "loss",
    "grad_norm",
    "clip_fraction",
    "fresh_ratio",
    "fresh_ratio_max",
    "replayed_ratio",
    "replayed_weight",
    "reference_kl",
    "loss_scale",
)
OPTIONAL = ("reference_kl", "loss_scale")
"""Left out if no update has them: they need a reference, or a loss that is scaled."""


def step_metrics(
    batch: StepBatch,
    questions: Sequence[Question],
    minibatches: Sequence[MiniBatch],
    updates: Sequence[UpdateStats],
    scored: Scored,
    seconds: Mapping[str, float],
    work: Work,
) -> dict[str, float]:
    """Return the numbers of a step that follow from its answers, its updates and its phases.

    Args:
        questions: all training questions, by index.
        updates: optimiser steps, one for each mini-batch with an advantage.
        scored: the fresh rows whose scores are known.
        seconds: by phase: select, rollout, score, update, push.
        work: readings of the model, by phase.
    """
    sources = [questions[question].source for question in batch.question]
    return {
        **_of_answers(batch, sources),
        **_of_updates(batch, minibatches, updates),
        **_of_phases(seconds, work, batch),
        **_mismatch(batch, scored),
    }


def _of_answers(batch: StepBatch, sources: Sequence[str]) -> dict[str, float]:
    fresh = np.flatnonzero(batch.fresh)
    counts, at, entropy = batch.counts, batch.places(fresh), _entropies(batch)
    known = entropy[at][batch.response_mask[at] & ~np.isnan(entropy[at])]
    alone = np.flatnonzero(batch.unaided)
    return {
        "reward": float(batch.reward[alone].mean()) if len(alone) else math.nan,
        **_means("reward", zip(np.array(sources)[batch.group[alone]].tolist(), batch.reward[alone], strict=True)),
        **_means("reward_part", (item for parts in batch.parts[alone] for item in parts.items())),
        **_of_prefixes(batch, np.setdiff1d(fresh, alone)),
        "entropy": float(known.mean()) if len(known) else math.nan,
        "entropy_gap": _entropy_gap(batch, entropy),
        "response_tokens": float(batch.num_tokens[fresh].mean()),
        **_of_turns(batch, fresh),
        **_of_sets(batch, at),
        "truncated": float(np.mean(~batch.finished[fresh])),
        "timed_out": counts.timed_out,
        "reward_failed": counts.failed,
        "reward_failed_fraction": counts.failed_fraction,
        "groups": len(np.unique(batch.group[fresh])),
        "prefix_cache_hits": (
            counts.engine.cached_tokens / counts.engine.prompt_tokens if counts.engine.prompt_tokens else math.nan
        ),
    }


def _means(kind: str, pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for name, value in pairs:
        values.setdefault(name, []).append(value)
    return {f"{kind}/{name}": float(np.mean(values[name])) for name in sorted(values)}


def _of_prefixes(batch: StepBatch, rows: Ints) -> dict[str, float]:
    """Return the numbers of fresh answers that begin with tokens of a stored one, if there are any."""
    if not len(rows):
        return {}
    return {
        "prefixed_groups": len(np.unique(batch.group[rows])),
        "prefixed_reward": float(batch.reward[rows].mean()),
        "prefix_tokens": float((batch.length - batch.num_tokens)[rows].mean()),
    }


def _of_turns(batch: StepBatch, fresh: Ints) -> dict[str, float]:
    if batch.counts.broken is None:
        return {}
    masks = [batch.response_mask[batch.at(row)].astype(np.int8) for row in fresh]
    return {
        "turns": 1 + sum(int(np.count_nonzero(np.diff(mask) == -1)) for mask in masks) / len(fresh),
        "observed_tokens": sum(int(np.count_nonzero(mask == 0)) for mask in masks) / len(fresh),
        "environment_failed": batch.counts.broken,
    }


def _of_sets(batch: StepBatch, at: Ints) -> dict[str, float]:
    """Mean size of the sets that tokens were drawn from, where rollouts are cut."""
    if not batch.has("allowed_tokens"):
        return {}
    sizes = batch.allowed_tokens.sizes[at]
    return {"allowed_tokens": float(sizes[sizes > 0].mean()) if sizes.any() else math.nan}


def _entropies(batch: StepBatch) -> Floats:
    """[T] entropies before the update, by the trainer, else by the engine; NaN where neither has them."""
    if not batch.has("entropy"):
        return batch.engine_entropy
    return np.where(np.isnan(batch.entropy), batch.engine_entropy, batch.entropy)


def _entropy_gap(batch: StepBatch, entropies: Floats) -> float:
    """Mean over groups with unequal fresh rewards: entropy of what is below their mean, less that of what is above.

    Answers without a known entropy do not count, nor do groups that have some on one side only.
    """
    gaps = []
    for group in range(batch.groups):
        rows = batch.rows_of([group])
        rows = rows[batch.fresh[rows]]
        reward = batch.reward[rows]
        if len(rows) and np.ptp(reward) > EPSILON:
            entropy = np.array([batch.row_values(row, entropies).mean() for row in rows])
            above, known = reward > reward.mean(), ~np.isnan(entropy)
            if (above & known).any() and (~above & known).any():
                gaps.append(entropy[~above & known].mean() - entropy[above & known].mean())
    return float(np.mean(gaps)) if gaps else math.nan


def _mismatch(batch: StepBatch, scored: Scored) -> dict[str, float]:
    trainer, engine = compared(batch, scored)
    if not len(engine):
        return {}
    numbers = mismatch_metrics(trainer, engine)
    return {f"mismatch/{name}": value for name, value in numbers.items()}


def _of_phases(seconds: Mapping[str, float], work: Work, batch: StepBatch) -> dict[str, float]:
    # Generation has the tokens that it writes, other phases those that they read.
    written = int(batch.num_tokens[batch.fresh].sum())
    total, counts = sum(seconds.values()), batch.counts
    seconds = {**seconds, "generate": counts.generate_seconds, "grade": counts.grade_seconds}
    tokens = {
        phase: written if phase == "generate" else sum(reading.read for reading in readings)
        for phase, readings in work.items()
    }
    return {
        "tokens_per_second": written / total,
        "seconds": total,
        **{f"seconds/{phase}": value for phase, value in seconds.items()},
        "seconds/asleep": counts.engine.asleep_seconds,
        **{f"tokens_per_second/{phase}": n / seconds[phase] if n else math.nan for phase, n in tokens.items()},
    }


def _of_updates(batch: StepBatch, minibatches: Sequence[MiniBatch], updates: Sequence[UpdateStats]) -> dict[str, float]:
    """Return means over the optimiser steps that have the number, and quantiles over their tokens; NaN without any."""
    all_rows = any(minibatch.all_rows for minibatch in minibatches)
    with_signal = np.bincount(batch.group, batch.loss_mask & ((batch.advantage != 0) | all_rows), batch.groups) > 0
    gradient_tokens = sum(update.gradient_tokens for update in updates)
    numbers: dict[str, float] = {
        "idle_group_fraction": int((~with_signal[batch.trained]).sum()) / max(len(batch.trained), 1),
        "idle_updates": len(minibatches) - len(updates),
        "gradient_tokens": gradient_tokens,
        "gradient_token_fraction": gradient_tokens / max(sum(minibatch.tokens for minibatch in minibatches), 1),
    }
    for name in UPDATE_MEANS:
        values = [value for update in updates if math.isfinite(value := getattr(update, name))]
        if values or name not in OPTIONAL:
            numbers[name] = float(np.mean(values)) if values else math.nan
    none = torch.zeros(2, BINS, dtype=torch.int64)
    counts = torch.stack([none, *(update.log_ratios for update in updates)]).sum(0).numpy()
    for kind, of_kind in zip(("fresh", "replayed"), counts, strict=True):
        quantiles = log_ratio_quantiles(of_kind)
        numbers |= {f"{kind}_log_ratio/{name}": value for name, value in quantiles.items()}
    return numbers
