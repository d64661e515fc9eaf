"""One day on a GPU, in one program: `python -m benchmarks.gpu_day --minutes 25`.

It runs the parts below in the order of what they are worth, as far as the minutes go, and the next call goes on where
this one stopped: OUTPUT/parts.json says what is finished. OUTPUT/DATE_DEVICE.json, .md and .svg are the record of all
parts so far, its page and its plots, and OUTPUT/day.log has everything that was said. A part that fails, or does not
end within its limit, stops no other; it comes last in the next call. The exit status is 0 where no part failed.
"""

import argparse
import datetime
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu_day import wheels
from benchmarks.gpu_day.finished import Done, Parts
from benchmarks.gpu_day.needs import missing_of
from benchmarks.gpu_day.page import record_of
from benchmarks.gpu_day.parts import PARTS, Part
from benchmarks.gpu_day.runner import Log, run
from benchmarks.programs import ROOT
from benchmarks.render import seconds, write

PACKAGES = "packages"
"""The folder in the output into which the wheels of --packages are unpacked."""
LEAST_REHEARSED, REHEARSED = 0.2, 3.0
"""Minutes for a part of the rehearsal, as `Part.least` and `Part.most`."""


@dataclass(frozen=True)
class Day:
    """One call of the program.

    Attributes:
        folder: of all that it leaves.
        device: name of the GPU, or `cpu`.
        revision: of git; empty where none is known.
        rehearse: whether the parts are tiny.
        deadline: of `time.monotonic`.
        log: for all that is said.
    """

    folder: Path
    device: str
    revision: str
    rehearse: bool
    deadline: float
    log: Log

    @property
    def path(self) -> list[str]:
        """Where packages are looked for."""
        return [str(self.folder / PACKAGES), str(ROOT), *sys.path]

    @property
    def environment(self) -> dict[str, str]:
        """What every part has beside the present environment."""
        before = [path for path in [os.environ.get("PYTHONPATH", "")] if path]
        return {"PYTHONPATH": os.pathsep.join([*self.path[:2], *before])}

    def left(self) -> float:
        """Minutes until the deadline."""
        return (self.deadline - time.monotonic()) / 60

    def take(self, part: Part) -> Done:
        """Run a part; what an earlier try left is not taken for this one's."""
        result = self.folder / f"{part.name}{part.result}"
        if part.result:
            result.unlink(missing_ok=True)
        limit = min(self.left(), REHEARSED if self.rehearse else part.most)
        words = part.words(self.rehearse, result.resolve(), limit)
        more = part.rehearsal_environment if self.rehearse else {}
        self.log.say(f"\n== {part.name}, at most {seconds(60 * limit)}: {' '.join(words)}")
        outcome = run(words, {**self.environment, **part.environment, **more}, 60 * limit, self.log, part.statuses)
        problem = outcome.problem
        if not problem and part.result and not result.exists():
            problem = "it left no result"
        if problem:
            self.log.say(f"== {part.name}: {problem}")
        return Done(str(datetime.date.today()), self.device, self.revision, round(outcome.seconds, 1), problem)


