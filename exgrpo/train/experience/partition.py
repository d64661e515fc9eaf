"""How hard a question is for the current policy, read from a graded group: its success count, its bucket, its band."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from exgrpo.train.records import Group, Trajectory

EPSILON = 1e-6
"""Rewards that differ by less are equal."""


def counted_rows(group: Group, *, count_replayed: bool = False) -> Sequence[Trajectory]:
    """The rows that are evidence of the current policy: the fresh ones, with `count_replayed` all of them."""
    return group.rows if count_replayed else group.fresh


def estimate_successes(group: Group, samples: int, *, count_replayed: bool = False) -> int:
    """The success count k in 0..K that a group shows for its question under the current policy.

    The replayed row is no evidence of the current policy: k is the count m over the F fresh rows rescaled to
    K = `samples` and rounded half up. m of K stays m. `count_replayed` counts it instead (m + 1 of F + 1).
    k is 0 exactly when nothing counted succeeded and K exactly when everything did (K >= 2).
    """
    rows = counted_rows(group, count_replayed=count_replayed)
    right = sum(row.reward >= 1.0 for row in rows)
    if right in (0, len(rows)):
        return samples if right else 0
    rescaled = (2 * right * samples + len(rows)) // (2 * len(rows))
    return min(max(rescaled, 1), samples - 1)


def deviation_buckets(groups: Sequence[Group], samples: int, *, count_replayed: bool = False) -> npt.NDArray[np.int64]:
    """[len(groups)] buckets 1..K-1 for continuous rewards (arXiv 2510.02245, section 5.3).

    round(K * (sigma_q - min) / max(max - min, eps)), sigma_q the standard deviation of a group's counted rewards, min
    and max over the groups given (those of one step), rounded half up and kept inside 1..K-1.
    """
    if not groups:
        return np.empty(0, dtype=np.int64)
    sigma = np.array(
        [np.std([row.reward for row in counted_rows(group, count_replayed=count_replayed)]) for group in groups]
    )
    scaled = samples * (sigma - sigma.min()) / max(sigma.max() - sigma.min(), EPSILON)
    return np.clip(np.floor(scaled + 0.5).astype(np.int64), 1, samples - 1)


def in_band(successes: int, samples: int, band: str) -> bool:
    """Whether k of K successes fall into a band of the preliminary study (arXiv 2510.02245).

    easy: [75, 100) %, medium: (25, 75] %, hard: (0, 25] %. Exactly 75 % is in two of them, as the paper has it;
    each of its runs trains on one band. all: always.
    """
    match band:
        case "all":
            return True
        case "easy":
            return 3 * samples <= 4 * successes < 4 * samples
        case "medium":
            return samples < 4 * successes <= 3 * samples
        case "hard":
            return 0 < 4 * successes <= samples
    raise ValueError(f"band: unknown band {band!r}; expected all, easy, medium or hard")
