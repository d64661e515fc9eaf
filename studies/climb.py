"""A search that changes one option at a time, and goes on in a direction as long as it helps."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Choice = dict[str, Any]
"""A value of each option that is searched."""
Lines = Mapping[str, Sequence[Any]]
"""The values of each option in their order."""


@dataclass(frozen=True)
class Climb:
    """How far a search has come.

    Attributes:
        tried: all choices, in the order in which they were tried.
        best: the best of them; None: it is not known yet, since a run is missing.
        cut: whether the number of trials was at its end before all neighbours of the best choice had been tried.
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
    """Search from the best of some choices: every option in turn, up and down its line, until no neighbour is better.

    So the best choice of a search that is not cut has no value on an edge: the next values on both sides have been
    tried and are worse, or are impossible, or the line has no more of them.

    Args:
        starts: the first choices; each value is one of its line.
        lines: the values of each option.
        trials: how many choices are tried at most, the first ones included.
        beats: whether one choice is better than another; None: not known yet.
        possible: whether a choice can be run. In the place of one that cannot, the next lower value of another option
            is taken with it, if that helps: fewer questions have room for fewer mini-batches. Else it is no trial.
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
    """The choice with the next value of an option; None at the end of its line."""
    place = values.index(choice[option]) + way
    return {**choice, option: values[place]} if 0 <= place < len(values) else None
