"""Results of the five functions of a method, and checks of the results of a user's functions.

`compose` returns planned groups; `prioritise` and `expire` return the records of `exgrpo.train.replay.candidates`.

`weigh(batch, options)` gets the N replayed answers of a step that are trained on, before its update, and returns
`Weighed` for their T tokens. With A the advantage, c the factor and w = pi / reference the importance ratio of a token,
its term in the objective is, by `needs(term=...)` of the function:

    "shaped"    f(w) c A, f(w) = w / (w + beta)
    "ratio"     w c A
    "clipped"   min(w c A, clip(w) c A): that of fresh tokens

With `needs(present="values")` the column `log_prob` is filled by the policy before the update, which takes a pass
through the model; with `needs(present="reference")` the function only passes them on as the reference, and there is no
pass if the update itself starts from that policy.

Each check takes the result and the arguments of a function, and returns what is wrong, or None.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from exgrpo.train.common.errors import shown
from exgrpo.train.common.step_batch import Doubles, Floats, StepBatch
from exgrpo.train.config.objective import MethodOptions
from exgrpo.train.replay.candidates import Candidates, Expired, Priority

PRESENT = np.float32(np.inf)
"""Stands for the log-prob of the policy itself: w = 1, with its gradient."""

PLANNED = "it gives a list of PlannedGroup, as planner.fresh and planner.alone do"
SETTLED = "it gives a list of numbers of graded groups, and of planned groups with stored answers by their rows"


@dataclass(frozen=True)
class PlannedGroup:
    """A group of a step before its answers are generated.

    Attributes:
        question: index of its question.
        fresh: number of answers to generate.
        choose: number of the question's stored answers that join, chosen by `experience.trajectory`.
        rows: further stored answers that join, as rows of the memory's table.
        prefix: first tokens of a stored answer, which all fresh ones begin with.
        given: share of that answer, in (0, 1] of a success and in [-1, 0) of a failure; 0: no prefix.
    """

    question: int
    fresh: int
    choose: int = 0
    rows: tuple[int, ...] = ()
    prefix: tuple[int, ...] = field(default=(), repr=False)
    given: float = field(default=0.0, repr=False)


class Weighed(NamedTuple):
    """Terms of N replayed answers with T tokens.

    Attributes:
        reference: [T] fp32 log-probs of the policy that ratios refer to, or `PRESENT`.
        factor: [T] fp32 factor of the advantage, at least 0 if `advantage` is None; None: 1.
        advantage: [N] replaces the answers' own; None: they keep them.
    """

    reference: Floats
    factor: Floats | None = None
    advantage: Doubles | None = None


WeighFunction = Callable[[StepBatch, MethodOptions], Weighed]


def _stored(given: Any, batch: StepBatch, *_: Any) -> str | None:
    if not _is_array(given, "b", len(batch)):
        return f"{_gave(given)}; it gives an array with a bool for each of the {len(batch)} rows, whether it is stored"
    return "it stores replayed rows, and only fresh ones can be stored" if (given & batch.replayed).any() else None


def _weights(given: Any, candidates: Candidates, *_: Any) -> str | None:
    right = f"it gives Priority(log_weight), with a number for each of {len(candidates)} candidates"
    if not isinstance(given, Priority):
        return f"{_gave(given)}; {right}"
    log_weight, stratum = given
    if stratum is not None and not _is_array(stratum, "iu", len(candidates)):
        return f"{_gave(stratum)} as its strata; it gives a stratum for each of {len(candidates)} candidates"
    if log_weight is None:
        return None
    if not _is_array(log_weight, "fiu", len(candidates) if stratum is None else np.size(log_weight)):
        return f"{_gave(log_weight)} in a Priority; {right}"
    if stratum is not None and len(candidates) and not 0 <= stratum.min() <= stratum.max() < len(log_weight):
        return f"its strata are {stratum.min()} to {stratum.max()}, and it gave {len(log_weight)} weights of strata"
    largest = log_weight.max() if len(candidates) else 0.0
    if not largest < np.inf:
        return f"a logarithm of a weight is {largest}"
    return "all logarithms of weights are -inf, so that nothing can be drawn" if largest == -np.inf else None


def _planned(given: Any, planner: Any) -> str | None:
    if wrong := _list_of(given, PlannedGroup, PLANNED) or _impossible(given, planner):
        return wrong
    nothing = not any(group.fresh for group in given) and not planner.memory.retired.all()
    return f"it plans no fresh answer, and not all questions are retired; {PLANNED}" if nothing else None


def _settled(given: Any, batch: StepBatch, planner: Any) -> str | None:
    if wrong := _list_of(given, int | np.integer | PlannedGroup, SETTLED):
        return wrong
    late = [one for one in given if isinstance(one, PlannedGroup)]
    if asking := [one for one in late if one.fresh or one.choose]:
        return f"it plans {shown(asking[0])} when all have been graded; {SETTLED}"
    if wrong := _impossible(late, planner):
        return wrong
    numbers = sorted(int(one) for one in given if not isinstance(one, PlannedGroup))
    if len(set(numbers)) < len(numbers) or not set(numbers) <= set(range(batch.groups)):
        return f"it gave the groups {shown(numbers)}, and there are {batch.groups}, from 0, each of which counts once"
    return None


def _expired(given: Any, candidates: Candidates, *_: Any) -> str | None:
    size = len(candidates)
    right = f"it gives Expired(rows, questions), rows with a bool for each of {size} candidates, questions as indices"
    if not isinstance(given, Expired):
        return f"{_gave(given)}; {right}"
    rows, questions = given
    if rows is not None and not _is_array(rows, "b", len(candidates)):
        return f"{_gave(rows)} as its rows; {right}"
    if questions is not None and not _is_array(questions, "iu", np.size(questions)):
        return f"{_gave(questions)} as its questions; {right}"
    return None


def _terms(given: Any, batch: StepBatch, *_: Any) -> str | None:
    tokens = len(batch.token)
    right = f"it gives Weighed(reference [{tokens}], factor [{tokens}], advantage [{len(batch)}]), by token and by row"
    if not isinstance(given, Weighed):
        return f"{_gave(given)}; {right}"
    factor = np.ones(tokens) if given.factor is None else given.factor
    advantage = np.zeros(len(batch)) if given.advantage is None else given.advantage
    found = {"reference": given.reference, "factor": factor, "advantage": advantage}
    for name, values in found.items():
        if not _is_array(values, "fiub", len(batch) if name == "advantage" else tokens):
            return f"{_gave(values)} as its {name}; {right}"
    # Whatever is computed in a wider dtype has to fit into fp32. Minima keep a NaN.
    with np.errstate(over="ignore"):
        reference, factor = given.reference.astype(np.float32), factor.astype(np.float32)
    least = float(reference.min(initial=np.inf))
    if not least > -np.inf:
        return f"a log-prob of the reference is {least}"
    if not np.isfinite(factor).all():
        return f"a factor of the advantage is {factor[~np.isfinite(factor)][0]}"
    if not np.isfinite(advantage).all():
        return f"an advantage is {advantage[~np.isfinite(advantage)][0]}"
    if given.advantage is None and factor.min(initial=0) < 0:
        return f"a factor of an answer's own advantage is negative: {factor.min()}"
    return None


def _list_of(given: Any, of: Any, right: str) -> str | None:
    if not isinstance(given, list | tuple):
        return f"{_gave(given)}; {right}"
    wrong = [one for one in given if not isinstance(one, of) or isinstance(one, bool)]
    return f"{_gave(wrong[0])} in its list; {right}" if wrong else None


def _impossible(groups: Iterable[PlannedGroup], planner: Any) -> str | None:
    table = planner.memory.table
    for group in groups:
        question = group.question
        numbers = (question, group.fresh, group.choose, *group.rows)
        if not all(isinstance(one, int | np.integer) and one >= 0 for one in numbers) or question >= len(table.held):
            return f"it plans {shown(group)}, and questions are 0 to {len(table.held) - 1}, answers 0 or more"
        if group.choose > table.held[question] or not all(table.holds(question, row) for row in group.rows):
            rows = table.rows_of_question(question)
            return f"it plans {shown(group)}, and stored of that question are the rows {shown(rows)}"
    return None


def _is_array(values: Any, kinds: str, size: int) -> bool:
    return isinstance(values, np.ndarray) and values.dtype.kind in kinds and values.shape == (size,)


def _gave(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"it gave an array {list(value.shape)} of {value.dtype}"
    return f"it gave {shown(value)} ({type(value).__name__})"


CHECKS: dict[str, Callable[..., str | None]] = {
    "admit": _stored,
    "prioritise": _weights,
    "compose": _planned,
    "settle": _settled,
    "expire": _expired,
    "weigh": _terms,
}
"""Check of each kind of function."""
