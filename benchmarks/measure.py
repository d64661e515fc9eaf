"""Measurement of the rows of a case in turns: errors, times and memory."""

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks import heads
from benchmarks.heads import Case, Floor, FullLogits, Implementation, LossInputs, Ours
from benchmarks.peers import PEERS
from benchmarks.timing import FLOOR, PLAIN, Budget, Result, Results, race
from exgrpo.kernels.dispatch import BACKENDS

ERROR_TOKENS = 256
ROWS: tuple[Implementation, ...] = (
    Floor(),
    *(Ours(backend) for backend in BACKENDS),
    FullLogits(),
    *(peer() for peer in PEERS),
    FullLogits(compiled=True),
)
"""Compared implementations; the compiled one takes longest to prepare and comes last."""


def check(case: Case, rows: Sequence[Implementation], some: LossInputs) -> tuple[Results, dict[str, dict[str, Any]]]:
    """Return the rows that cannot run or that raise an error, and the errors of the others, against float64."""
    truth = heads.exact(case, some)
    results: Results = {}
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        if reason := row.missing(some.hidden.device):
            results[row.name] = Result(reason=reason)
        elif not isinstance(row, Floor):
            try:
                found[row.name] = heads.errors(case, row, some, truth)
            except Exception as error:  # a peer may raise anything: its row is skipped; one of ours fails
                results[row.name] = Result(failure=f"{type(error).__name__}: {str(error)[:200]}")
    plain = found.get(PLAIN) or heads.errors(case, FullLogits(), some, truth)
    return results, {name: {**of_row, "wrong": heads.is_wrong(of_row, plain)} for name, of_row in found.items()}


def measure(case: Case, rows: Sequence[Implementation], device: torch.device, budget: Budget) -> Results:
    """Measure errors, then times, then memory of all rows of a case."""
    # torch compiles each shape anew, and refuses after a few of them in one process.
    torch.compiler.reset()
    problem = heads.make_problem(case, device)
    whole = case.tokens <= 2 * ERROR_TOKENS  # then the check compiles what is timed, and is its warm-up
    results, facts = check(case, rows, problem if whole else problem.part(ERROR_TOKENS, case.dtype))
    calls = {row.name: row.call(case, problem) for row in rows if row.name not in results}
    if FLOOR in calls:
        calls[FLOOR]()  # not part of the check
    return results | race(calls, device, budget, facts, warm=whole)
