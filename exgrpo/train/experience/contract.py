"""What each of the five functions has to give, and what is wrong with what it gave.

Each check takes what a function gave and what it was called with, and returns a sentence, or None: it is right.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from exgrpo.train.errors import shown
from exgrpo.train.experience.plan import PlannedGroup
from exgrpo.train.experience.sampling import Priority
from exgrpo.train.experience.units import Expired, Units
from exgrpo.train.experience.weighing import ReplayedAnswer, Weighed
from exgrpo.train.records import Group, Trajectory

STORED = "it gives a list of those answers of group.fresh that are stored"
WEIGHTS = "it gives Priority(log_weight), with a number for each unit"
PLANNED = "it gives a list of PlannedGroup, as supply.fresh and supply.alone do"
SETTLED = "it gives a list of graded groups, and of planned ones without fresh answers"
EXPIRED = "it gives Expired(rows, questions), rows with a bool for each unit, questions with their indices"
TERMS = "it gives a list with one Weighed for each answer"


def stored(given: Any, group: Group, *_: Any) -> str | None:
    """Of `admit`."""
    return _list_of(given, Trajectory, STORED)


def weights(given: Any, units: Units, *_: Any) -> str | None:
    """Of `prioritise`."""
    if not isinstance(given, Priority):
        return f"{_gave(given)}; {WEIGHTS}"
    log_weight, stratum = given
    for values, kinds in ((log_weight, "fiu"), (stratum, "iu")):
        if values is not None and not (
            isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in kinds
        ):
            return f"{_gave(values)} in a Priority; {WEIGHTS}"
    of_units = stratum if stratum is not None else log_weight
    if of_units is not None and len(of_units) != len(units):
        return f"it gave {len(of_units)} numbers for {len(units)} units"
    if log_weight is None or not len(log_weight):
        return None
    if stratum is not None and not (stratum.min() >= 0 and stratum.max() < len(log_weight)):
        return f"its strata are {stratum.min()} to {stratum.max()}, and it gave {len(log_weight)} weights of strata"
    largest = log_weight.max()
    if not largest < np.inf:
        return f"a logarithm of a weight is {largest}"
    return "all logarithms of weights are -inf, so that nothing can be drawn" if largest == -np.inf else None


def planned(given: Any, *_: Any) -> str | None:
    """Of `compose`."""
    return _list_of(given, PlannedGroup, PLANNED)


def settled(given: Any, *_: Any) -> str | None:
    """Of the function `settle` of a `compose`."""
    if wrong := _list_of(given, Group | PlannedGroup, SETTLED):
        return wrong
    late = [one.fresh for one in given if isinstance(one, PlannedGroup) and one.fresh]
    return f"it plans {late[0]} fresh answers when all have been graded; {SETTLED}" if late else None


def expired(given: Any, units: Units, *_: Any) -> str | None:
    """Of `expire`."""
    if not isinstance(given, Expired):
        return f"{_gave(given)}; {EXPIRED}"
    rows, questions = given
    if rows is not None and not (isinstance(rows, np.ndarray) and rows.dtype == bool):
        return f"{_gave(rows)} as its rows; {EXPIRED}"
    if rows is not None and rows.shape != (len(units),):
        return f"it gave rows of the shape {rows.shape} for {len(units)} units"
    if questions is not None and not (isinstance(questions, np.ndarray) and questions.dtype.kind in "iu"):
        return f"{_gave(questions)} as its questions; {EXPIRED}"
    return None


def terms(given: Any, answers: Sequence[ReplayedAnswer], *_: Any) -> str | None:
    """Of `weigh`; numbers that would spoil the update are wrong, too."""
    if wrong := _list_of(given, Weighed, TERMS):
        return wrong
    if len(given) != len(answers):
        return f"it gave {len(given)} terms for {len(answers)} replayed answers; {TERMS}"
    return next(filter(None, map(_term, given, answers)), None)


def _term(term: Weighed, answer: ReplayedAnswer) -> str | None:
    factor = np.ones_like(answer.log_prob) if term.factor is None else term.factor
    for name, values in (("reference", term.reference), ("factor", factor)):
        if np.shape(values) != answer.log_prob.shape:
            return f"a {name} has the shape {np.shape(values)} for an answer of {len(answer.log_prob)} tokens"
    # Whatever is computed in a wider dtype has to fit into fp32. Minima and maxima keep a NaN.
    with np.errstate(over="ignore"):
        reference, factor = np.asarray(term.reference, np.float32), np.asarray(factor, np.float32)
    least = float(reference.min())
    if not least > -np.inf:
        return f"a log-prob of the reference is {least}"
    if not np.isfinite(factor).all():
        return f"a factor of the advantage is {factor[~np.isfinite(factor)][0]}"
    if term.advantage is not None and not np.isfinite(term.advantage):
        return f"an advantage is {term.advantage}"
    if term.advantage is None and factor.min() < 0:
        return f"a factor of an answer's own advantage is negative: {factor.min()}"
    return None


def _list_of(given: Any, of: Any, right: str) -> str | None:
    if not isinstance(given, list | tuple):
        return f"{_gave(given)}; {right}"
    wrong = [one for one in given if not isinstance(one, of)]
    return f"{_gave(wrong[0])} in its list; {right}" if wrong else None


def _gave(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"it gave an array {list(value.shape)} of {value.dtype}"
    return f"it gave {shown(value)} ({type(value).__name__})"


CHECKS: dict[str, Callable[..., str | None]] = {
    "admit": stored,
    "prioritise": weights,
    "compose": planned,
    "settle": settled,
    "expire": expired,
    "weigh": terms,
}
"""Of each kind of function."""
