"""Measurement of the rows of a case in turns: errors, times and memory; and the bars of their plot."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.heads import (
    Case,
    Checkpointed,
    Floor,
    FullLogits,
    Implementation,
    Ours,
    errors,
    exact,
    first_tokens,
    make_problem,
)
from benchmarks.peers import PEERS
from exgrpo.kernels.dispatch import BACKENDS
from exgrpo.tools.bench import FLOOR, OURS
from exgrpo.tools.timing import Call, interleave, peak_bytes

ROWS: tuple[Implementation, ...] = (
    Floor(),
    *(Ours(backend) for backend in BACKENDS),
    FullLogits(),
    Checkpointed(),
    *(peer() for peer in PEERS),
    FullLogits(compiled=True),
)
"""Compared implementations; the compiled one takes longest to prepare and comes last."""
OWN, OTHER = "#0b6e4f", "#b8b8b8"


@dataclass(frozen=True)
class Result:
    """Measurements of one row."""

    seconds: tuple[float, ...] = ()  # per round; empty if it did not run
    reason: str = ""  # why it cannot run here
    failure: str = ""  # the error that it raised
    peak_bytes: int | None = None  # see `exgrpo.tools.timing.peak_bytes`; None: unknown
    facts: dict[str, Any] = field(default_factory=dict)  # further numbers to report


Results = dict[str, Result]


def race(
    calls: dict[str, Call], device: torch.device, budget: float, facts: dict[str, dict[str, Any]], in_a_row: int = 1
) -> Results:
    """Time calls in turns, see `interleave`, then measure the peak memory of each."""
    seconds, failed = interleave(calls, device, budget, in_a_row)
    results = {name: Result(failure=failure) for name, failure in failed.items()}
    for name, of_row in seconds.items():
        try:
            peak = peak_bytes(calls[name], device)
        except OSError:  # the system keeps no high-water mark
            peak = None
        results[name] = Result(tuple(of_row), peak_bytes=peak, facts=facts.get(name, {}))
    return results


def measure(
    case: Case, rows: Sequence[Implementation], device: torch.device, seconds: float, in_a_row: int = 1
) -> Results:
    """Measure errors, then times, then memory of all rows of a case."""
    problem = make_problem(case, device)
    some = first_tokens(problem)
    truth = exact(case, some)
    plain = errors(case, FullLogits(), some, truth)
    results, calls, facts = {}, {}, {}
    for row in rows:
        if reason := row.missing(device):
            results[row.name] = Result(reason=reason)
            continue
        try:
            call = row.call(case, problem)
            if not isinstance(row, Floor):
                found = errors(case, row, some, truth)
                facts[row.name] = {
                    "log_prob_error": found.log_prob,
                    "gradient_error": found.gradient,
                    "wrong": found.wrong(plain),
                }
        except Exception as error:  # a peer may raise anything: its row is skipped; one of ours fails
            results[row.name] = Result(failure=f"{type(error).__name__}: {str(error)[:200]}")
        else:
            calls[row.name] = call
    return results | race(calls, device, seconds, facts, in_a_row)


def bars(axes: Any, title: str, rows: Sequence[dict[str, Any]]) -> None:
    rows = sorted((row for row in rows if row["row"] != FLOOR), key=lambda row: row["floor_over_time"])
    colours = [OWN if row["row"].startswith(OURS) else OTHER for row in rows]
    drawn = axes.barh([row["row"] for row in rows], [row["floor_over_time"] for row in rows], color=colours)
    axes.bar_label(drawn, fmt="%.2f", padding=3, fontsize=8)
    axes.set_title(f"{title}: floor / time", loc="left", fontsize=9)
    axes.set_xlim(0, 1.1 * max([1.0, *(row["floor_over_time"] for row in rows)]))
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
