"""What a referee says of a method: better, worse or neither, at what price, and whether its runs are sound."""

from collections.abc import Iterator

import numpy as np

from studies.findings import Arm, Findings
from studies.statistics import Interval, welch

TOKENS = "generated_tokens"
SURE = 0.975
"""Of the interval of each of two scores: of methods that change nothing, one in twenty is called better or worse."""
WITHIN = 0.1
"""Share by which the tokens of a method may differ from those that it was given."""
FALLEN = 0.5
"""A run has collapsed if its Pass@1 ends below this share of its highest value."""


SENTENCES = {
    "undecided": "Undecided, {arm} has too few seeds",
    "better": "Better: {arm} is above {base}",
    "worse": "Worse: {arm} is below {base}",
    "a trade": "A trade: {arm} is above {base} in one score and below it in the other",
    "equal": "Equal: no difference between {arm} and {base} that these runs can show",
}
"""What each verdict means."""


def verdict(findings: Findings, arm: Arm) -> str:
    """In one sentence, where the arm and the baseline have generated the same."""
    word, first, several = compared(findings, arm)
    said = SENTENCES[word].format(arm=arm.name, base=findings.baseline.name)
    of_k = findings.score_name("pass_at_k")
    return f"{said}: Pass@1 {first.text('+.3f')}, {of_k} {several.text('+.3f')} at equal generated tokens."


def compared(findings: Findings, arm: Arm) -> tuple[str, Interval, Interval]:
    """One of `SENTENCES`, and the differences of Pass@1 and Pass@k that it rests on."""
    first, several = (
        welch(*findings.values_at(TOKENS, 1.0, arm, name, findings.tasks), SURE) for name in ("pass_at_1", "pass_at_k")
    )
    up, down = (first.excludes(0) and first.value * sign > 0 for sign in (1, -1))
    wider, narrower = (several.excludes(0) and several.value * sign > 0 for sign in (1, -1))
    if np.isnan(first.low):
        word = "undecided"
    elif (up and not narrower) or (wider and not down):
        word = "better"
    elif (down and not wider) or (narrower and not up):
        word = "worse"
    else:
        word = "a trade" if up or wider else "equal"
    return word, first, several


def warnings(findings: Findings, arm: Arm, asks: float) -> Iterator[str]:
    """What is wrong with the runs of a method.

    Args:
        findings: with the baseline.
        arm: the method.
        asks: what it says that a step of it generates, divided by questions * samples.
    """
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


def costs(findings: Findings, arm: Arm) -> Iterator[str]:
    """What the method needs until it is where the baseline ends, and what its runs took, task by task."""
    for task in findings.tasks:
        tokens, seconds = (findings.cost_ratio(arm, cost, task) for cost in (TOKENS, "seconds"))
        end = float(np.mean([run.curves["pass_at_1"][-1] for run in findings.baseline.runs[task]]))
        yield (
            f"On {task}: tokens until the last Pass@1 of {findings.baseline.name} ({end:.3f}), divided by its tokens: "
            f"{tokens.text('.2f')}; seconds: {seconds.text('.2f')}, which depend on the machine. A run took "
            f"{np.mean([run.seconds for run in arm.runs[task]]):,.0f} s and "
            f"{findings.spent(arm, TOKENS, task):,.0f} tokens."
        )
