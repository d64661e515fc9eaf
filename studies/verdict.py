"""Verdict on a method (better, worse or neither than the baseline), and warnings about its runs."""

from collections.abc import Iterator

import numpy as np

from studies.findings import Arm, Findings
from studies.statistics import welch

TOKENS = "generated_tokens"
SURE = 0.975
"""Level of the interval of each of two scores: one in twenty methods without effect is called better or worse."""
WITHIN = 0.1
"""Fraction by which a method's tokens may differ from its budget."""
FALLEN = 0.5
"""A run has collapsed if its Pass@1 ends below this share of its highest value."""


def verdict(findings: Findings, arm: Arm) -> str:
    """Compare an arm with the baseline at equal generated tokens, in one sentence."""
    first, several = (
        welch(*findings.values_at(TOKENS, 1.0, arm, name, findings.tasks), SURE) for name in ("pass_at_1", "pass_at_k")
    )
    signs = {np.sign(gain.value) for gain in (first, several) if gain.excludes(0)}
    arms = f"{arm.name} is {{}} {findings.baseline.name}"
    if np.isnan(first.low):
        said = f"Undecided, {arm.name} has too few seeds"
    elif signs == {1}:
        said = f"Better: {arms.format('above')}"
    elif signs == {-1}:
        said = f"Worse: {arms.format('below')}"
    elif signs:
        said = f"A trade: {arms.format('above')} in one score and below it in the other"
    else:
        said = f"Equal: no difference between {arm.name} and {findings.baseline.name} that these runs can show"
    of_k = findings.score_name("pass_at_k")
    return f"{said}: Pass@1 {first.text('+.3f')}, {of_k} {several.text('+.3f')} at equal generated tokens."


def warnings(findings: Findings, arm: Arm, asks: float) -> Iterator[str]:
    """Yield warnings about the runs of an arm; `asks` is its stated answers per step / (questions * samples)."""
    for task in findings.tasks:
        share = findings.spent(arm, TOKENS, task) / findings.spent(findings.baseline, TOKENS, task)
        if share > 1 + WITHIN:
            yield (
                f"On {task} it generated {share:.2f} times the tokens that it was given: its steps ask more than "
                f"--asks {asks:g} says (try {asks * share:.2g}), or its answers grew. What it learnt from the surplus "
                "does not count at equal tokens."
            )
        if share < 1 - WITHIN:
            yield (
                f"On {task} it generated {share:.2f} of the tokens that it was given, and is compared up to there: "
                f"--asks {asks * share:.2g} gives it the rest."
            )
        if fallen := sum(_has_collapsed(run.curves["pass_at_1"]) for run in arm.runs[task]):
            yield (
                f"On {task} {fallen} of {len(arm.runs[task])} runs collapsed: their Pass@1 ends below "
                f"{FALLEN:.0%} of its highest value."
            )


def _has_collapsed(curve: np.ndarray) -> bool:
    return bool(not np.isfinite(curve[-1]) or curve[-1] < FALLEN * np.nanmax(curve))
