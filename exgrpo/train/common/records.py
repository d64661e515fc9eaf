"""Answers as engines give them, and what a policy says of their tokens. R response tokens."""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import reduce
from itertools import pairwise
from operator import add
from typing import Literal

import numpy as np
import numpy.typing as npt

from exgrpo.train.common.errors import shown

TokenIds = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]
Places = slice | npt.NDArray[np.int64] | Mask
LogProbSource = Literal["trainer", "engine", "unknown"]

SHARED = 32
"""Tokens from which on what prompts begin with is read once: fewer take no time that one would notice."""


def shared_prefix(prompts: Sequence[TokenIds]) -> int:
    """Return the number of tokens that all prompts begin with and go on after; 0: too few to be read once."""
    if len(prompts) < 2:
        return 0
    width = min(map(len, prompts)) - 1
    differs = np.zeros(width + 1, bool)
    differs[width] = True
    for prompt in prompts:
        differs[:width] |= prompt[:width] != prompts[0][:width]
    found = int(differs.argmax())
    return found if found >= SHARED else 0


@dataclass(frozen=True, eq=False)
class AllowedTokens:
    """The sets that T tokens were sampled from, concatenated; an empty set means the whole vocabulary.

    It has a length, and is indexed as an array [T] is: by a slice, which copies no ids, or by places in any order.

    Attributes:
        ids: [M] int32, the token ids of all sets, distinct in each, the sampled token among them.
        bounds: [T + 1] int64: the set of token t is ids[bounds[t]:bounds[t + 1]].
    """

    ids: TokenIds
    bounds: npt.NDArray[np.int64]

    @classmethod
    def from_sizes(cls, sizes: Sequence[int] | npt.NDArray, ids: TokenIds) -> "AllowedTokens":
        """Return sets from their sizes [T] and all of their ids."""
        return cls(ids, np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]))

    @classmethod
    def from_lists(cls, sets: Sequence[npt.ArrayLike]) -> "AllowedTokens":
        """Return the sets [T] from the ids of each."""
        ids = [np.asarray(of_token, np.int32) for of_token in sets]
        return cls.from_sizes([len(of_token) for of_token in ids], np.concatenate([np.empty(0, np.int32), *ids]))

    @classmethod
    def whole(cls, tokens: int) -> "AllowedTokens":
        """Return the whole vocabulary for each of some tokens."""
        return cls(np.empty(0, np.int32), np.zeros(tokens + 1, np.int64))

    @classmethod
    def joined(cls, parts: Sequence["AllowedTokens"]) -> "AllowedTokens":
        """Concatenate the sets of several parts."""
        sizes = [np.empty(0, np.int64), *(part.sizes for part in parts)]
        return cls.from_sizes(np.concatenate(sizes), np.concatenate([np.empty(0, np.int32), *(p.ids for p in parts)]))

    @classmethod
    def from_parts(cls, parts: Sequence["AllowedTokens | None"], length: Sequence[int]) -> "AllowedTokens | None":
        """Concatenate the sets of parts with so many tokens each; a part without sets means the full vocabulary.

        None: no part has any.
        """
        if all(part is None for part in parts):
            return None
        return cls.joined([part or cls.whole(tokens) for part, tokens in zip(parts, length, strict=True)])

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def shape(self) -> tuple[int]:
        """(T,), as of a column of tokens."""
        return (len(self),)

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """[T] number of ids in each; 0: the whole vocabulary."""
        return np.diff(self.bounds)

    def lists(self) -> list[npt.NDArray[np.int32]]:
        """[T] the ids of each."""
        return [self.ids[start:end] for start, end in pairwise(self.bounds.tolist())]

    def __getitem__(self, places: Places) -> "AllowedTokens":
        """Return the sets of some tokens."""
        if isinstance(places, slice):
            start, end, _ = places.indices(len(self))
            bounds = self.bounds[start : max(start, end) + 1]
            return AllowedTokens(self.ids[bounds[0] : bounds[-1]], bounds - bounds[0])
        sizes = self.sizes[places]
        ends = np.cumsum(sizes)
        at = np.repeat(self.bounds[:-1][places] - ends + sizes, sizes) + np.arange(int(sizes.sum()))
        return AllowedTokens.from_sizes(sizes, self.ids[at])


