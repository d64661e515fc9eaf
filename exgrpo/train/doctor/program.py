"""Check this machine: `python -m exgrpo.train.doctor [--recipe FILE] [--only NAME ...] [--skip NAME ...]`.

Each check is a process of its own, one after the other, so that a part that crashes or hangs is a row and the others
follow. Nothing is written but into a temporary folder and, without a name, into the recipe's output.folder.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from exgrpo.train.config import Config
from exgrpo.train.doctor.check import Check, Finding, all_checks
from exgrpo.train.doctor.options import chosen, parse_options, recipe_of
from exgrpo.train.doctor.report import table, text, verdict
from exgrpo.train.doctor.running import run_check
from exgrpo.train.ending import Stopped
from exgrpo.train.errors import OutputError, os_errors_as
from exgrpo.train.process import run_program
from exgrpo.train.recipe import to_yaml


def main(argv: Sequence[str]) -> int:
    """Run the program; its exit status is 1 if a check has failed."""
    findings: list[Finding] = []

    def work(resources: ExitStack) -> None:
        options = parse_options(argv)
        checks, recipe = chosen(all_checks(), options), recipe_of(options)
        output = options.output
        if output is not None:
            with os_errors_as(OutputError, f"--output: {output} cannot be written; name another file"):
                output.touch()
        console = Console()
        progress = Console(stderr=True, highlight=False)
        scratch = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="exgrpo_")))
        try:
            for finding in examine(checks, recipe, scratch, options.timeout, progress):
                findings.append(finding)
        except KeyboardInterrupt:
            if not findings:
                raise
            show(findings, scratch, output, console)
            left = " ".join(check.name for check in checks[len(findings) :])
            raise Stopped(f"stopped: what is left is done by --only {left}") from None
        show(findings, scratch, output, console)

    return run_program(work, "stopped: nothing has changed") or int(any(found.result == "failed" for found in findings))


def show(findings: Sequence[Finding], scratch: Path, output: Path | None, console: Console) -> None:
    """The table, and the text to paste into a report: in the file ``output``, or below the table."""
    console.print(table(findings))
    report = text(findings, scratch)
    if output is None:
        console.print(f"{verdict(findings)}. To paste into a report:\n", highlight=False)
        print(report)
    else:
        output.write_text(report, encoding="utf-8")
        console.print(f"{verdict(findings)}. To paste into a report: {output}", highlight=False)


def examine(
    checks: Sequence[Check], recipe: Config, scratch: Path, timeout: float, console: Console
) -> Iterator[Finding]:
    """What the checks find, one after the other; the console shows which one is at work, or which ones are done.

    Args:
        checks: in their order.
        recipe: of the run that the machine is meant for.
        scratch: an empty folder.
        timeout: seconds for each check.
        console: of the program.
    """
    path = scratch / "recipe.yaml"
    path.write_text(to_yaml(recipe), encoding="utf-8")
    with console.status("") as status:
        for number, check in enumerate(checks, start=1):
            status.update(f"{number} of {len(checks)}: {check.name}")
            folder = scratch / check.name
            folder.mkdir()
            finding = run_check(check, path, folder, timeout)
            if not console.is_terminal:
                console.print(f"{check.name}: {finding.result} ({number} of {len(checks)})")
            yield finding