def revision() -> str:
    """The commit of the working tree, with `+` where it has changes; empty where that is not known."""
    with suppress(OSError):
        done = subprocess.run(
            ["git", "describe", "--always", "--abbrev=10", "--exclude=*", "--dirty=+"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout.strip()
    return ""


def order(parts: Sequence[Part], done: Parts, device: str) -> list[Part]:
    """The parts that are left, by worth; those that were begun before come behind those that were not."""
    left = [part for part in parts if not done.finished(part.name, device)]
    return sorted(left, key=lambda part: done.tried(part.name, device))


def parts_of(day: Day, chosen: Sequence[Part], named: bool) -> int:
    """Run parts as far as the time goes, with a page after each.

    Args:
        day: this call.
        chosen: the parts to run.
        named: whether they were named: then they are run again where they are finished.

    Returns:
        the exit status.
    """
    done = Parts.read(day.folder)
    reasons = {
        part.name: "; ".join(f"needs {need}: {reason}" for need in part.needs if (reason := missing_of(need, day.path)))
        for part in PARTS
    }
    said, failed = [], False
    for part in chosen if named else order(chosen, done, day.device):
        least = LEAST_REHEARSED if day.rehearse else part.least
        if reasons[part.name]:
            said.append((part.name, 0.0, f"left out, {reasons[part.name]}"))
        elif day.left() <= least:
            left = max(0.0, day.left())
            said.append((part.name, 0.0, f"not begun: it needs {least:g} minutes, and {left:.1f} are left"))
        else:
            of_part = day.take(part)
            done.note(part.name, of_part)
            failed = failed or bool(of_part.problem)
            said.append((part.name, of_part.seconds, of_part.problem or "finished"))
            page(day, done, reasons)
    written = page(day, done, reasons)
    day.log.say("")
    for name, took, words in said:
        day.log.say(f"{name:16}{seconds(took) if took else '':>10}   {words}")
    day.log.say(f"\n{written}")
    return int(failed)


def page(day: Day, done: Parts, reasons: dict[str, str]) -> Path:
    """Write the record and the page of all parts so far; returns the page."""
    known = {name: f"left out, {reason}" for name, reason in reasons.items() if reason}
    return write(record_of(PARTS, done, day.device, known, day.folder), day.folder)


def _parts(words: str) -> list[Part]:
    names = words.split(",")
    known = [part.name for part in PARTS]
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"unknown part {unknown[0]!r}; expected some of {','.join(known)}")
    return [part for part in PARTS if part.name in names]


def _listed() -> str:
    lines = [f"  {part.name:16} {part.title} ({part.least:g} to {part.most:g} minutes)" for part in PARTS]
    return "\n".join(["parts, in the order of what they are worth:", *lines])


def parse(argv: list[str]) -> argparse.Namespace:
    """The options."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks.gpu_day", None, __doc__, _listed(), formatter_class=form)
    parser.add_argument("--minutes", type=float, default=25.0, help="for all parts of this call (%(default)s)")
    parser.add_argument("--parts", type=_parts, help="names with commas between; these are run, finished or not")
    parser.add_argument("--output", type=Path, help="folder of all results (runs/gpu_day)")
    parser.add_argument("--rehearse", action="store_true", help="every part tiny, on the CPU (runs/gpu_rehearsal)")
    parser.add_argument("--packages", type=Path, help="folder of wheels to use, or of their pieces")
    parser.add_argument(
        "--wheels",
        type=Path,
        nargs="?",
        const=ROOT / "runs" / "wheels",
        help="list the wheels that are missing here, write FOLDER/fetch.sh, and stop (runs/wheels)",
    )
    parser.add_argument("--there", type=Path, help="for --wheels: another machine's `pip list --format=freeze`")
    options = parser.parse_args(argv)
    options.output = options.output or ROOT / "runs" / ("gpu_rehearsal" if options.rehearse else "gpu_day")
    return options


def main(argv: list[str]) -> int:
    """Run the program; returns its exit status."""
    options = parse(argv)
    if options.wheels:
        print(wheels.plan(options.wheels, options.there))
        return 0
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not options.rehearse:
        print("error: there is no CUDA device; --rehearse tries the parts on the CPU", file=sys.stderr)
        return 2
    options.output.mkdir(parents=True, exist_ok=True)
    with (options.output / "day.log").open("a", encoding="utf-8") as file:
        device = torch.cuda.get_device_name() if on_gpu else "cpu"
        deadline = time.monotonic() + 60 * options.minutes
        day = Day(options.output.resolve(), device, revision(), options.rehearse, deadline, Log(file))
        day.log.say(f"{datetime.datetime.now():%Y-%m-%d %H:%M}, {device}, torch {torch.__version__}: {' '.join(argv)}")
        try:
            if options.packages:
                wheels.install(options.packages, day.folder / PACKAGES, day.log)
            return parts_of(day, options.parts or PARTS, bool(options.parts))
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            day.log.say("\nstopped: the next call goes on with this part")
            return 128 + signal.SIGINT
