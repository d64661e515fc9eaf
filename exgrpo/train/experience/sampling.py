"""Which buffered questions are replayed: a law over success counts, uniform among equal ones (section 3.2)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from exgrpo.train.experience.tables import look_up

Floats = npt.NDArray[np.float64]
LogWeights = Callable[[Floats], Floats]
"""Success counts k, in [1, K-1] and not rounded, to logarithms of unnormalised weights."""


@dataclass(frozen=True)
class LawSettings:
    """K = `samples`, and the centre (as a fraction of K) and width (in counts) of the Gaussian law."""

    samples: int
    mu: float
    sigma: float


LAWS: dict[str, Callable[[LawSettings, Floats], Floats] | None] = {
    "gaussian": lambda of, k: -((k - of.mu * of.samples) ** 2) / (2 * of.sigma**2),
    "uniform": lambda of, k: np.zeros_like(k),
    "linear": lambda of, k: np.log(k / of.samples),
    "sqrt": lambda of, k: 0.5 * np.log(k / of.samples),
    "linear_clip": lambda of, k: np.log(np.minimum(k / of.samples, 0.5)),
    "random": None,  # counts do not matter: every buffered question is equally likely
}
"""By the name that `experience.question_weight` gives the law: success counts k to logarithms of unnormalised weights.

Logarithms, so that no width makes the weight of every count vanish.
"""


def question_law(name: str, samples: int, *, mu: float = 0.5, sigma: float = 1.0) -> LogWeights | None:
    """The law of that name for K = `samples`; None where counts do not matter.

    Raises:
        ValueError: no law has that name.
    """
    law = look_up(LAWS, name, "sampling law")
    return None if law is None else partial(law, LawSettings(samples, mu, sigma))


def draw_questions(
    rng: np.random.Generator, count: Floats, wanted: int, law: LogWeights | None
) -> npt.NDArray[np.int64]:
    """Draw `wanted` distinct buffered questions.

    Numbers per success count are multinomial over the counts that occur; members uniform without replacement. What
    the questions of a count cannot supply goes one at a time to counts with room, by the same weights.

    Args:
        rng: generator that is advanced.
        count: [Q] success count of each question in [1, K-1], 0 where it is not buffered.
        wanted: at most the number of buffered questions.
        law: from `question_law`; None: every buffered question is equally likely.

    Returns:
        [wanted] indices of questions, ordered by success count (None: in any order).
    """
    buffered = np.flatnonzero(count)
    if wanted > len(buffered):
        raise ValueError(f"wanted: {wanted} questions asked for, {len(buffered)} are buffered")
    if wanted == 0:
        return np.empty(0, dtype=np.int64)
    if law is None:
        return rng.choice(buffered, wanted, replace=False).astype(np.int64)
    values = np.unique(count[buffered])
    members = [np.flatnonzero(count == value) for value in values]
    room = np.array([len(of_value) for of_value in members], dtype=np.int64)
    log_weights = law(values)
    taken = np.minimum(rng.multinomial(wanted, _probabilities(log_weights, room)), room)
    while taken.sum() < wanted:
        taken[rng.choice(len(room), p=_probabilities(log_weights, room - taken))] += 1
    drawn = [rng.choice(of_value, n, replace=False) for of_value, n in zip(members, taken, strict=True)]
    return np.concatenate(drawn).astype(np.int64)


def _probabilities(log_weights: Floats, room: npt.NDArray[np.int64]) -> Floats:
    masked = np.where(room > 0, log_weights, -np.inf)
    weights = np.exp(masked - masked.max())
    return weights / weights.sum()
