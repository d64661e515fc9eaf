"""Candidates of replay as columns, draws by weight, and the choice among the stored answers to a question.

Candidates are questions, prompts or stored trajectories. They are drawn without replacement.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from exgrpo.train.common.columns import columns_of
from exgrpo.train.common.errors import ConfigError
from exgrpo.train.common.records import Score
from exgrpo.train.common.step_batch import Doubles, Floats, Ints, StepBatch
from exgrpo.train.config.replay import TrajectoryRule

KNOWN = ("question", "count", "step", "reward", "advantage", "replays", "length", "key", "drift", "headroom")
"""Columns of candidates."""
ROUNDS = 8
"""Rounds of draws, after which a few candidates outweigh all others, and the rest is drawn by a race."""
BLOCK = 256
"""Candidates per partial sum of weights."""
MOST = 1 << 14
"""Draws per round, of 2 KiB each."""
SMALLEST = 1e-200
"""Sum of weights below which they have lost their digits."""
FARTHEST = 1e4
"""Nats between a weight of 0 and the smallest other one."""


class Candidates:
    """N candidates as columns [N].

    Stored trajectories have all columns. Questions with stored trajectories have those of their newest one. Prompts
    have only `question`, `count`, `step`, `replays` and, as `reward`, their latest pass rate.

    Args:
        now: the step to plan.
        read: returns the column of a name; it is called once, on first access.
        solved: [S] questions that all answers of the latest step solve.

    Attributes:
        question: Index of the question.
        count: The question's success count by its latest group, k = K m / F: in [1, K-1], of prompts in [0, K].
        step: Training step in which the trajectory was written, or the prompt asked.
        reward: Reward from the verifier.
        advantage: Advantage in the group that it was written in.
        replays: Number of replays, or of further steps that asked the prompt.
        length: Number of response tokens.
        key: Key of its solution; 0: none.
        drift: Mean square of the changes of its log-probs from when it was written to when it was scored last.
        headroom: Mean of 1 - p over its tokens if its advantage is positive, of p if it is negative, with their
            probabilities p when it was scored last; 0: without an advantage.
    """

    def __init__(self, now: int, read: Callable[[str], npt.NDArray], solved: Ints | None = None) -> None:
        self.now = now
        self.solved = np.empty(0, np.int64) if solved is None else solved
        self._read = read

    @classmethod
    def of(cls, now: int, **columns: npt.NDArray) -> "Candidates":
        """Candidates with these columns alone.

        Raises, when another one is read:
            ConfigError: these candidates do not have it.
        """

        def read(name: str) -> npt.NDArray:
            if name not in columns:
                raise ConfigError(
                    f"experience.prioritise looks at {name!r}, which is not known of what is drawn here: there are "
                    f"{', '.join(columns)}; take another function"
                )
            return columns[name]

        return cls(now, read)

    def __getattr__(self, name: str) -> npt.NDArray:
        if name not in KNOWN and name not in columns_of("row", stored=True):
            raise AttributeError(f"candidates have no {name}", name=name, obj=self)
        values = vars(self)[name] = self._read(name)
        return values

    def __dir__(self) -> set[str]:
        return {*super().__dir__(), *KNOWN}

    def __len__(self) -> int:
        return len(self.question)

    def take(self, places: npt.NDArray | slice) -> "Candidates":
        """Select candidates by numbers [M], a mask [N] or a slice."""
        return Candidates(self.now, lambda name: self._read(name)[places], self.solved)

    @property
    def age(self) -> Ints:
        """Steps since `step`."""
        return self.now - self.step

    @property
    def accuracy(self) -> Doubles:
        """Fraction of successes m / F of the group that it was written in; 0 where it is unknown."""
        return self._read("successes") / np.maximum(self._read("answers"), 1)


class Expired(NamedTuple):
    """Result of a function `expire`: trajectories and questions to drop.

    Attributes:
        rows: [N] bool, stored trajectories to forget; None: none.
        questions: [S] indices of questions that leave for good, with all their trajectories; None: none.
    """

    rows: npt.NDArray[np.bool_] | None = None
    questions: Ints | None = None


class Priority(NamedTuple):
    """Result of a function `prioritise`: sampling weights of N candidates.

    Attributes:
        log_weight: logarithms of unnormalised weights, so that no option makes all vanish: [N] of candidates, or
            [S] of strata; None: all candidates have the same weight.
        stratum: [N] int, the stratum of each candidate, 0..S-1, whose candidates are equally likely. None: no strata.
    """

    log_weight: Doubles | None = None
    stratum: Ints | None = None


def draw(rng: np.random.Generator, size: int, wanted: int, priority: Priority) -> Ints:
    """Draw `wanted` of `size` candidates without replacement, each by the weights of those that are left.

    With strata, their numbers are multinomial and their members uniform without replacement; what a stratum lacks goes
    one at a time to those with room, by the same weights.

    Args:
        rng: generator that is advanced.
        size: N.
        wanted: at most N.
        priority: of these candidates.

    Returns:
        [wanted] numbers of candidates; with strata ordered by stratum, else in the order of their drawing.
    """
    if wanted == 0:
        return np.empty(0, dtype=np.int64)
    if priority.log_weight is None:
        return rng.choice(size, wanted, replace=False).astype(np.int64)
    if priority.stratum is None:
        return _draw_weighted(rng, priority.log_weight, wanted)
    return _draw_strata(rng, priority.log_weight, priority.stratum, wanted)


def _draw_weighted(rng: np.random.Generator, log_weight: Doubles, wanted: int) -> Ints:
    # Independent draws without the repeated ones have the law of drawing one after the other. A race of all candidates
    # has the same law, but takes 26 ms for a million of them, and this 3 to 7 ms.
    flat = np.zeros(-(-len(log_weight) // BLOCK) * BLOCK)
    if np.isfinite(largest := log_weight.max()):
        np.exp(log_weight - largest, out=flat[: len(log_weight)])
    weight = flat.reshape(-1, BLOCK)  # a view
    drawn: dict[int, None] = {}
    sums = np.cumsum(weight.sum(1))
    for _ in range(ROUNDS):
        if sums[-1] < SMALLEST:
            break
        before, missing = len(drawn), min(wanted - len(drawn), MOST)
        # First a block by its sum, then one of the block: a cumulative sum of all candidates would take longer.
        block = np.searchsorted(sums, rng.random(missing) * sums[-1], side="right")
        inner = np.cumsum(weight[block], axis=1)
        places = block * BLOCK + (inner <= (rng.random(missing) * inner[:, -1])[:, None]).sum(1)
        drawn |= dict.fromkeys(places.tolist())
        if len(drawn) == wanted:
            return np.array(list(drawn), np.int64)
        if 2 * (len(drawn) - before) < missing:
            flat[list(drawn)] = 0
            sums = np.cumsum(weight.sum(1))
    found = np.array(list(drawn), np.int64)
    left = np.delete(np.arange(len(log_weight)), found)
    return np.concatenate([found, left[_race(rng, log_weight[left], wanted - len(found))]])


def _race(rng: np.random.Generator, log_weight: Doubles, wanted: int) -> Ints:
    # Arrival times are exponential with the weights as rates, and the first ones win; exact for any weights.
    finite = np.isfinite(log_weight)
    last = log_weight[finite].min() - FARTHEST if finite.any() else 0.0
    time = np.log(rng.standard_exponential(len(log_weight))) - np.where(finite, log_weight, last)
    first = np.argpartition(time, wanted - 1)[:wanted]
    return first[np.argsort(time[first])]


def _draw_strata(rng: np.random.Generator, log_weight: Doubles, stratum: Ints, wanted: int) -> Ints:
    room = np.bincount(stratum, minlength=len(log_weight))
    taken = np.minimum(rng.multinomial(wanted, _probabilities(log_weight, room)), room)
    while taken.sum() < wanted:
        taken[rng.choice(len(room), p=_probabilities(log_weight, room - taken))] += 1
    drawn = [rng.choice(np.flatnonzero(stratum == s), n, replace=False) for s, n in enumerate(taken.tolist()) if n]
    return np.concatenate(drawn).astype(np.int64)


def _probabilities(log_weights: Doubles, room: Ints) -> Doubles:
    there = room > 0
    # Weights of 0 come last, and are alike then.
    weights = log_weights if np.isfinite(log_weights[there]).any() else np.zeros(len(room))
    masked = np.where(there, weights, -np.inf)
    weights = np.exp(masked - masked.max())
    return weights / weights.sum()


class MeanScores(NamedTuple):
    """N responses under the current policy at temperature 1: means over the tokens that it wrote, in nats.

    Attributes:
        entropy: [N].
        nll: [N] negative log-probability.
        log_prob: [T] of all tokens; None: not known.
    """

    entropy: Doubles
    nll: Doubles
    log_prob: Floats | None = None

    @classmethod
    def from_scores(cls, batch: StepBatch, score: Score) -> "MeanScores":
        """Average the scores of a batch over the tokens of each row."""
        entropy, log_prob = (
            np.array([float(batch.row_values(row, values).mean()) for row in range(len(batch))])
            for values in (score.entropy, score.log_prob)
        )
        return cls(entropy, -log_prob, score.log_prob)


Choose = Callable[[Ints, MeanScores, np.random.Generator], int]
"""Chooses one of C >= 1 stored answers, oldest first, by their lengths [C] and scores [C]; ties go to the first."""
RULES: dict[TrajectoryRule, Choose] = {
    "lowest_entropy": lambda length, scores, rng: int(np.argmin(scores.entropy)),
    "highest_entropy": lambda length, scores, rng: int(np.argmax(scores.entropy)),
    "lowest_nll": lambda length, scores, rng: int(np.argmin(scores.nll)),
    "shortest": lambda length, scores, rng: int(np.argmin(length)),
    "random": lambda length, scores, rng: int(rng.integers(len(length))),
}
"""Choices among the stored answers of a drawn question, by the name in `experience.trajectory`."""
UNSCORED = ("shortest", "random")
"""Rules that need no scores; the others take a pass through the model."""
