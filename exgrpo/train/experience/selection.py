"""Which stored success of a drawn question is replayed (section 3.2: the lowest entropy now)."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from exgrpo.train.records import Trajectory

RULES = ("lowest_entropy", "highest_entropy", "lowest_nll", "shortest", "random")


def select_trajectory(
    rule: str,
    candidates: Sequence[Trajectory],
    *,
    entropy: npt.NDArray[np.float32] | None = None,
    nll: npt.NDArray[np.float32] | None = None,
    rng: np.random.Generator,
) -> Trajectory:
    """Choose one of the stored successes of a question; among equals the oldest.

    Args:
        rule: one of `RULES`.
        candidates: non-empty.
        entropy: [len(candidates)] mean token entropy under the current policy, for the entropy rules.
        nll: [len(candidates)] mean negative log-probability under the current policy, for lowest_nll.
        rng: advanced by `random` only.
    """
    if rule == "lowest_entropy" and entropy is not None:
        return candidates[int(np.argmin(entropy))]
    if rule == "highest_entropy" and entropy is not None:
        return candidates[int(np.argmax(entropy))]
    if rule == "lowest_nll" and nll is not None:
        return candidates[int(np.argmin(nll))]
    if rule == "shortest":
        return min(candidates, key=lambda candidate: len(candidate.response))
    if rule == "random":
        return candidates[int(rng.integers(len(candidates)))]
    raise ValueError(f"rule: {rule!r} is unknown or lacks its scores; rules are {', '.join(RULES)}")
