"""Tasks with generated questions, each a module with a function `generate`, and what all of them do alike.

The splits share no problem, and each problem of a split is another one.
"""

from collections.abc import Callable, Collection
from hashlib import sha256
from random import Random
from typing import Literal, TypeVar

from exgrpo.train.common.errors import DataError, shown

Split = Literal["pretrain", "train", "test"]

DRAWS_PER_PROBLEM = 100
"""Average draws per problem after which a split counts as exhausted."""

_TENTHS: dict[Split, range] = {"pretrain": range(5), "train": range(5, 8), "test": range(8, 10)}

P = TypeVar("P")


def split_of_key(key: str) -> Split:
    """Return the split of the problem with this canonical form, decided by a hash."""
    tenth = int.from_bytes(sha256(key.encode()).digest()[:8], "big") % 10
    return next(split for split, tenths in _TENTHS.items() if tenth in tenths)


def different_problems(
    draw: Callable[[Random], P], key_of: Callable[[P], str], split: Split, count: int, seed: int
) -> list[P]:
    """Return `count` problems of the split with different keys, deterministic in the arguments.

    `draw` samples a problem of any split; `key_of` returns its canonical form, which identifies it and decides its
    split. Raises DataError if the split does not exist or has too few different problems.
    """
    if split not in _TENTHS:
        raise DataError(f"there is no split {shown(split)}; there is {', '.join(_TENTHS)}")
    rng = Random(f"{split}:{seed}")
    problems: dict[str, P] = {}
    for _ in range(count * DRAWS_PER_PROBLEM):
        if len(problems) == count:
            break
        problem = draw(rng)
        key = key_of(problem)
        if key not in problems and split_of_key(key) == split:
            problems[key] = problem
    if len(problems) < count:
        raise DataError(
            f"the {split} split has too few different problems for a count of {count}: ask for fewer, or for another "
            "difficulty"
        )
    return list(problems.values())


def check_difficulty(difficulty: int, known: Collection[int]) -> None:
    """Raise DataError if the difficulty does not exist."""
    if difficulty not in known:
        raise DataError(f"difficulty is one of {', '.join(map(str, known))}, not {difficulty!r}")
