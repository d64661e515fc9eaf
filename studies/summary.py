"""A study's findings in short, for a terminal."""

from collections.abc import Iterator, Sequence

import numpy as np
from rich.markup import escape
from rich.table import Table

from studies.findings import Arm, Findings
from studies.statistics import Interval

SHOWN = ("pass_at_1", "pass_at_k")
COSTS = ("generated_tokens", "seconds")


def headline(findings: Findings) -> str:
    """Return one sentence: Pass@1 of the baseline and of the best arm after the same number of generated tokens."""
    base, *others = findings.arms
    tasks = findings.tasks
    over = f" over {len(tasks)} tasks" if len(tasks) > 1 else ""
    if not others:
        end = findings.at_the_end(base, "pass_at_1", tasks).value
        return f"Only “{base.name}” has been run: at the end, its held-out Pass@1{over} is {end:.3f}."
    gains = {arm.name: findings.gain_at("generated_tokens", 1.0, arm, "pass_at_1", tasks) for arm in others}
    arm = max(others, key=lambda arm: gains[arm.name].value)
    values = findings.values_at("generated_tokens", 1.0, arm, "pass_at_1", tasks)
    ours, theirs = (round(float(np.mean([of_task.mean() for of_task in of])), 3) for of in values)
    spent = "equally many" if over else f"{findings.shared('generated_tokens', arm, tasks[0]):,.0f}"
    best = f", the best of {len(others)} arms (a choice that flatters it)," if len(others) > 1 else ""
    return (
        f"After {spent} generated tokens, held-out Pass@1{over} is {ours:.3f} for “{arm.name}”{best} and {theirs:.3f} "
        f"for “{base.name}”: {_verdict(arm, base, ours - theirs, gains[arm.name])}."
    )


def _verdict(arm: Arm, base: Arm, gap: float, gain: Interval) -> str:
    """Say which is ahead by a displayed gap, and whether that may be chance."""
    if gap == 0:
        return "neither is ahead"
    order = f"“{arm.name}” is {'ahead' if gap > 0 else 'not ahead'}"
    if np.isnan(gain.low):
        seeds = min(len(arm.seeds), len(base.seeds))
        return f"{order}; {'one seed' if seeds == 1 else f'{seeds} seeds'} cannot tell that from chance"
    if not gain.excludes(0):
        return f"{order}, but the difference, {gain.text('+.3f')}, may be chance"
    return f"{order}, by {gain.text('+.3f')}"


def short(findings: Findings, task: str) -> tuple[Sequence[str], list[list[str]]]:
    """Return headings and rows of a table with final scores and costs of each arm on a task."""
    headings = ("arm", *map(findings.score_name, SHOWN), *(cost.replace("_", " ") for cost in COSTS))
    rows = [
        [
            arm.name,
            *(str(findings.at_the_end(arm, name, [task])) for name in SHOWN),
            *(f"{findings.spent(arm, cost, task):,.0f}" for cost in COSTS),
        ]
        for arm in findings.arms
    ]
    return headings, rows


def summary(findings: Findings) -> Iterator[Table]:
    """Yield the short tables of all tasks, for printing."""
    for task in findings.tasks:
        shown = Table(title=escape(task), title_justify="left")
        (first, *others), rows = short(findings, task)
        shown.add_column(first)
        for heading in others:
            shown.add_column(heading, justify="right")
        for row in rows:
            shown.add_row(*map(escape, row))
        yield shown
