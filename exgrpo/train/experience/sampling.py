"""Which buffered questions are replayed: a law over success counts, uniform among equal ones (section 3.2)."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

LAWS = ("gaussian", "uniform", "linear", "sqrt", "linear_clip", "random")

LogWeights = Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]
"""Success counts k, in [1, K-1] and not rounded, to logarithms of unnormalised weights."""


def question_law(name: str, samples: int, *, mu: float = 0.5, sigma: float = 1.0) -> LogWeights | None:
    """The logarithm of the unnormalised weight of a success count k of K = `samples`.

    gaussian: -(k - mu K)^2 / (2 sigma^2), sigma in counts; uniform: 1; linear: k/K; sqrt: sqrt(k/K);
    linear_clip: min(k/K, 1/2). Logarithms, so that no width makes the weight of every count vanish.
    random has none, which is None: counts do not matter, every buffered question is equally likely.
    """
    match name:
        case "gaussian":
            return lambda k: -((k - mu * samples) ** 2) / (2 * sigma**2)
        case "uniform":
            return np.zeros_like
        case "linear":
            return lambda k: np.log(k / samples)
        case "sqrt":
            return lambda k: 0.5 * np.log(k / samples)
        case "linear_clip":
            return lambda k: np.log(np.minimum(k / samples, 0.5))
        case "random":
            return None
    raise ValueError(f"law: unknown sampling law {name!r}; expected one of {', '.join(LAWS)}")


def draw_questions(
    rng: np.random.Generator, count: npt.NDArray[np.float64], wanted: int, law: LogWeights | None
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


def _probabilities(log_weights: npt.NDArray[np.float64], room: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    masked = np.where(room > 0, log_weights, -np.inf)
    weights = np.exp(masked - masked.max())
    return weights / weights.sum()
