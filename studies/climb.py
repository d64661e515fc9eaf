"""Coordinate search: change one option at a time, and continue in a direction as long as it helps."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Choice = dict[str, Any]
"""A value of each searched option."""
Lines = Mapping[str, Sequence[Any]]
"""The values of each option, in order."""


@dataclass(frozen=True)
class Climb:
    """State of a search.

    Attributes:
        tried: all choices in order of trial.
        best: the best of them; None: unknown, since a run is missing.
        cut: True if the trials were used up before all neighbours of the best choice had been tried.
    """

    tried: Sequence[Choice]
    best: Choice | None
    cut: bool = False


def climb(
    starts: Sequence[Choice],
    lines: Lines,
    trials: int,
    beats: Callable[[Choice, Choice], bool | None],
    possible: Callable[[Choice], bool] = lambda _: True,
) -> Climb:
    """Search from the best start: every option in turn, up and down its line, until no neighbour is better.

    If the search is not cut, the neighbours of the best choice on both sides have been tried and are worse, are
    impossible, or do not exist.

    Args:
        starts: first choices; each value is one of its line.
        lines: values of each option.
        trials: maximum number of choices, including the first ones.
        beats: True if the first choice is better than the second; None: unknown yet.
        possible: True if a choice can be run. An impossible one is combined with the next lower value of another option
            if that makes it possible (fewer questions have room for fewer mini-batches); otherwise it is skipped.
    """
    tried, best, moved = [starts[0]], starts[0], True
    for start in starts[1:]:
        tried.append(start)
        better = beats(start, best)
        if better is None:
            return Climb(tried, None)
        best = start if better else best
    while moved:
        moved = False
        for option in lines:
            for way in (1, -1):
                while (near := _possible_neighbour(best, option, lines, way, possible)) and near not in tried:
                    if len(tried) == trials:
                        return Climb(tried, best, cut=True)
                    tried.append(near)
                    better = beats(near, best)
                    if better is None:
                        return Climb(tried, None)
                    if not better:
                        break
                    best, moved = near, True
    return Climb(tried, best)


def _possible_neighbour(
    choice: Choice, option: str, lines: Lines, way: int, possible: Callable[[Choice], bool]
) -> Choice | None:
    near = _neighbour(choice, option, lines[option], way)
    if near is None or possible(near):
        return near
    lower = [_neighbour(near, other, line, -1) for other, line in lines.items() if other != option]
    return next((one for one in lower if one is not None and possible(one)), None)


def _neighbour(choice: Choice, option: str, values: Sequence[Any], way: int) -> Choice | None:
    """Return the choice with the next value of an option; None at the end of its line."""
    place = values.index(choice[option]) + way
    return {**choice, option: values[place]} if 0 <= place < len(values) else None
