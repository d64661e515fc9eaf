"""Measurement of the rows of a case in turns: errors, times and memory."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from benchmarks.heads import (
    Case,
    Errors,
    Floor,
    FullLogits,
    Implementation,
    Ours,
    default_backend,
    errors,
    exact,
    make_problem,
)
from benchmarks.peers import PEERS
from exgrpo.kernels.dispatch import BACKENDS
from exgrpo.tools.bench import ERROR_TOKENS, FLOOR, PLAIN, LossInputs
from exgrpo.tools.timing import LEAST_ROUNDS, LOG, Call, interleave, peak_bytes

ROWS: tuple[Implementation, ...] = (
    Floor(),
    *(Ours(backend) for backend in BACKENDS),
    *([Ours(default_backend(), memory=1 << 40)] if torch.cuda.is_available() else []),
    FullLogits(),
    *(peer() for peer in PEERS),
    FullLogits(compiled=True),
)
"""Compared implementations; the compiled one takes longest to prepare and comes last."""


@dataclass(frozen=True)
class Budget:
    """Arguments of `interleave`."""

    budget: float
    least: int = LEAST_ROUNDS
    patience: float = math.inf
    in_a_row: int = 1
    warm: bool = False


@dataclass(frozen=True)
class Result:
    """Measurements of one row."""

    seconds: tuple[float, ...] = ()  # per round; empty if it did not run
    reason: str = ""  # why it cannot run here
    failure: str = ""  # the error that it raised
    peak_bytes: int | None = None  # see `exgrpo.tools.timing.peak_bytes`; None: unknown
    facts: dict[str, Any] = field(default_factory=dict)  # further numbers to report


Results = dict[str, Result]


def race(calls: dict[str, Call], device: torch.device, budget: Budget, facts: Mapping[str, dict[str, Any]]) -> Results:
    """Time calls in turns, see `interleave`, then measure the peak memory of each."""
    seconds, failed = interleave(calls, device, **asdict(budget))
    results = {name: Result(failure=failure) for name, failure in failed.items()}
    for name, of_row in seconds.items():
        try:
            peak = peak_bytes(calls[name], device)
        except OSError:  # the system keeps no high-water mark
            peak = None
        results[name] = Result(tuple(of_row), peak_bytes=peak, facts=facts.get(name, {}))
    return results


def check(case: Case, rows: Sequence[Implementation], some: LossInputs) -> tuple[Results, dict[str, Errors]]:
    """Return the rows that cannot run or that raise an error, and the errors of the others, against float64."""
    truth = exact(case, some)
    results: Results = {}
    found = {}
    for row in rows:
        LOG.debug("%s: errors", row.name)
        if reason := row.missing(some.hidden.device):
            results[row.name] = Result(reason=reason)
        elif not isinstance(row, Floor):
            try:
                found[row.name] = errors(case, row, some, truth)
            except Exception as error:  # a peer may raise anything: its row is skipped; one of ours fails
                results[row.name] = Result(failure=f"{type(error).__name__}: {str(error)[:200]}")
    if PLAIN not in found:
        found[PLAIN] = errors(case, FullLogits(), some, truth)
    return results, found


def measure(case: Case, rows: Sequence[Implementation], device: torch.device, budget: Budget) -> Results:
    """Measure errors, then times, then memory of all rows of a case."""
    # torch compiles each shape anew, and refuses after a few of them in one process.
    torch.compiler.reset()
    problem = make_problem(case, device)
    whole = case.tokens <= 2 * ERROR_TOKENS  # then the check compiles what is timed, and is its warm-up
    results, found = check(case, rows, problem if whole else problem.part(ERROR_TOKENS, case.dtype))
    plain = found[PLAIN]
    facts = {
        name: {"log_prob_error": one.log_prob, "gradient_error": one.gradient, "wrong": one.wrong(plain)}
        for name, one in found.items()
    }
    calls = {row.name: row.call(case, problem) for row in rows if row.name not in results}
    if FLOOR in calls:
        calls[FLOOR]()
    return results | race(calls, device, replace(budget, warm=whole), facts)
