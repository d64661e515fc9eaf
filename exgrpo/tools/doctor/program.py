"""Check this machine: `python -m exgrpo.tools.doctor [--recipe FILE] [--only NAME ...]`.

Each check is a process of its own, one after the other, so that a part that crashes or hangs is a row and the others
follow. Nothing is written but into a temporary folder and, without a name, into the recipe's output.folder.
"""

import getpass
import platform
import re
import socket
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from pydantic import Field
from rich.console import Console

from exgrpo.tools.doctor import machine, training
from exgrpo.tools.doctor.check import Check, Finding
from exgrpo.tools.doctor.running import run_check
from exgrpo.train.common.errors import ConfigError, OutputError, nearest, os_errors_as
from exgrpo.train.common.process import run_program
from exgrpo.train.config.command_line import options_of
from exgrpo.train.config.hub import installed
from exgrpo.train.config.options import Config
from exgrpo.train.config.recipe import DEFAULT_RUN, merged, read_recipe, recipe_path, to_yaml, unfinished
from exgrpo.train.config.section import Section

PROGRAM = "python -m exgrpo.tools.doctor"
_FENCE = "```"


class Options(Section):
    """Check every part that a run needs on this machine; the exit status is 0 if none of them fails."""

    recipe: Path | None = Field(
        None, description="YAML recipe, or builtin:NAME, of the run to come; None: the default run, in bf16."
    )
    only: tuple[str, ...] = Field((), description="Names of the checks to do; none: all.")
    timeout: float = Field(300.0, gt=0, le=86400, description="Seconds for each check; then it is ended and failed.")
    output: Path | None = Field(None, description="File for the text to paste into a report; None: it is printed.")


def parse_options(argv: Sequence[str]) -> Options:
    """The options of a command line.

    Raises:
        ConfigError: an option is unknown or impossible.
    """
    return options_of(Options, PROGRAM, argv)


def all_checks() -> list[Check]:
    """All checks: the machine, single parts, parts together. A part that fails explains those behind it."""
    return [*machine.CHECKS, *training.CHECKS]


def chosen(checks: Sequence[Check], options: Options) -> list[Check]:
    """The checks that the options leave.

    Raises:
        ConfigError: a name is unknown.
    """
    known = [check.name for check in checks]
    for name in options.only:
        if name not in known:
            near = nearest(name, known)
            hint = f"did you mean {near!r}? " if near else ""
            raise ConfigError(f"--only: there is no check {name!r}; {hint}There are {', '.join(known)}")
    return [check for check in checks if check.name in (options.only or known)]


def recipe_of(options: Options) -> Config:
    """The configuration of the run that the machine is meant for.

    The default run computes in bf16 here, as most runs on GPUs do.

    Raises:
        ConfigError: the recipe is wrong.
    """
    if options.recipe is None:
        return unfinished(merged(read_recipe(DEFAULT_RUN), {"policy.dtype": "bf16"}), str(DEFAULT_RUN))
    path = recipe_path(options.recipe)
    return unfinished(read_recipe(path), str(path))


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
        scratch = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="exgrpo_")))
        try:
            for finding in examine(checks, recipe, scratch, options.timeout, Console(stderr=True, highlight=False)):
                findings.append(finding)
        finally:
            if findings and output is None:
                print(text(findings))
            elif output is not None:
                output.write_text(text(findings), encoding="utf-8")
                print(f"{verdict(findings)}: {output}")

    status = run_program(work, "stopped: the other checks were not done")
    return status or int(any(found.result == "failed" for found in findings))


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


def verdict(findings: Sequence[Finding]) -> str:
    """How many checks came to what, in a line."""
    counts = Counter[str](found.result for found in findings)
    return ", ".join(f"{counts[result]} {result}" for result in ("ok", "failed", "skipped"))


def text(findings: Sequence[Finding]) -> str:
    """What to paste into a report, in Markdown: versions, hardware, checks, the last output of those that failed."""
    lines = [f"# exgrpo doctor: {verdict(findings)}", ""]
    lines += [f"python {platform.python_version()}, {installed(*machine.PACKAGES)}", ""]
    lines += [f"- {line}" for line in machine.hardware()]
    lines += ["", "| check | result | found | seconds |", "|---|---|---|---:|"]
    for found in findings:
        cell = " ".join(found.text.split()).replace("|", r"\|")
        lines.append(f"| {found.name} | {found.result} | {cell} | {found.seconds:.1f} |")
    for found in findings:
        if found.output:
            lines += ["", f"Last output of {found.name}:", "", _FENCE, *found.output, _FENCE]
    return anonymous("\n".join(lines)) + "\n"


def anonymous(content: str) -> str:
    """A text without the names of host and user."""
    for name, sign in ((socket.gethostname(), "<host>"), (_user(), "<user>")):
        if len(name) > 2 and name not in ("localhost", "root"):
            content = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", sign, content)
    return content


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # of a number without a name
        return ""
