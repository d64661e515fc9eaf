"""The plan, and what comes of its cases: a list of problems, which is empty where all that is promised was kept."""

import logging
import random
import re
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from logging.handlers import BufferingHandler
from pathlib import Path

from exgrpo.train.checkpoint.listing import survey
from exgrpo.train.checkpoint.resume import FINISHED
from exgrpo.train.common.durable import LOCK
from exgrpo.train.common.errors import ExgrpoError
from tests.torture.faults import Damage, Kill, needed
from tests.torture.runs import KINDS, Kind, References, digests, load, load_step, outcome

ROUND = ("load",) * 7 + ("kills",) + ("load",) * 8 + ("resume",)
"""The cases follow each other so, again and again: most damages need no run."""
MOST_KILLS = 6
TWO = 0.25
"""How often two files are damaged at once."""
LONGEST = 900.0
"""Seconds. A start that takes longer hangs."""
LINES = 12
"""Of what a program has printed that fails."""


@dataclass(frozen=True)
class Case:
    """A case that is planned: a run that is killed again and again, a damaged one that goes on, or is only loaded."""

    number: int
    what: str
    kind: Kind
    kills: tuple[Kill, ...] = ()  # one after the other, each of the run that goes on after the one before
    damages: tuple[Damage, ...] = ()  # all at once


def drawn(seed: int, number: int, kinds: Sequence[Kind] = KINDS) -> Case:
    """The case of a number: what it does follows from the seed and that number."""
    rng = random.Random(f"{seed} {number}")
    what, kind = ROUND[number % len(ROUND)], rng.choice(kinds)
    if what == "kills":
        kills = tuple(Kill.drawn(rng, kind.ranks) for _ in range(rng.randint(2, MOST_KILLS)))
        return Case(number, what, kind, kills=kills)
    return Case(number, what, kind, damages=tuple(Damage.drawn(rng) for _ in range(2 if rng.random() < TWO else 1)))


@dataclass
class Record:
    """What came of a case; a line of the program's file."""

    case: int
    what: str
    kind: str
    kills: list[str] = field(default_factory=list)  # those that were done, each before the run ended
    damages: list[str] = field(default_factory=list)  # the files that were damaged
    step: int | None = None  # the one that a damaged run goes on from; None: none is sound, or no damage
    problems: list[str] = field(default_factory=list)  # what was not as it is promised


