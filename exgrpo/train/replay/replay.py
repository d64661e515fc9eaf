"""Experience replay as one object: the memory of earlier steps, and the decisions that it enables."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from exgrpo.train.common.functions import Needs
from exgrpo.train.common.records import Mask, TokenIds
from exgrpo.train.common.seeds import generator
from exgrpo.train.common.step_batch import SCORES, Floats, Ints, StepBatch
from exgrpo.train.common.success import RewardWatch, is_success
from exgrpo.train.config.objective import Band, MethodOptions
from exgrpo.train.replay import rules
from exgrpo.train.replay.candidates import RULES, UNSCORED, MeanScores
from exgrpo.train.replay.contract import PlannedGroup
from exgrpo.train.replay.groups import BANDS, success_counts
from exgrpo.train.replay.memory import ExperienceMemory
from exgrpo.train.replay.planner import BatchPlanner, FreshQuestions, Mixture

ScoreAll = Callable[[StepBatch], MeanScores]
"""Scores the rows of a batch under the current policy at temperature 1."""


class StoreReport(NamedTuple):
    """Result of storing a step: the fraction of successes of unaided answers, and a note for the user, if any."""

    pass_rate: float
    note: str | None


@dataclass(frozen=True, eq=False)
class ReplayState:
    """State from which a `Replay` continues exactly.

    Attributes:
        values: plain numbers, and the states of the generators.
        arrays: of the memory, with all stored answers, and of the questions in their order.
    """

    values: dict[str, Any]
    arrays: dict[str, np.ndarray]


class Replay:
    """Experience memory, delayed start, the functions of a method and their generators.

    Arrays and generators in, decisions out: no model, no process group. Every process holds the same one and takes
    the same decisions from the same groups.

    Args:
        options: how experience is kept and drawn, K, and what a success is.
        questions: number of questions; they are known by index 0..questions-1.
        seed: of the draws.
        success_option: name of the option `success`, for notes.
        mixture: the sources of the questions and their weights; None: they are one source.
        prompt: returns the token ids of a question's prompt; None: stored answers come without prompts.

    Attributes:
        memory: what is stored, and which questions are retired.
        open: whether replay has begun: for good, once a step's batch Pass@1 has exceeded `start_pass_rate`.
        watch: whether rewards fit `success`.
        renews: True if a function of the method reads `drift` or `headroom`.
        pool: the fresh questions.
        rng: draws what is replayed.

    Raises:
        ConfigError: a function of the configuration cannot be found.
    """

    def __init__(
        self,
        options: MethodOptions,
        questions: int,
        seed: int,
        *,
        success_option: str = "success",
        mixture: Mixture | None = None,
        prompt: Callable[[int], TokenIds] | None = None,
    ) -> None:
        self.options, self.config = options, options.experience
        self.memory = ExperienceMemory(questions, options)
        self.open = self.config.start_pass_rate == 0
        self._opened = -1
        """The step that has opened it: replay begins with the next one."""
        self.watch = RewardWatch(options.success, success_option)
        self.pool = FreshQuestions(questions, generator(seed, "fresh questions"), mixture)
        self.rng = generator(seed, "replay")
        self._prompt = prompt
        self._rule = RULES[self.config.trajectory]
        self._prioritise = rules.find("prioritise", self.config.prioritise)
        self._compose = rules.find("compose", self.config.compose)
        self._settle = Needs.of(self._compose).settle
        self._settles_by_scores = Needs.of(self._settle).scores
        forget = [rules.find("expire", name) for name in self.config.forgets]
        self.renews = any(Needs.of(function).drift for function in (self._prioritise, *forget))

    @property
    def active(self) -> bool:
        """True if the next step may replay, and stores answers."""
        return self.open and self.config.stores

    @property
    def finished(self) -> bool:
        """True if every question is retired."""
        return bool(self.memory.retired.all())

    @property
    def settles(self) -> bool:
        """True if groups are selected after grading."""
        return self._settle is not None

    @property
    def needs_scores(self) -> bool:
        """True if a function of the method reads the scores of fresh answers."""
        return (self.active and self.memory.admits_by_scores) or self._settles_by_scores

    def _planner(self, batch: int, step: int) -> BatchPlanner:
        begun = self.open and step > self._opened
        shares = (self.config.ratio, self.config.repeat) if begun else (0.0, 0.0)
        return BatchPlanner(step, batch, *shares, self.options, self.memory, self.pool, self._prioritise, self.rng)

    def plan(self, batch: int, step: int) -> list[PlannedGroup]:
        """Plan the groups of a step: of `batch` questions, or fewer where too few are left unretired."""
        return list(self._compose(self._planner(batch, step)))

    def more(self, wanted: int, step: int, without: Sequence[int]) -> list[PlannedGroup]:
        """Return groups of fresh answers to at most `wanted` further questions, which are not `without`."""
        return replace(self._planner(wanted, step), repeat=0.0).fresh(wanted, without)

    def refill(self, batch: StepBatch, size: int, step: int, multiple: int = 1) -> list[PlannedGroup]:
        """Return groups of further questions, one for each of B groups that lacks a gradient; empty: no more is asked.

        Args:
            batch: the graded groups so far.
            size: B, groups that are to have a gradient.
            step: number of the step.
            multiple: their number is one of it: rounded up, or down where too few questions are left.
        """
        missing = size - int(batch.has_signal.sum())
        if missing <= 0:
            return []
        more = self.more(missing + -missing % multiple, step, batch.question.tolist())
        return more[: len(more) // multiple * multiple]

    def select(self, planned: Sequence[PlannedGroup], score: ScoreAll) -> StepBatch:
        """Return the stored answers that join each of the planned groups; each counts as a replay.

        Args:
            planned: G groups of a step.
            score: is called once, with all candidates, if there are any and the rule compares scores, else not at all.

        Returns:
            G groups of replayed rows, perhaps of none.
        """
        table = self.memory.table
        stored = [table.rows_of_question(group.question) if group.choose else [] for group in planned]
        rows = np.array([*chain.from_iterable(stored)], np.int64)
        unknown = np.full(len(rows), np.nan)
        scored = self.config.trajectory not in UNSCORED and len(rows)
        candidates = self._answers(planned, stored)
        entropy, nll, log_prob = score(candidates) if scored else MeanScores(unknown, unknown)
        if log_prob is not None and self.options.temperature == 1 and not candidates.has("allowed_tokens"):
            self.rescored(candidates, log_prob)
        joined: list[list[int]] = []
        entropies: list[float] = []
        ends = np.cumsum([len(of_group) for of_group in stored]).tolist()
        for group, of_group, end in zip(planned, stored, ends, strict=True):
            left, chosen = list(range(end - len(of_group), end)), []
            for _ in range(min(group.choose, len(left))):  # a group that waited may have lost some
                scores = MeanScores(entropy[left], nll[left])
                chosen.append(left.pop(self._rule(table.values("length", rows[left]), scores, self.rng)))
            joined.append([*rows[chosen].tolist(), *group.rows])
            entropies += [*entropy[chosen], *([np.nan] * len(group.rows))]
        return self._join(planned, joined, entropies)

    def rescored(self, batch: StepBatch, log_prob: Floats) -> Floats:
        """Renew drift and headroom of the replayed rows of a batch if they are read; return `log_prob` as it is.

        Trainers call it wherever they have computed it; `ExperienceMemory.rescored` has the arguments.
        """
        if self.renews:
            self.memory.rescored(batch, log_prob)
        return log_prob

    def _answers(self, planned: Sequence[PlannedGroup], rows: Sequence[Sequence[int]]) -> StepBatch:
        group = np.repeat(np.arange(len(planned)), np.array([len(of_group) for of_group in rows], np.int64))
        question = np.array([one.question for one in planned], np.int64)
        batch = self.memory.table.answers(np.array([*chain.from_iterable(rows)], np.int64), group, question)
        if self._prompt:
            batch.fill(prompt=[self._prompt(one.question) for one in planned])
        return batch

    def _join(
        self, planned: Sequence[PlannedGroup], rows: Sequence[Sequence[int]], entropies: Sequence[float] | None = None
    ) -> StepBatch:
        table, batch = self.memory.table, self._answers(planned, rows)
        numbers = np.array([*chain.from_iterable(rows)], np.int64)
        unknown = np.full(len(numbers), np.nan)
        batch.fill(
            replays=table.replayed(numbers),
            chosen_entropy=unknown if entropies is None else entropies,
            stored_advantage=table.values("advantage", numbers) if self.config.advantage == "stored" else unknown,
        )
        return batch

    def settle(
        self, batch: StepBatch, size: int, step: int, *, among: Ints | None = None, refilled: bool = False
    ) -> StepBatch:
        """Return the batch with `trained`, and with late groups of stored answers appended.

        Groups with a prefix are not stored, so those with a gradient are trained on whatever the method selects, which
        fills the other places of a batch.

        Args:
            batch: the graded groups of a step.
            size: B, questions of a step.
            step: its number.
            among: [A] numbers of the groups that may be trained on; None: all.
            refilled: only the first B of them with a gradient may, or all if none has one.
        """
        among = np.arange(batch.groups) if among is None else among
        if refilled:
            with_signal = among[batch.has_signal[among]][:size]
            among = with_signal if len(with_signal) else among
        if self._settle is None:
            batch.fill(trained=among)
            return batch
        aided = np.isin(among, batch.group[batch.column("given") != 0])
        besides, among = among[aided], among[~aided]
        graded = batch.take_groups(among)
        graded = graded if self._settles_by_scores else graded.without(*SCORES)
        settled = self._settle(graded, self._planner(size - len(besides), step))
        late = [one for one in settled if isinstance(one, PlannedGroup)]
        numbers = iter(range(batch.groups, batch.groups + len(late)))
        trained = [next(numbers) if isinstance(one, PlannedGroup) else among[one] for one in settled]
        trained += besides[batch.has_signal[besides]].tolist()
        if late:
            batch = batch.append_groups(self._join(late, [one.rows for one in late]))
        batch.fill(trained=np.array(trained, np.int64))
        return batch

    def in_band(self, batch: StepBatch, band: Band) -> Mask:
        """Return a mask [G] of the groups in the trained band; without an unaided answer they are in every band."""
        samples = self.options.samples
        unaided = np.bincount(batch.group[batch.unaided], minlength=batch.groups) > 0
        return ~unaided | BANDS[band](success_counts(self.memory.evidence(batch), samples), samples)

    def admitted(self, batch: StepBatch) -> Mask:
        """Return a mask [N] of the rows of a graded step that `store` stores."""
        return self.memory.admitted(batch) if self.active else np.zeros(len(batch), bool)

    def store(self, batch: StepBatch, step: int, admitted: Mask | None = None) -> StoreReport:
        """Update the memory with the graded groups of a step; replay that they open begins with the next step.

        Args:
            batch: of the step; the scores of what is stored are known.
            step: its number.
            admitted: [N] result of `admitted`; None: compute it now.
        """
        self.memory.update(batch, step, self.admitted(batch) if admitted is None else admitted)
        rewards = batch.reward[batch.unaided]
        if not len(rewards):
            return StoreReport(math.nan, None)
        rate = float(is_success(rewards, self.options.success).mean())
        # Continuous rewards may never reach `success`.
        progress = float(rewards.mean()) if self.config.bucket_by == "reward_deviation" else rate
        if not self.open and progress > self.config.start_pass_rate:
            self.open, self._opened = True, step
        return StoreReport(rate, self.watch.observe(rewards))

    def _generators(self) -> dict[str, np.random.Generator]:
        return {"pool": self.pool.rng, "replay": self.rng}

    def state(self) -> ReplayState:
        """The state between two steps."""
        return ReplayState(
            values={
                "replay_open": self.open,
                "pool_position": self.pool.position.tolist(),
                "rewards_seen": self.watch.state(),
                "generators": {name: rng.bit_generator.state for name, rng in self._generators().items()},
            },
            arrays={**self.memory.arrays(), "pool_order": self.pool.order},
        )

    def restore(self, state: ReplayState) -> None:
        """Continue from the state of a replay with the same configuration and questions; ignore further values."""
        values, arrays = state.values, state.arrays
        self.open = values["replay_open"]
        self.pool.position = np.array(values["pool_position"], np.int64)
        self.pool.order = arrays["pool_order"].copy()
        self.watch.restore(values["rewards_seen"])
        for name, rng in self._generators().items():
            rng.bit_generator.state = values["generators"][name]
        self.memory.restore(arrays)


def numbers_of(planned: Sequence[PlannedGroup], rows: Ints) -> list[list[Any]]:
    """Return planned groups as plain numbers, for `planned_from` once the memory is restored.

    A restored table has no gaps, so stored answers are named by their places among its `rows` [N].
    """
    places = [np.searchsorted(rows, one.rows).tolist() for one in planned]
    return [
        [one.question, one.fresh, one.choose, at, list(one.prefix), one.given]
        for one, at in zip(planned, places, strict=True)
    ]


def planned_from(numbers: Sequence[Sequence[Any]]) -> list[PlannedGroup]:
    """Return the planned groups of `numbers_of`."""
    return [
        PlannedGroup(question, fresh, choose, tuple(rows), tuple(prefix), given)
        for question, fresh, choose, rows, prefix, given in numbers
    ]


def replay_metrics(replay: Replay, batch: StepBatch, step: int) -> dict[str, float]:
    """Return the numbers of replayed answers, NaN of those that do not exist, and of the experience after the step."""
    memory, replayed = replay.memory, batch.replayed
    entropies = batch.chosen_entropy[replayed]
    entropies = entropies[~np.isnan(entropies)]
    ages, replays = step - batch.step[replayed], batch.replays[replayed]
    return {
        "replayed": len(ages),
        "replayed_entropy": float(entropies.mean()) if len(entropies) else math.nan,
        "replayed_age": float(ages.mean()) if len(ages) else math.nan,
        "replayed_times": float(replays.mean()) if len(replays) else math.nan,
        "replayed_times_max": int(replays.max()) if len(replays) else math.nan,
        "replay_open": float(replay.open),
        "buffer_questions": len(memory),
        "buffer_trajectories": len(memory.table),
        "retired": int(memory.retired.sum()),
        **{f"bucket/{k}": int(size) for k, size in enumerate(memory.bucket_sizes()) if 0 < k < memory.samples},
    }
