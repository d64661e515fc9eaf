"""A study's findings in short, for a terminal."""

from collections.abc import Iterator

from rich.markup import escape
from rich.table import Table

from studies.findings import Findings

SHOWN = ("pass_at_1", "pass_at_k")


def summary(findings: Findings) -> Iterator[Table]:
    """Where each arm ends, and what it has spent until then, task by task."""
    for task in findings.tasks:
        shown = Table(title=escape(task), title_justify="left")
        shown.add_column("arm")
        for heading in (*map(findings.score_name, SHOWN), "generated tokens", "seconds"):
            shown.add_column(heading, justify="right")
        for arm in findings.arms:
            ends = (str(findings.at_the_end(arm, name, [task])) for name in SHOWN)
            spent = (f"{findings.spent(arm, cost, task):,.0f}" for cost in ("generated_tokens", "seconds"))
            shown.add_row(escape(arm.name), *ends, *spent)
        yield shown