@dataclass(frozen=True, eq=False)
class Rollout:
    """One sampled answer.

    Attributes:
        response: [R] token ids. A finished answer ends with the EOS token or with the token that completes a stop
            string (and may hold more text after it): the policy wrote that token, so it is scored, trained on and
            stored as all others. Before it there is neither of them.
        finished: False where the answer was cut at the length limit.
        log_prob: [R] fp32, the engine's own log-probability of each token under the policy that it sampled from, at the
            sampling temperature and among the allowed tokens; or None where it has none.
        entropy: [R] fp32, the entropy in nats of that policy where the token was sampled; or None.
        response_mask: [R] True if the policy wrote the token; None: all. Log-probs and entropies of observations
            are 0; before one, the response may hold EOS tokens and stop strings.
        allowed_tokens: [R] the set that each token was sampled from; None: the whole vocabulary, or not requested.
    """

    response: TokenIds
    finished: bool
    log_prob: npt.NDArray[np.float32] | None = None
    entropy: npt.NDArray[np.float32] | None = None
    response_mask: Mask | None = None
    allowed_tokens: AllowedTokens | None = None

    @classmethod
    def joined(cls, parts: Sequence["Rollout"], *, finished: bool) -> "Rollout":
        """Concatenate the parts of an answer.

        Where a part lacks log-probs or entropies that another one has, they are NaN, and 0 for observations.
        """
        length = [len(part.response) for part in parts]
        masks = [
            np.ones(tokens, bool) if part.response_mask is None else part.response_mask
            for part, tokens in zip(parts, length, strict=True)
        ]

        def numbers(values: Sequence[npt.NDArray[np.float32] | None]) -> npt.NDArray[np.float32] | None:
            if all(of_part is None for of_part in values):
                return None
            missing = (np.where(mask, np.float32(np.nan), np.float32(0)) for mask in masks)
            return np.concatenate([none if of is None else of for none, of in zip(missing, values, strict=True)])

        mask = np.concatenate(masks)
        return cls(
            np.concatenate([part.response for part in parts]),
            finished,
            log_prob=numbers([part.log_prob for part in parts]),
            entropy=numbers([part.entropy for part in parts]),
            response_mask=None if mask.all() else mask,
            allowed_tokens=AllowedTokens.from_parts([part.allowed_tokens for part in parts], length),
        )


@dataclass(frozen=True, eq=False)
class Score:
    """The T response tokens of a batch under a policy, among their allowed tokens; 0 for observations.

    Attributes:
        log_prob: [T] fp32 log-probability of each token, at the temperature that was asked for.
        entropy: [T] fp32 entropy in nats where the token was predicted, at the same temperature.
    """

    log_prob: npt.NDArray[np.float32]
    entropy: npt.NDArray[np.float32]


@dataclass(frozen=True)
class EngineCounts:
    """Counts of an engine since the last request for them, on this rank.

    Attributes:
        prompt_tokens: of all prompts, once per answer.
        cached_tokens: those of them that came from the prefix cache.
        asleep_seconds: time between `sleep` and `wake` or `push_weights`; 0 where sleeping frees nothing.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    asleep_seconds: float = 0.0

    def __add__(self, other: "EngineCounts") -> "EngineCounts":
        return EngineCounts(*map(add, astuple(self), astuple(other)))


@dataclass(frozen=True)
class Failure:
    """Answers that a reward could not grade, for causes of one kind; crosses process borders.

    Attributes:
        reward: its name.
        cause: what became of the first one.
        question: of the first one.
        gold: the right answer to it.
        response: the first one.
        count: how many they are.
    """

    reward: str
    cause: str
    question: str
    gold: str
    response: str
    count: int = 1

    @property
    def kind(self) -> tuple[str, str]:
        """The reward, and the type of its exception or another cause."""
        return self.reward, self.cause.partition(":")[0]

    def __str__(self) -> str:
        return (
            f"reward {self.reward!r} failed on an answer to {shown(self.question)}, which is therefore worth 0: "
            f"{self.cause}. Further failures of this kind are only counted"
        )


def by_kind(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    """Add up failures of one kind, in the order of the first ones."""
    kinds: dict[tuple[str, str], Failure] = {}
    for one in failures:
        first = kinds.get(one.kind)
        kinds[one.kind] = replace(first, count=first.count + one.count) if first else one
    return tuple(kinds.values())


@dataclass(frozen=True)
class Counts:
    """Counts and seconds of generating and grading answers.

    Attributes:
        answers: how many there are.
        timed_out: answers that were graded 0 because grading took too long.
        failed: answers graded 0 because the reward function failed.
        generate_seconds: time in the engine.
        grade_seconds: time in which the grader was still at work after the engine.
        engine: what the engine counted.
        broken: answers that ended because the environment failed; None: there is no environment.
        failures: answers that timed out or failed, by kind.
    """

    answers: int
    timed_out: int
    failed: int
    generate_seconds: float
    grade_seconds: float
    engine: EngineCounts
    broken: int | None = None
    failures: tuple[Failure, ...] = ()

    def __add__(self, other: "Counts") -> "Counts":
        """Add the counts of answers that were requested afterwards."""
        return Counts(
            answers=self.answers + other.answers,
            timed_out=self.timed_out + other.timed_out,
            failed=self.failed + other.failed,
            generate_seconds=self.generate_seconds + other.generate_seconds,
            grade_seconds=self.grade_seconds + other.grade_seconds,
            engine=self.engine + other.engine,
            broken=None if self.broken is None else self.broken + (other.broken or 0),
            failures=by_kind((*self.failures, *other.failures)),
        )

    @classmethod
    def together(cls, of_ranks: Sequence["Counts"]) -> "Counts":
        """Combine the counts of ranks that work at the same time: the longest time counts."""
        total = reduce(add, of_ranks)
        asleep = max(of_rank.engine.asleep_seconds for of_rank in of_ranks)
        return replace(
            total,
            generate_seconds=max(of_rank.generate_seconds for of_rank in of_ranks),
            grade_seconds=max(of_rank.grade_seconds for of_rank in of_ranks),
            engine=replace(total.engine, asleep_seconds=asleep),
        )

    @property
    def failed_fraction(self) -> float:
        """Fraction of answers that timed out or failed."""
        return (self.timed_out + self.failed) / max(self.answers, 1)
