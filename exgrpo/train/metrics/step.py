"""The numbers of a training step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch

from exgrpo.train.answers import Answers
from exgrpo.train.experience import Replay, Selected
from exgrpo.train.metrics.work import Reading, Work
from exgrpo.train.policy.mismatch import Floats, mismatch_metrics
from exgrpo.train.policy.ratios import BINS, log_ratio_quantiles
from exgrpo.train.policy.update import UpdateStats
from exgrpo.train.records import Group, Score
from exgrpo.train.reward.success import EPSILON

UPDATE_MEANS = (
    "loss",
    "grad_norm",
    "clip_fraction",
    "fresh_ratio",
    "fresh_ratio_max",
    "replayed_ratio",
    "replayed_weight",
    "reference_kl",
)


@dataclass(frozen=True, eq=False)
class OptimiserSteps:
    """What the optimiser did in a training step.

    Attributes:
        updates: one for each optimiser step.
        idle: mini-batches that gave none, because nothing could be learnt from them.
        groups: groups of all mini-batches.
        idle_groups: those of which no answer has an advantage that is trained on.
        tokens: response tokens of all mini-batches.
        read: the rows of the optimiser steps.
        skipped: optimiser steps of the run so far whose gradient was not finite.
        learning_rate: of the next optimiser step.
        scores: of rows before their step, by `id` of the response; those that were asked for.
    """

    updates: list[UpdateStats]
    idle: int
    groups: int
    idle_groups: int
    tokens: int
    read: list[Reading]
    skipped: int
    learning_rate: float
    scores: dict[int, Score] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class StepRecord:
    """What a training step did, for its numbers.

    Attributes:
        step: its number, from 1.
        groups: that were asked, with the scores of their fresh answers.
        sources: the data source of each group's question.
        answers: the fresh answers of each group.
        compared: log-probs of the trainer and of the engine, of answers that both have scored.
        stale: whether the answers were generated while the step before was updating.
        selected: what was replayed.
        pass_rate: fraction of the fresh answers that are successes.
        replay: the experience, after it took in the groups.
        optimised: what the optimiser did.
        generated_tokens: response tokens of the run so far.
        seconds: by phase: select, rollout, score, update, push.
        work: what the model read and wrote, by phase.
    """

    step: int
    groups: Sequence[Group]
    sources: Sequence[str]
    answers: Answers
    compared: Sequence[tuple[Floats, Floats]]
    stale: bool
    selected: Sequence[Selected]
    pass_rate: float
    replay: Replay
    optimised: OptimiserSteps
    generated_tokens: int
    seconds: dict[str, float]
    work: Work


def step_metrics(record: StepRecord) -> dict[str, float]:
    """One flat record per training step; docs/metrics.md says what each number is."""
    answers, optimised = record.answers, record.optimised
    entropies = [entropy for group in record.groups for entropy in _entropies(group)]
    lengths = np.array([rollout.tokens for rollout in answers.rollouts])
    total = sum(record.seconds.values())
    seconds = {**record.seconds, "generate": answers.generate_seconds, "grade": answers.grade_seconds}
    gradient_tokens = sum(update.gradient_tokens for update in optimised.updates)
    return {
        "step": record.step,
        "reward": float(answers.rewards.mean()),
        **_of_sources(record.sources, answers),
        **_of_parts(answers),
        "pass_rate": record.pass_rate,
        "entropy": float(np.concatenate(entropies).mean()),
        "entropy_gap": _entropy_gap(record.groups),
        "response_tokens": float(lengths.mean()),
        **_of_turns(answers),
        "truncated": float(np.mean([not rollout.finished for rollout in answers.rollouts])),
        "timed_out": answers.timed_out,
        "reward_failed": answers.failed,
        "reward_failed_fraction": answers.failed_fraction,
        "groups": len(record.groups),
        "idle_group_fraction": optimised.idle_groups / max(optimised.groups, 1),
        **_of_selected(record.selected, record.step),
        **_of_replay(record.replay),
        "learning_rate": optimised.learning_rate,
        "skipped_updates": optimised.skipped,
        "idle_updates": optimised.idle,
        "generated_tokens": record.generated_tokens,
        "gradient_tokens": gradient_tokens,
        "gradient_token_fraction": gradient_tokens / max(optimised.tokens, 1),
        **_of_updates(optimised.updates),
        **_of_engine(answers),
        "tokens_per_second": float(lengths.sum()) / total,
        "seconds": total,
        **{f"seconds/{phase}": value for phase, value in seconds.items()},
        **_of_work(record.work, seconds),
        "staleness": float(record.stale),
        **_of_mismatch(record.compared),
    }


def _of_sources(sources: Sequence[str], answers: Answers) -> dict[str, float]:
    """The mean reward of the fresh answers by data source."""
    rewards: dict[str, list[float]] = {}
    for source, of_question in zip(sources, answers.of_question, strict=True):
        rewards.setdefault(source, []).extend(answer.reward for answer in of_question)
    return {f"reward/{source}": float(np.mean(rewards[source])) for source in sorted(rewards)}


def _of_parts(answers: Answers) -> dict[str, float]:
    """The mean of each part of a reward, over the fresh answers that have it."""
    values: dict[str, list[float]] = {}
    for answer in chain.from_iterable(answers.of_question):
        for name, value in answer.parts.items():
            values.setdefault(name, []).append(value)
    return {f"reward_part/{name}": float(np.mean(values[name])) for name in sorted(values)}


def _of_turns(answers: Answers) -> dict[str, float]:
    """How much the environment has said, where there is one; answers without an observation have one turn."""
    if answers.broken is None:
        return {}
    masks = [rollout.written for rollout in answers.rollouts if rollout.written is not None]
    observations = sum(int(np.count_nonzero(np.diff(mask.astype(np.int8)) == -1)) for mask in masks)
    return {
        "turns": 1 + observations / len(answers.rollouts),
        "observed_tokens": sum(int(np.count_nonzero(~mask)) for mask in masks) / len(answers.rollouts),
        "environment_failed": answers.broken,
    }


def _entropies(group: Group) -> list[Floats]:
    """Of the tokens of each fresh answer."""
    return [row.own(score.entropy) for row, score in zip(group.fresh, group.scores, strict=True)]


def _entropy_gap(groups: Sequence[Group]) -> float:
    """Mean over groups with unequal fresh rewards: entropy of what is below their mean, less that of what is above."""
    gaps = []
    for group in groups:
        reward = np.array([row.reward for row in group.fresh])
        entropy = np.array([of_answer.mean() for of_answer in _entropies(group)])
        above = reward > reward.mean()
        if np.ptp(reward) > EPSILON:
            gaps.append(entropy[~above].mean() - entropy[above].mean())
    return float(np.mean(gaps)) if gaps else math.nan


def _of_selected(selected: Sequence[Selected], step: int) -> dict[str, float]:
    """How many trajectories are replayed, and what kind they are; NaN of what does not exist."""
    ages = [step - one.trajectory.step for one in selected]
    replays = [one.replays for one in selected]
    entropies = [one.entropy for one in selected if one.entropy is not None]
    return {
        "replayed": len(selected),
        "replayed_entropy": float(np.mean(entropies)) if entropies else math.nan,
        "replayed_age": float(np.mean(ages)) if ages else math.nan,
        "replayed_times": float(np.mean(replays)) if replays else math.nan,
        "replayed_times_max": max(replays, default=math.nan),
    }


def _of_replay(replay: Replay) -> dict[str, float]:
    memory = replay.memory
    return {
        "replay_open": float(replay.latch.open),
        "buffer_questions": len(memory),
        "buffer_trajectories": memory.trajectory_count,
        "retired": int(memory.retired.sum()),
        **{f"bucket/{k}": int(size) for k, size in enumerate(memory.bucket_sizes()) if 0 < k < memory.samples},
    }


def _of_mismatch(compared: Sequence[tuple[Floats, Floats]]) -> dict[str, float]:
    """How far the engine's log-probs are from the trainer's; nothing where the engine gave none."""
    if not compared:
        return {}
    trainer, engine = zip(*compared, strict=True)
    numbers = mismatch_metrics(trainer, engine)
    return {f"mismatch/{name}": value for name, value in numbers.items()}


def _of_work(work: Work, seconds: dict[str, float]) -> dict[str, float]:
    """Tokens per second of each phase, of the generation those that it writes; NaN of a phase without work."""
    numbers = {}
    for phase, readings in work.items():
        tokens = sum(reading.written if phase == "generate" else reading.read for reading in readings)
        numbers[f"tokens_per_second/{phase}"] = tokens / seconds[phase] if tokens else math.nan
    return numbers


def _of_engine(answers: Answers) -> dict[str, float]:
    """What the rollout engine did: the fraction of prompt tokens that it had cached, and how long it slept."""
    counts = answers.engine
    return {
        "prefix_cache_hits": counts.cached_tokens / counts.prompt_tokens if counts.prompt_tokens else math.nan,
        "seconds/asleep": counts.asleep_seconds,
    }


def _of_updates(updates: Sequence[UpdateStats]) -> dict[str, float]:
    """Means over the step's optimiser steps, of those where the number exists, and quantiles over its tokens.

    A step without any has no numbers: NaN.
    """
    numbers = {}
    for name in UPDATE_MEANS:
        values = [value for update in updates if math.isfinite(value := getattr(update, name))]
        if values or name != "reference_kl":  # most runs have no reference
            numbers[name] = float(np.mean(values)) if values else math.nan
    none = torch.zeros(2, BINS, dtype=torch.int64)
    counts = torch.stack([none, *(update.log_ratios for update in updates)]).sum(0).numpy()
    for kind, of_kind in zip(("fresh", "replayed"), counts, strict=True):
        quantiles = log_ratio_quantiles(of_kind)
        numbers |= {f"{kind}_log_ratio/{name}": value for name, value in quantiles.items()}
    return numbers