class Campaign:
    """Does the cases of a plan, one at a time; runs that fail stay in the folder's folder "failed"."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.references = References(folder / "whole")

    def do(self, case: Case) -> Record:
        """Do a case."""
        run, record = self.folder / "work" / "run", Record(case.number, case.what, case.kind.name)
        shutil.rmtree(run.parent, ignore_errors=True)
        run.parent.mkdir(parents=True)
        if case.what == "kills":
            self._kills(case, run, record)
        else:
            self._damages(case, run, record)
        if record.problems and run.exists():
            failed = self.folder / "failed" / str(case.number)
            shutil.rmtree(failed, ignore_errors=True)
            failed.parent.mkdir(exist_ok=True)
            run.rename(failed)
        shutil.rmtree(run.parent, ignore_errors=True)  # with what began anew
        return record

    def _kills(self, case: Case, run: Path, record: Record) -> None:
        """A run that is killed and started again, and then left alone."""
        seconds = self.references.seconds(case.kind)
        for kill in (*case.kills, None):
            if (run / FINISHED).exists():
                break
            before = [found.step for found in survey(run)[0]]
            started = case.kind.start(run, "--resume=auto")
            killed = kill is not None and kill.strike(started, run, seconds)
            done = started.finish(LONGEST)
            record.problems += _went_on(before, run, done.stdout)
            if killed:
                record.kills.append(str(kill))
            elif done.returncode:
                record.problems.append(f"does not go on: {_tail(done.stderr)}")
                return
        record.problems += self._differences(case, run)

    def _damages(self, case: Case, run: Path, record: Record) -> None:
        """A damaged run that goes on, or is loaded as one that does."""
        source = self.references.of(case.kind)
        shutil.copytree(source, run)
        (run / FINISHED).unlink(missing_ok=True)
        files = needed(source)
        record.damages = [path for damage in case.damages if (path := damage.do(run, files[max(files)]))]
        damaged, before = set(record.damages), _content(run)
        record.step = max((step for step, of_step in files.items() if not of_step & damaged), default=None)
        told, goes_on = (self._load if case.what == "load" else self._resume)(case, run, record)
        passed = [step for step in files if record.step is None or step > record.step]
        if missing := [step for step in passed if not any(path in told for path in files[step] & damaged)]:
            record.problems.append(f"no damaged file of the steps {missing} is named: {told}")
        if goes_on != (record.step is not None):
            record.problems.append(f"the newest sound step is {record.step}, and it goes on: {goes_on}; {told}")
        if not goes_on and _content(run) != before:
            record.problems.append("it is refused, and files have changed")

    def _load(self, case: Case, run: Path, record: Record) -> tuple[str, bool]:
        """Load it, which starts no run; returns what is said, and whether it can go on."""
        source, handler = self.references.of(case.kind), BufferingHandler(1000)
        logging.getLogger("exgrpo").addHandler(handler)
        try:
            loaded, error = load(run, source), ""
        except ExgrpoError as problem:
            loaded, error = None, str(problem)
        except Exception as defect:  # a traceback, where a program would end in one
            loaded, error = None, f"a defect: {defect!r}"
            record.problems.append(error)
        finally:
            logging.getLogger("exgrpo").removeHandler(handler)
        if loaded and loaded != load_step(source, record.step or 0, self.folder / "sound"):
            record.problems.append(f"step {loaded.step} is loaded, and not as step {record.step} was saved")
        return "\n".join([*(line.getMessage() for line in handler.buffer), error]), loaded is not None

    def _resume(self, case: Case, run: Path, record: Record) -> tuple[str, bool]:
        """Go on with it to its end; returns what is said, and whether it went on."""
        done = case.kind.start(run, f"--resume={run}").finish(LONGEST)
        if "Traceback" in done.stderr or (done.returncode and done.stderr.count("error: ") != 1):
            record.problems.append(f"not one line of an error: {_tail(done.stderr)}")
        if not done.returncode:
            before = [] if record.step is None else [record.step]
            record.problems += _went_on(before, run, done.stdout, record.damages)
            record.problems += self._differences(case, run)
        return done.stderr, done.returncode == 0

    def _differences(self, case: Case, run: Path) -> list[str]:
        """What differs from the uninterrupted run."""
        try:
            mine, whole = outcome(run), outcome(self.references.of(case.kind))
        except ExgrpoError as error:
            return [f"its end cannot be loaded: {error}"]
        found = [name for name, value in whole.items() if mine[name] != value]
        return [f"differs from the uninterrupted run: {', '.join(found)}"] if found else []


def _went_on(before: list[int], run: Path, printed: str, damaged: Collection[str] = ()) -> list[str]:
    """What is wrong after a start that had checkpoints of these steps, newest first, whether it was killed or not.

    Checkpoints that are older than the one that was used may miss files that were damaged.
    """
    found, missed = survey(run)
    problems = [problem for problem in missed if not any(path in problem for path in damaged)]
    if before and (not found or found[0].step < before[0]):
        problems.append(f"step {before[0]} was complete and is lost")
    begun = re.search(r"going on with .* after step (\d+)", printed)
    if begun and (not before or int(begun[1]) != before[0]):
        problems.append(f"went on after step {begun[1]}; the newest one was that of {before[:1]}")
    return problems


def _content(run: Path) -> dict[str, str]:
    """Of a run's files, without the one that says who uses it."""
    return {name: digest for name, digest in digests(run).items() if name != LOCK}


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-LINES:])
