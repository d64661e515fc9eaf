"""All that there is to learn from a GPU, in one command: `python -m benchmarks.run_gpu [--minutes 30]`.

    test     the kernels' tests, which use the GPU where there is one
    tune     a launch table for it, DATE_DEVICE.launch.toml
    bench    the heads of real models against everybody else's under that table: DATE_DEVICE.json, .md and .svg

Each phase has its share of the time, and none waits for another one's success. DATE_DEVICE.log has everything that was
said. The exit status is 0 where every phase succeeded.
"""

import argparse
import ast
import datetime
import importlib.machinery
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import torch

from benchmarks.render import RESULTS, seconds, stem_of
from exgrpo.kernels.triton_chunks.launch import ENVIRONMENT

ROOT = Path(__file__).parents[1]
PHASES = ("test", "tune", "bench")
SHARES = {"wheels": 1.0, "test": 8.0, "tune": 4.0, "bench": 10.0, "page": 1.0}
"""How the time that is left is shared out among a phase and those after it."""
OWN_TIME = 0.8
"""The part of its time after which a phase that can end by itself does."""
GRACE = 30.0
"""Seconds from the interrupt to the end of what does not heed it: pytest still writes its report."""
WORKERS = min(8, (os.cpu_count() or 2) // 2)
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
TESTS = "tests/kernels"
HEADS = ("benchmarks/test_head.py", "benchmarks/test_scaling.py", "benchmarks/test_objective.py")


@dataclass(frozen=True)
class Phase:
    """A command.

    Attributes:
        name: one of SHARES.
        command: to run in the repository's root.
        environment: beside the present one.
    """

    name: str
    command: Sequence[str]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What became of a phase.

    Attributes:
        name: of the phase.
        problem: empty where it succeeded.
        seconds: that it took.
    """

    name: str
    problem: str
    seconds: float


@dataclass
class Session:
    """One run: its clock, its log and what came of its phases.

    Attributes:
        log: that everything goes to, beside the screen.
        deadline: of `time.monotonic`.
        to_come: names of the phases, the present one first.
        outcomes: of the phases so far.
    """

    log: TextIO
    deadline: float
    to_come: list[str]
    outcomes: list[Outcome] = field(default_factory=list)

    def limit(self) -> float:
        """Seconds for the present phase."""
        left = max(0.0, self.deadline - time.monotonic())
        return left * SHARES[self.to_come[0]] / sum(SHARES[name] for name in self.to_come)

    def say(self, line: str) -> None:
        """Write a line to the screen and into the log; which is kept with the results: no path of this machine."""
        line = line.replace(sys.prefix, "PREFIX").replace(f"{ROOT}{os.sep}", "")
        print(line, flush=True)
        self.log.write(line + "\n")
        self.log.flush()

    def run(self, phase: Phase) -> None:
        """Run a phase; interrupted at its limit, killed if that does not help."""
        limit, begin = self.limit(), time.monotonic()
        self.say(f"\n== {phase.name}, at most {seconds(limit)}: {' '.join(phase.command)}")
        process = subprocess.Popen(
            phase.command,
            cwd=ROOT,
            env={**os.environ, **phase.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert process.stdout is not None
        reader = threading.Thread(target=self._copy, args=(process.stdout,), daemon=True)
        reader.start()
        problem = _wait(process, limit)
        reader.join(GRACE)
        self.to_come.remove(phase.name)
        self.outcomes.append(Outcome(phase.name, problem, time.monotonic() - begin))
        if problem:
            self.say(f"== {phase.name}: {problem}")

    def _copy(self, stream: Iterable[str]) -> None:
        for line in stream:
            self.say(line.rstrip("\n"))


def _wait(process: subprocess.Popen[str], limit: float) -> str:
    """Until a process ends; says what was wrong with that."""
    for patience, signal_number in ((limit, signal.SIGINT), (GRACE, signal.SIGKILL)):
        try:
            status = process.wait(patience)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal_number)
            continue
        if signal_number == signal.SIGKILL:
            break
        return f"exit status {status}" if status else ""
    process.wait()
    return f"its time was up after {seconds(limit)}"


def found(module: str, path: Sequence[str]) -> bool:
    """Whether a top-level module could be imported, without importing it."""
    name = module.partition(".")[0]
    if name in sys.builtin_module_names or name in sys.stdlib_module_names:
        return True
    return importlib.machinery.PathFinder.find_spec(name, list(path)) is not None


def missing_modules(file: Path, path: Sequence[str]) -> set[str]:
    """Modules that a file imports at its top, itself or through its neighbours, and that are not there."""
    missing: set[str] = set()
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Import):
            missing |= {alias.name for alias in statement.names if not found(alias.name, path)}
        elif isinstance(statement, ast.ImportFrom) and not statement.level:
            missing |= {name for name in [statement.module or ""] if not found(name, path)}
        elif isinstance(statement, ast.ImportFrom):
            names = [statement.module] if statement.module else [alias.name for alias in statement.names]
            neighbours = (file.with_name(f"{name}.py") for name in names)
            missing |= {name for one in neighbours if one.exists() for name in missing_modules(one, path)}
    return missing


def test_command(session: Session, path: Sequence[str], folder: Path, dry_run: bool) -> list[str]:
    """The tests that can be run with what is installed; says which cannot."""
    command = [*PYTEST, f"{TESTS}/test_reference.py" if dry_run else TESTS]
    for file in sorted((ROOT / TESTS).glob("test_*.py")):
        if missing := missing_modules(file, path):
            session.say(f"skipped: {file.relative_to(ROOT)} needs {', '.join(sorted(missing))}")
            command.append(f"--ignore={file.relative_to(ROOT)}")
    if not found("pytest_timeout", path):
        session.say("skipped: time limits of single tests need pytest-timeout")
        configuration = folder / "pytest.ini"
        configuration.write_text("[pytest]\nmarkers = gpu: needs a CUDA device\n", encoding="utf-8")
        command += ["-c", str(configuration), f"--rootdir={ROOT}"]
    if found("xdist", path) and not dry_run:
        command += ["-n", str(WORKERS)]
    return command


def tune_command(table: Path, limit: float, dry_run: bool) -> list[str]:
    """The tuner; tiny in a dry run."""
    command = [sys.executable, "-m", "exgrpo.kernels.tune", "--output", str(table)]
    if dry_run:
        return [*command, "--shapes", "4,16,128", "--dtype", "float32", "--minutes", "0.02"]
    return [*command, "--minutes", f"{OWN_TIME * limit / 60:.2f}"]


def bench_command(record: Path, limit: float, dry_run: bool) -> list[str]:
    """The benchmarks of the head and what surrounds it; tiny in a dry run."""
    what = [HEADS[0], "--sizes=tiny", "-k", "exgrpo or floor"] if dry_run else [*HEADS, "--sizes=full"]
    minutes = f"--minutes={OWN_TIME * limit / 60:.2f}"
    return [*PYTEST, *what, "--benchmark-only", f"--benchmark-json={record}", minutes]


def run(options: argparse.Namespace, session: Session, stem: str, scratch: Path) -> None:
    """All phases that were asked for."""
    table = (options.output / f"{stem}.launch.toml").resolve()
    record, packages = scratch / "record.json", scratch / "packages"
    path = [str(packages), str(ROOT), *sys.path]
    environment = {"PYTHONPATH": os.pathsep.join([str(packages), str(ROOT), os.environ.get("PYTHONPATH", "")])}
    if options.wheels:
        wheels = sorted(str(wheel.resolve()) for wheel in options.wheels.glob("*.whl"))
        install = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--target", str(packages)]
        session.run(Phase("wheels", [*install, *wheels]))
    if "test" in options.phases:
        # With compilers in processes of their own, pytest's workers would wait for these at the end and never report.
        alone = environment | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
        session.run(Phase("test", test_command(session, path, scratch, options.dry_run), alone))
    if "tune" in options.phases:
        interpreted = {"TRITON_INTERPRET": "1"} if options.dry_run else {}
        table.unlink(missing_ok=True)  # that of an earlier run must not be taken for this one's
        command = tune_command(table, session.limit(), options.dry_run)
        session.run(Phase("tune", command, environment | interpreted))
        if table.exists():
            environment[ENVIRONMENT] = str(table)
    if "bench" in options.phases:
        session.run(Phase("bench", bench_command(record, session.limit(), options.dry_run), environment))
        render = [sys.executable, "-m", "benchmarks.render", str(record), "--output", str(options.output.resolve())]
        session.run(Phase("page", render, environment))


def summary(session: Session) -> int:
    """Say what became of the phases; returns the exit status."""
    session.say("")
    for outcome in session.outcomes:
        session.say(f"{outcome.name:8}{seconds(outcome.seconds):>10}   {outcome.problem or 'succeeded'}")
    return int(any(outcome.problem for outcome in session.outcomes))


def _phases(words: str) -> list[str]:
    chosen = words.split(",")
    if unknown := [word for word in chosen if word not in PHASES]:
        raise argparse.ArgumentTypeError(f"unknown phase {unknown[0]!r}; expected some of {','.join(PHASES)}")
    return [name for name in PHASES if name in chosen]


def _folder(word: str) -> Path:
    if not list(Path(word).glob("*.whl")):
        raise argparse.ArgumentTypeError(f"there is no wheel in {word!r}; expected a folder with *.whl files")
    return Path(word)


def parse(argv: list[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="for all phases together (%(default)s)")
    parser.add_argument(
        "--phases", type=_phases, default=list(PHASES), help=f"some of {','.join(PHASES)}, all by default"
    )
    parser.add_argument("--wheels", type=_folder, help="folder of wheels to use, without what they depend on")
    parser.add_argument("--output", type=Path, help="folder for the results (benchmarks/results)")
    parser.add_argument("--dry-run", action="store_true", help="every phase tiny, on the CPU, into runs/dry_run")
    options = parser.parse_args(argv)
    options.output = options.output or (ROOT / "runs" / "dry_run" if options.dry_run else RESULTS)
    return options


def main(argv: list[str]) -> int:
    """Run the program; returns its exit status."""
    options = parse(argv)
    if not torch.cuda.is_available() and not options.dry_run:
        print("error: there is no CUDA device; --dry-run tries the phases on the CPU", file=sys.stderr)
        return 2
    stem = stem_of(str(datetime.date.today()), torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")
    names = [name for name in SHARES if name in options.phases]
    names = ["wheels"] * bool(options.wheels) + names + ["page"] * ("bench" in names)
    options.output.mkdir(parents=True, exist_ok=True)
    with (
        (options.output / f"{stem}.log").open("a", encoding="utf-8") as log,
        tempfile.TemporaryDirectory() as scratch,
    ):
        session = Session(log, time.monotonic() + 60 * options.minutes, names)
        session.say(f"{datetime.datetime.now():%Y-%m-%d %H:%M}, torch {torch.__version__}: {' '.join(argv)}")
        run(options, session, stem, Path(scratch))
        return summary(session)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
