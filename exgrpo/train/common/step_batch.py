"""The one record of a training step: all of its answers as columns, which the stages of the step fill.

G groups of answers to one question each, N rows (answers), T response tokens of all rows, end to end. Rows come in the
order of their groups, and the fresh ones of a group before the replayed ones.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, get_args, get_type_hints

import numpy as np
import numpy.typing as npt

from exgrpo.train.common.records import Behaviour, Counts, KeptSets, Mask, Rollout, TokenIds
from exgrpo.train.common.success import EPSILON

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Objects = npt.NDArray[np.object_]
BEHAVIOURS: tuple[Behaviour, ...] = get_args(Behaviour)
"""By their numbers in `StepBatch.behaviour`."""
TRAINER, ENGINE = map(BEHAVIOURS.index, ("trainer", "engine"))

SCORES = ("old_log_prob", "log_prob", "entropy")
"""Of fresh rows, what the trainer computes, and only for those whose numbers something needs."""


# The columns, each with its type: of groups, of rows, of tokens. What they hold, `StepBatch` says.
class _OfGroup:
    question: Ints
    prompt: Objects


class _OfRow:
    replayed: Mask
    finished: Mask
    reward: Doubles
    penalty: Doubles
    key: Ints
    step: Ints
    behaviour: npt.NDArray[np.uint8]
    text: Objects
    parts: Objects
    replays: Ints
    chosen_entropy: Doubles
    stored_advantage: Doubles
    advantage: Doubles
    weight: Doubles
    learnt: Mask


class _OfToken:
    token: TokenIds
    own: Mask
    engine_log_prob: Floats
    engine_entropy: Floats
    old_log_prob: Floats
    log_prob: Floats
    entropy: Floats
    reference_log_prob: Floats
    ratio_log_prob: Floats
    factor: Floats
    kept: KeptSets


def _dtypes(columns: type) -> dict[str, Any]:
    """The dtype of each column, as its annotation says; sets have none, and are named themselves."""

    def dtype(kind: Any) -> Any:
        last = get_args(kind)[-1]  # np.dtype[X] of NDArray[X]; X itself from numpy 2.5 on
        return next(iter(get_args(last)), last)

    return {name: kind if kind is KeptSets else dtype(kind) for name, kind in get_type_hints(columns).items()}


OF_GROUP, OF_ROW, OF_TOKEN = map(_dtypes, (_OfGroup, _OfRow, _OfToken))
COLUMNS = {**OF_GROUP, **OF_ROW, **OF_TOKEN}


class StepBatch(_OfGroup, _OfRow, _OfToken):
    """The answers of a step; see the module.

    A column that no stage has filled cannot be read. In one that is filled for some rows only, the others have NaN, 0,
    False or None, 1 in `factor` and the whole vocabulary in `kept`.

    Args:
        question: [G] index of the question of each group.
        group: [N] see below.
        length: [N] see below.
        columns: see `fill`.

    Attributes:
        group: [N] number of its group, rising.
        length: [N] its response tokens.
        start: [N + 1] where the tokens of each row begin, and the end of the last one.
        question: [G] index of the question.
        prompt: [G] its prompt, an array of token ids.
        replayed: [N] whether the answer comes from the experience; else it is fresh.
        finished: [N] whether it ends with EOS or a stop string, as of a `Rollout`.
        reward: [N] what the verifier gave.
        penalty: [N] what its length takes from its reward in advantages.
        key: [N] of the solution that it gives: answers that differ only in form have the same one; 0: none.
        step: [N] training step in which it was written.
        behaviour: [N] who computed `old_log_prob`, by its number in `BEHAVIOURS`: the trainer, before that step's
            update, or the rollout engine, in sampling; unknown: nobody, and it is 0: the writer counts as certain.
        text: [N] of fresh answers, what is graded: before the EOS token or stop string.
        parts: [N] of fresh answers, the parts of the reward by name.
        replays: [N] how often it has been replayed, this time included; 0 of fresh answers.
        chosen_entropy: [N] of replayed answers, the mean token entropy in nats under the policy that chose it; NaN:
            nobody asked for it.
        stored_advantage: [N] of replayed answers, the advantage in the group that they were written in; NaN: they count
            in the mean of the group that they have joined, and have its advantages.
        advantage: [N] as it counts in this step.
        weight: [N] of the row's objective, in a mini-batch whose objective keeps it apart from the advantage.
        learnt: [N] whether the row may carry a gradient; others count in what losses are divided by all the same.
        token: [T] int32 token ids.
        own: [T] whether the policy wrote the token; others are observations, from which nothing is learnt.
        engine_log_prob: [T] fp32, the engine's own log-prob at the sampling temperature; NaN where it gave none.
        engine_entropy: [T] fp32, the entropy in nats that it saw; NaN where it gave none.
        old_log_prob: [T] fp32 of the policy that wrote the answer, at the sampling temperature; NaN until known.
        log_prob: [T] fp32 of the policy before this step's update, at the same temperature; NaN until known, and of
            rows that are neither trained on nor stored.
        entropy: [T] fp32, its entropy in nats; NaN as `log_prob`.
        reference_log_prob: [T] fp32 of the policy that a divergence refers to; NaN: the row is not compared.
        ratio_log_prob: [T] fp32 of the policy that importance ratios refer to, or `replay.contract.PRESENT`.
        factor: [T] fp32, of the advantage.
        kept: [T] the words that each token was drawn from, over which all of these log-probs and entropies are; not
            filled where rollouts are cut nowhere.
        trained: the numbers of the groups that are trained on, in the order in which mini-batches deal them.
        counts: what it took to generate and grade the fresh answers.
    """

    trained: Ints
    counts: Counts

    def __init__(self, question: Ints, group: Ints, length: Ints, **columns: Any) -> None:
        self.group, self.length = np.asarray(group, np.int64), np.asarray(length, np.int64)
        self.start = np.concatenate([[0], np.cumsum(self.length)])
        self._sizes = (len(question), len(self.group), int(self.start[-1]))
        self.fill(question=question, **columns)

    @classmethod
    def of_rollouts(cls, question: Sequence[int], counts: Sequence[int], rollouts: Sequence[Rollout]) -> "StepBatch":
        """Fresh answers as an engine gives them.

        Args:
            question: [G] index of the question of each group.
            counts: [G] answers to each.
            rollouts: [N] in the order of their groups.
        """
        length = [len(rollout.response) for rollout in rollouts]
        kept = KeptSets.of_parts([rollout.kept for rollout in rollouts], length)
        return cls(
            np.asarray(question, np.int64),
            np.repeat(np.arange(len(counts)), np.asarray(counts, np.int64)),
            np.asarray(length, np.int64),
            replayed=np.zeros(len(rollouts), bool),
            replays=np.zeros(len(rollouts), np.int64),
            finished=[rollout.finished for rollout in rollouts],
            token=_flat([rollout.response for rollout in rollouts], length, np.int32, 0),
            own=_flat([rollout.written for rollout in rollouts], length, bool, True),
            engine_log_prob=_flat([rollout.log_prob for rollout in rollouts], length, np.float32, np.nan),
            engine_entropy=_flat([rollout.entropy for rollout in rollouts], length, np.float32, np.nan),
            **({} if kept is None else {"kept": kept}),
        )

    @classmethod
    def of_answers(cls, prompts: Sequence[TokenIds], rollouts: Sequence[Rollout]) -> "StepBatch":
        """[N] answers to [N] prompts, to be scored; equal prompts are one question."""
        numbers: dict[bytes, int] = {}
        question = [numbers.setdefault(prompt.tobytes(), len(numbers)) for prompt in prompts]
        batch = cls.of_rollouts(question, [1] * len(prompts), rollouts)
        batch.fill(prompt=prompts)
        return batch

    def fill(self, **columns: Any) -> None:
        """Set whole columns, by name, or `trained` and `counts`.

        Raises:
            ValueError: a column has another length than its rows, groups or tokens.
        """
        for name, values in columns.items():
            if name in COLUMNS:
                kind = COLUMNS[name]
                if kind is not KeptSets:
                    values = _objects(values) if kind is np.object_ else np.asarray(values, kind)
                if values.shape != (self._size(name),):
                    raise ValueError(f"{name}: expected [{self._size(name)}], got {list(values.shape)}")
            setattr(self, name, values)

    def put(self, rows: Ints, **columns: npt.NDArray) -> None:
        """Set the tokens of some rows in columns of tokens; what is new is NaN in other rows, and 1 in `factor`."""
        places = self.places(rows)
        for name, values in columns.items():
            if name not in vars(self):
                self.fill(**{name: self._or_nothing(name)})
            getattr(self, name)[places] = values

    def without(self, *names: str) -> "StepBatch":
        """These rows, without some columns, which cannot be read then."""
        part = copy.copy(self)
        for name in names:
            vars(part).pop(name, None)
        return part

    def _size(self, name: str) -> int:
        return self._sizes[0 if name in OF_GROUP else 1 if name in OF_ROW else 2]

    def __getattr__(self, name: str) -> Any:
        if name in COLUMNS or name in ("trained", "counts"):
            raise AttributeError(f"the column {name} of the batch is not filled yet", name=name, obj=self)
        raise AttributeError(f"a StepBatch has no {name}", name=name, obj=self)

    def has(self, name: str) -> bool:
        """Whether a column is filled."""
        return name in vars(self)

    def __len__(self) -> int:
        return self._sizes[1]

    @property
    def groups(self) -> int:
        """G."""
        return self._sizes[0]

    @property
    def fresh(self) -> Mask:
        """[N] whether the answer was written in this step."""
        return ~self.replayed

    @property
    def net_reward(self) -> Doubles:
        """[N] what counts in advantages."""
        return self.reward - self.penalty

    @property
    def teaches(self) -> Mask:
        """[G] whether the net rewards of a group differ, so that its answers have advantages."""
        high, low = np.full(self.groups, -np.inf), np.full(self.groups, np.inf)
        np.maximum.at(high, self.group, self.net_reward)
        np.minimum.at(low, self.group, self.net_reward)
        return high - low > EPSILON

    @property
    def written(self) -> Ints:
        """[N] tokens that the policy wrote."""
        ends = np.concatenate([[0], np.cumsum(self.own)])
        return ends[self.start[1:]] - ends[self.start[:-1]]

    def mean(self, values: npt.NDArray, rows: Mask | None = None) -> Doubles:
        """[G] the mean of [N] values over the rows of each group, or over some of them; NaN without any."""
        chosen = slice(None) if rows is None else rows
        group = self.group[chosen]
        sums = np.bincount(group, np.asarray(values)[chosen], self.groups)
        with np.errstate(invalid="ignore"):
            return sums / np.bincount(group, minlength=self.groups)

    def sums(self, values: npt.NDArray) -> Doubles:
        """[N] sums of [T] values over the tokens of each row that the policy wrote."""
        total = np.bincount(self.by_token(np.arange(len(self))), values * self.own, len(self))
        return total.astype(np.float64, copy=False)

    def by_token(self, values: npt.NDArray) -> npt.NDArray:
        """[T] of [N] values, for each token that of its row."""
        return np.repeat(values, self.length)

    def at(self, row: int) -> slice:
        """Where the tokens of a row are."""
        return slice(int(self.start[row]), int(self.start[row + 1]))

    def of_row(self, row: int, values: npt.NDArray) -> npt.NDArray:
        """Those of [T] values that belong to tokens of a row that the policy wrote."""
        at = self.at(row)
        return values[at][self.own[at]]

    def answer(self, row: int) -> Rollout:
        """The tokens of a row as an engine gives them."""
        at = self.at(row)
        own = self.own[at]
        return Rollout(self.token[at], bool(self.finished[row]), written=None if own.all() else own)

    def places(self, rows: Ints) -> Ints:
        """The tokens of some rows, in the order of the rows."""
        length = self.length[rows]
        ends = np.cumsum(length)
        return np.repeat(self.start[:-1][rows] - ends + length, length) + np.arange(ends[-1] if len(ends) else 0)

    @cached_property
    def group_start(self) -> Ints:
        """[G + 1] where the rows of each group of a whole batch begin, and the end of the last one."""
        return np.searchsorted(self.group, np.arange(self.groups + 1))

    def rows_of(self, groups: Iterable[int]) -> Ints:
        """The rows of some groups of a whole batch, in the order of the groups."""
        parts = [np.arange(*self.group_start[group : group + 2]) for group in groups]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def take(self, rows: Ints | Mask) -> "StepBatch":
        """Some rows, by number in any order or by a mask [N]; the groups stay as they are."""
        rows = np.flatnonzero(rows) if np.asarray(rows).dtype == bool else np.asarray(rows, np.int64)
        places = self.places(rows)
        part = StepBatch(self.question, self.group[rows], self.length[rows])
        part.fill(**dict(self._columns(OF_GROUP)))
        part.fill(**{name: values[rows] for name, values in self._columns(OF_ROW)})
        part.fill(**{name: values[places] for name, values in self._columns(OF_TOKEN)})
        return part

    def of_groups(self, groups: Sequence[int] | Ints) -> "StepBatch":
        """Some groups of a whole batch with their rows, numbered anew in the given order."""
        numbers = np.asarray(groups, np.int64)
        if np.array_equal(numbers, np.arange(self.groups)):
            return self
        part = self.take(self.rows_of(numbers))
        rows = np.bincount(self.group, minlength=self.groups)[numbers]
        again = StepBatch(self.question[numbers], np.repeat(np.arange(len(numbers)), rows), part.length)
        again.fill(**{name: values[numbers] for name, values in self._columns(OF_GROUP)})
        again.fill(**{name: getattr(part, name) for name, _ in part._columns(OF_ROW | OF_TOKEN)})
        return again

    def beside(self, other: "StepBatch") -> "StepBatch":
        """These rows, and behind them in each group those of another batch with the same groups."""
        whole = self._and(other, self.question, other.group)
        whole = whole.take(np.argsort(whole.group, kind="stable"))
        whole.fill(**dict(self._columns(OF_GROUP)))
        return whole._with_counts(self)

    def behind(self, other: "StepBatch") -> "StepBatch":
        """These groups, and those of another batch behind them."""
        whole = self._and(other, np.concatenate([self.question, other.question]), other.group + self.groups)
        for name, values in self._columns(OF_GROUP):
            if other.has(name):
                whole.fill(**{name: np.concatenate([values, getattr(other, name)])})
        return whole._with_counts(self, other)

    def _and(self, other: "StepBatch", question: Ints, group: Ints) -> "StepBatch":
        """The rows of both."""
        both = (self, other)
        whole = StepBatch(question, np.concatenate([self.group, group]), np.concatenate([self.length, other.length]))
        for name in OF_ROW | OF_TOKEN:
            if any(part.has(name) for part in both):
                columns = [part._or_nothing(name) for part in both]
                join = KeptSets.joined if COLUMNS[name] is KeptSets else np.concatenate
                whole.fill(**{name: join(columns)})
        return whole

    def _with_counts(self, *parts: "StepBatch") -> "StepBatch":
        counts = [part.counts for part in parts if part.has("counts")]
        if counts:
            self.counts = counts[0] if len(counts) == 1 else counts[0] + counts[1]
        return self

    def _or_nothing(self, name: str) -> Any:
        """A column, or one of nothing."""
        if self.has(name):
            return getattr(self, name)
        dtype = COLUMNS[name]
        if dtype is KeptSets:
            return KeptSets.whole(self._size(name))
        nothing = None if dtype is np.object_ else np.nan if np.issubdtype(dtype, np.floating) else 0
        return np.full(self._size(name), 1 if name == "factor" else nothing, dtype)

    def _columns(self, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
        """Those of some columns that are filled."""
        return ((name, getattr(self, name)) for name in names if self.has(name))


def _objects(values: Iterable[Any]) -> Objects:
    """An array of objects, whatever they are."""
    if isinstance(values, np.ndarray) and values.dtype == object:
        return values
    values = list(values)
    array = np.empty(len(values), object)
    for i, value in enumerate(values):
        array[i] = value
    return array


def _flat(values: Sequence[npt.NDArray | None], length: Sequence[int], dtype: Any, nothing: Any) -> npt.NDArray:
    """The values of all rows, end to end; of rows without any, `nothing`."""
    parts = [np.full(n, nothing, dtype) if of_row is None else of_row for of_row, n in zip(values, length, strict=True)]
    return np.concatenate([np.empty(0, dtype), *parts]).astype(dtype, copy=False)
