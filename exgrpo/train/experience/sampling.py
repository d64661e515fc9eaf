"""Which buffered questions are replayed: a law over buckets, uniform inside a bucket (section 3.2)."""

import numpy as np
import numpy.typing as npt

LAWS = ("gaussian", "uniform", "linear", "sqrt", "linear_clip", "random")


def bucket_log_weights(
    law: str, samples: int, *, mu: float = 0.5, sigma: float = 1.0
) -> npt.NDArray[np.float64] | None:
    """[K-1] logarithms of the unnormalised weights of the buckets k = 1..K-1.

    gaussian: -(k - mu K)^2 / (2 sigma^2), sigma in counts; uniform: 1; linear: k/K; sqrt: sqrt(k/K);
    linear_clip: min(k/K, 1/2). Logarithms, so that no width makes every non-empty bucket's weight vanish.
    random has none, which is None: buckets do not matter, every buffered question is equally likely.
    """
    k = np.arange(1, samples, dtype=np.float64)
    fraction = k / samples
    match law:
        case "gaussian":
            return -((k - mu * samples) ** 2) / (2 * sigma**2)
        case "uniform":
            return np.zeros_like(k)
        case "linear":
            return np.log(fraction)
        case "sqrt":
            return 0.5 * np.log(fraction)
        case "linear_clip":
            return np.log(np.minimum(fraction, 0.5))
        case "random":
            return None
    raise ValueError(f"law: unknown sampling law {law!r}; expected one of {', '.join(LAWS)}")


def draw_questions(
    rng: np.random.Generator, bucket: npt.NDArray[np.int16], count: int, log_weights: npt.NDArray[np.float64] | None
) -> npt.NDArray[np.int64]:
    """Draw `count` distinct buffered questions.

    Numbers per bucket are multinomial over the non-empty buckets; members uniform without replacement. What a
    bucket cannot supply goes one at a time to buckets with room, by the same weights.

    Args:
        rng: generator that is advanced.
        bucket: [Q] bucket of each question, 0 where it is not buffered.
        count: at most the number of buffered questions.
        log_weights: [K-1] from `bucket_log_weights`; None: every buffered question is equally likely.

    Returns:
        [count] indices of questions, ordered by bucket (None: in any order).
    """
    buffered = np.flatnonzero(bucket)
    if count > len(buffered):
        raise ValueError(f"count: {count} questions asked for, {len(buffered)} are buffered")
    if count == 0:
        return np.empty(0, dtype=np.int64)
    if log_weights is None:
        return rng.choice(buffered, count, replace=False).astype(np.int64)
    members = [np.flatnonzero(bucket == k) for k in range(1, len(log_weights) + 1)]
    room = np.array([len(of_bucket) for of_bucket in members], dtype=np.int64)
    taken = np.minimum(rng.multinomial(count, _probabilities(log_weights, room)), room)
    while taken.sum() < count:
        taken[rng.choice(len(room), p=_probabilities(log_weights, room - taken))] += 1
    drawn = [rng.choice(of_bucket, n, replace=False) for of_bucket, n in zip(members, taken, strict=True)]
    return np.concatenate(drawn).astype(np.int64)


def _probabilities(log_weights: npt.NDArray[np.float64], room: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    masked = np.where(room > 0, log_weights, -np.inf)
    weights = np.exp(masked - masked.max())
    return weights / weights.sum()
