"""A study's findings as tables in Markdown."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from studies.findings import SCORES, Findings
from studies.statistics import FEWEST_SEEDS, LEVEL, Interval
from studies.summary import headline

COUNTED = {"generated_tokens": "tokens", "seconds": "seconds"}
"""Short names of the costs in tables."""


@dataclass(frozen=True)
class PageTable:
    """A table: title, explanation, headings and rows of cells."""

    title: str
    text: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """Format the table as Markdown."""
        lines = [self.headings, ["---", *["---:"] * (len(self.headings) - 1)], *self.rows]
        return f"## {self.title}\n\n{self.text}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def table(findings: Findings) -> str:
    """Return all tables as a page of Markdown."""
    plan = findings.study.plan
    picture = f"![Curves against generated tokens]({findings.study.name}.svg)\n"
    parts = [
        f"# {plan.title}\n\n{headline(findings)}\n\n{plan.text}\n",
        picture,
        *(of.markdown() for of in tables(findings)),
        f"{_origin(findings)}\n",
    ]
    return "\n".join(parts)


def tables(findings: Findings) -> Iterator[PageTable]:
    """Yield all tables, each with its rows by task."""
    if findings.study.plan.claims:
        yield _claims(findings)
    yield _scores(findings)
    yield _costs(findings)
    yield _at_equal_cost(findings)


def _scores(findings: Findings) -> PageTable:
    base = findings.baseline
    headings = ["task", "arm"]
    for name in SCORES:
        headings += [findings.score_name(name), f"less {base.name}"]
    headings += ["better than it", "best Pass@1", "mean Pass@1 over the run", "seeds"]
    rows = []
    parts = {task: [task] for task in findings.tasks}
    if len(parts) > 1:
        parts = {"all": findings.tasks, **parts}
    for (title, tasks), arm in itertools.product(parts.items(), findings.arms):
        row = [title, arm.name]
        for name in SCORES:
            gain = "" if arm is base else _signed(findings.gain(arm, name, tasks))
            row += [str(findings.at_the_end(arm, name, tasks)), gain]
        row.append("" if arm is base else str(findings.chance(arm, "pass_at_1", tasks)))
        row += [str(of(arm, "pass_at_1", tasks)) for of in (findings.at_the_best, findings.area)]
        rows.append([*row, str(len(arm.seeds))])
    text = (
        f"Interquartile means over seeds; differences are of means; {_intervals(findings)} "
        "“Better than it” is the probability that a run of the arm ends with a higher Pass@1 than one of the baseline."
    )
    return PageTable("The end of training", text, headings, rows)


def _intervals(findings: Findings) -> str:
    """Explain brackets and bold, or why there are none."""
    few = [len(arm.seeds) < FEWEST_SEEDS for arm in findings.arms]
    text = f"in brackets {LEVEL:.0%} intervals by stratified bootstrap. A difference in bold has an interval without 0."
    none = (
        f"with fewer than {FEWEST_SEEDS} seeds there is no interval, and nothing in bold: it would be far too narrow."
    )
    return none if all(few) else f"{text} {none.capitalize()}" if any(few) else text


def _claims(findings: Findings) -> PageTable:
    rows = []
    for claim in findings.study.plan.claims:
        found = findings.of_claim(claim)
        against = f"{claim.arm} {'above' if claim.sign > 0 else 'below'} {claim.against or '0'}"
        if found is None or math.isnan(found.value):
            rows.append([claim.text, against, "", "not run" if found is None else "a run lacks the number"])
        elif not found.excludes(0):
            few = math.isnan(found.low)
            rows.append([claim.text, against, _signed(found), "too few seeds" if few else "undecided"])
        else:
            rows.append(
                [claim.text, against, _signed(found), "agrees" if found.value * claim.sign > 0 else "disagrees"]
            )
    text = (
        "Differences at the end of training, means over the tasks; above or below 0: the interquartile mean of a "
        "curve's means over the run; undecided: the interval includes 0."
    )
    return PageTable("Claims", text, ["claim", "which means", "here", "verdict"], rows)


def _signed(found: Interval) -> str:
    return _bold(found.text("+.3f"), found.excludes(0))


def _bold(text: str, so: bool) -> str:
    return f"**{text}**" if so else text


def _costs(findings: Findings) -> PageTable:
    base = findings.baseline
    headings = ["task", "arm", *COUNTED.values(), *(f"{words} to its end" for words in COUNTED.values())]
    rows = []
    for task, arm in itertools.product(findings.tasks, findings.arms):
        ratios = ["" if arm is base else _ratio(findings.cost_ratio(arm, cost, task)) for cost in COUNTED]
        ratios.append("" if arm is base else findings.break_even(arm, task).text(".2g"))
        values = {key: f"{of:g}" if isinstance(of, float) else of for key, of in arm.chosen[task].items()}
        chosen = ", ".join(f"{key} {value}" for key, value in values.items())
        cut = " (its trials were at their end)" if task in arm.cut else ""
        spent = [f"{findings.spent(arm, cost, task):,.0f}" for cost in COUNTED]
        rows.append([task, arm.name, *spent, *ratios, chosen + cut])
    text = (
        f"“To its end”: what the arm spends until its mean Pass@1 is the last one of {base.name}, divided by what "
        f"{base.name} spends in all; in bold if the interval is below 1. “Saves time from”: what a generated "
        f"token must cost, in seconds of a token trained on, for the arm to reach that end in less time. "
        f"{' '.join(_prices(findings, task) for task in findings.tasks)}"
    )
    return PageTable("The cost", text, [*headings, "saves time from", "chosen"], rows)


def _prices(findings: Findings, task: str) -> str:
    """Return a sentence on the time of tokens and steps in these runs."""
    generated, trained, step = findings.prices(task)
    if not trained:
        return f"In the runs of {task}, a step took {step:.2g} s beside {1e6 * generated:.2g} us of a generated token."
    cost = f"In the runs of {task} it cost {generated / trained:.2g} of them"
    return f"{cost}, beside {step:.2g} s of a step (least squares)."


def _at_equal_cost(findings: Findings) -> PageTable:
    base, scores = findings.baseline, ("pass_at_1", "pass_at_k")
    points = [(cost, share) for cost in COUNTED for share in (0.5, 1.0)]
    headings = ["task", "arm"]
    headings += [f"{findings.score_name(of)} at {x:.0%} of the {COUNTED[cost]}" for cost, x in points for of in scores]
    rows = []
    for task, arm in itertools.product(findings.tasks, findings.arms[1:]):
        gains = [findings.gain_at(cost, share, arm, of, [task]) for cost, share in points for of in scores]
        rows.append([task, arm.name, *map(_signed, gains)])
    text = f"Differences to {base.name} where both have spent the same: 100% is all that the cheaper of them spends."
    return PageTable("At equal cost", text, headings, rows)


def _ratio(found: Interval) -> str:
    return _bold(found.text(".2f"), found.high < 1)


def _origin(findings: Findings) -> str:
    runs = [run for arm in findings.arms for of_task in arm.runs.values() for run in of_task]

    def several(values: Sequence[Any]) -> str:
        return ", ".join(dict.fromkeys(map(str, values)))

    versions = several([f"{name} {version}" for run in runs for name, version in run.versions.items()])
    text = (
        f"{len(runs)} runs on {several(sorted(run.date for run in runs))}, commit {several([r.commit for r in runs])}, "
        f"{several([run.processor for run in runs])}, {versions}. Each run has one thread, and several run at a time."
    )
    if findings.missing:
        text += f" Not complete, and so left out: {', '.join(findings.missing)}."
    return text
