"""`exgrpo study leaderboard`: verdicts about all methods, from the committed results and from entries."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from exgrpo.train.common.errors import OutputError, os_errors_as
from exgrpo.train.common.process import run_program
from exgrpo.train.config.command_line import options_of
from studies import bench, run
from studies.entry import read_entry
from studies.findings import Arm, Findings, arm_of
from studies.origin import ROOT
from studies.page import Table
from studies.results import ResultFile
from studies.study import Study, load_study
from studies.summary import COSTS, SHOWN
from studies.verdict import TOKENS, compared

PROGRAM = "exgrpo study leaderboard"
OLDER = tuple(ROOT / "studies" / f"{name}.yaml" for name in ("token_efficiency", "methods"))
"""Studies with smaller searches, which follow the protocol."""
ENTRIES = ROOT / "studies" / "entries"
PAGE = ROOT / "docs" / "leaderboard.md"
HEADINGS = ("method", "verdict", "Pass@1", "Pass@8", "ends at", "generated", "tokens", "seconds", "seeds", "runs")
TEXT = f"""\
# Leaderboard

`{PROGRAM}` writes this page from the committed results. Its newest run is of {{date}}.
[The referee](referee.md) says what the verdicts mean, what they cannot show, and how you hand in an entry.

- **Verdict** compares a method with the baseline of its study where both have generated the same tokens: all that the
  cheaper run generates. **Pass@1** and **Pass@8** are the differences there, with Welch's intervals at 97.5 %.
- **Ends at** has Pass@1 and Pass@8 at the end, and **generated** the tokens of a run, divided by the baseline's.
- **Tokens** and **seconds** are what a method needs until its Pass@1 is the baseline's last one, divided by what the
  baseline spends in all, with 95 % intervals of the bootstrap. Seconds depend on the machine and on what else it did.
- **Runs** has the days, the commits of the code (+: with changes) and the processors. Commits of 2026-11-22 were later
  put together, so the history has them no more: [studies](studies.md#running).

Rows are in the order of Pass@1 at equal tokens. The first one is the best of several, so it looks better than it is. Of
methods that change nothing, about one in twenty is called better or worse. Studies differ in their searches and
baselines, so a verdict holds within its study.
"""


class Options(BaseModel):
    """Write the page of all verdicts, from the committed results and from entries: docs/referee.md."""

    model_config = ConfigDict(frozen=True)

    entries: Path = Field(ENTRIES, description="Folder of entries, each a NAME.jsonl of `study bench`.")
    output: Path = Field(PAGE, description="The page.")


def page(results: ResultFile, entries: Path) -> str:
    """The page, in Markdown.

    Raises:
        ExgrpoError: an entry is damaged or not of the protocol; the message names the file and the line.
    """
    parts, dates = [], [""]
    for path in (bench.PROTOCOL, *OLDER):
        study = load_study(path)
        outside = [read_entry(study, of) for of in sorted(entries.glob("*.jsonl"))] if path == bench.PROTOCOL else []
        parts.append(f"## {study.plan.title}\n\n{study.plan.text} ([{path.name}](../studies/{path.name}))\n")
        for task in study.plan.tasks:
            one = study.only([task])
            found = [arm for name in one.plan.arms if (arm := arm_of(one, name, results.by_key))]
            whole = [arm for arm in found if len(arm.seeds) == len(one.plan.seeds_of(arm.name))]
            arms = [*whole, *(arm for arm in outside if task in arm.runs)]
            parts.append(_table(one, task, arms))
            dates += [result.date for arm in arms for result in arm.runs[task]]
        parts += map(_options, outside)
    return "\n".join([TEXT.format(date=max(dates)), *parts])


def _table(study: Study, task: str, arms: Sequence[Arm]) -> str:
    """A study on a task: the baseline first, then the highest."""
    name = study.plan.baseline
    base = next((arm for arm in arms if arm.name == name), None)
    rows = [(arm is not base, *_row(Findings(study, [base or arm, arm], ()), arm, base)) for arm in arms]
    missing = [name for name in study.plan.arms if name not in {arm.name for arm in arms}]
    said = f"Not complete, and so left out: {', '.join(missing)}." if missing else "All arms of the study are here."
    said += "" if base else f" There are no verdicts before the baseline, {name}, is complete."
    title, cells = f"{study.name}: {task}", [cells for *_, cells in sorted(rows, key=lambda row: row[:2])]
    return Table(title, said, HEADINGS, cells).markdown() if rows else f"## {title}\n\n{said}\n"


def _row(findings: Findings, arm: Arm, base: Arm | None) -> tuple[float, list[str]]:
    """The difference of Pass@1 with its sign changed, and the cells of an arm."""
    (task,), order = findings.tasks, 0.0
    ends = ", ".join(f"{findings.at_the_end(arm, name, [task]).value:.3f}" for name in SHOWN)
    cells = [arm.name, "the baseline" if base else "", "", "", ends, "1.00" if base else "", "", ""]
    if base and arm is not base:
        word, *gains = compared(findings, arm)
        share = findings.spent(arm, TOKENS, task) / findings.spent(base, TOKENS, task)
        needed = [findings.cost_ratio(arm, cost, task).text(".2f") for cost in COSTS]
        order = -gains[0].value
        cells = [arm.name, word, *(gain.text("+.3f") for gain in gains), ends, f"{share:.2f}", *needed]
    return order, [*cells, str(len(arm.seeds)), ", ".join(_origin(arm, task))]


def _origin(arm: Arm, task: str) -> Iterator[str]:
    """Days, commits and processors."""
    for name in ("date", "commit", "processor"):
        yield from sorted({getattr(result, name) for result in arm.runs[task]})


def _options(arm: Arm) -> str:
    """What identifies a method from outside: its file, and its own options task by task."""
    file = f"[{arm.name}](../studies/entries/{arm.name}.jsonl)"
    of = {task: ", ".join(f"`{name}: {value}`" for name, value in own.items()) for task, own in arm.chosen.items()}
    return "\n".join(f"- {file} on {task}: {options}" for task, options in of.items()) + "\n"


def main(argv: Sequence[str]) -> int:
    """Run the program; returns its exit status."""

    def work(_: ExitStack) -> None:
        options = options_of(Options, PROGRAM, argv)
        text = page(ResultFile(run.RESULTS), options.entries)
        with os_errors_as(OutputError, f"{options.output} cannot be written"):
            options.output.write_text(text, encoding="utf-8")
        print(options.output)

    return run_program(work, "stopped: nothing has been written")
