"""The plan, and what comes of its cases: a list of problems, which is empty where all that is promised was kept."""

import random
import re
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from exgrpo.train.checkpoint.listing import survey
from exgrpo.train.checkpoint.resume import FINISHED
from exgrpo.train.common.durable import LOCK
from exgrpo.train.common.errors import ExgrpoError
from tests.torture.damages import Damage, needed, newest_sound, unnamed
from tests.torture.jobs import KINDS, LONGEST, Kind, do, start
from tests.torture.kills import Kill, strike
from tests.torture.loading import digests, load, outcome, warnings
from tests.torture.references import References

What = Literal["kills", "resume", "load"]
ROUND: tuple[What, ...] = ("load",) * 7 + ("kills",) + ("load",) * 8 + ("resume",)
"""The cases follow each other so, again and again: most damages need no run."""
MOST_KILLS = 6
TWO = 0.25
"""How often two files are damaged at once."""
LINES = 12
"""Of what a program has printed that fails."""


@dataclass(frozen=True)
class Case:
    """A case that is planned: a run that is killed again and again, a damaged one that goes on, or is only loaded."""

    number: int
    what: What
    kind: Kind
    kills: tuple[Kill, ...] = ()  # one after the other, each of the run that goes on after the one before
    damages: tuple[Damage, ...] = ()  # all at once
    interrupted: bool = False  # whether the damaged run is one that was killed, if there has been one

    def __str__(self) -> str:
        doing = [kill.named(False) for kill in self.kills] + [damage.way for damage in self.damages]
        return f"{self.number} {self.what} {self.kind.name}: {', '.join(doing)}"


def drawn(seed: int, number: int, kinds: Sequence[Kind] = KINDS) -> Case:
    """The case of a number: what it does follows from the seed and that number."""
    rng = random.Random(f"{seed} {number}")
    what, kind = ROUND[number % len(ROUND)], rng.choice(kinds)
    if what == "kills":
        kills = tuple(Kill.drawn(rng, kind.ranks) for _ in range(rng.randint(2, MOST_KILLS)))
        return Case(number, what, kind, kills=kills)
    damages = tuple(Damage.drawn(rng) for _ in range(2 if rng.random() < TWO else 1))
    return Case(number, what, kind, damages=damages, interrupted=rng.random() < 0.5)


@dataclass
class Record:
    """What came of a case; a line of the program's file."""

    case: int
    what: str
    kind: str
    kills: list[str] = field(default_factory=list)  # moments and victims of those that were done
    late: list[str] = field(default_factory=list)  # moments that did not come before the run ended
    damages: list[tuple[str, str]] = field(default_factory=list)  # what was done, and to which file
    step: int | None = None  # the one that a damaged run goes on from; None: none is sound, or no damage
    problems: list[str] = field(default_factory=list)  # what was not as it is promised


class Campaign:
    """Does the cases of a plan, one at a time; runs that fail stay in the folder's folder "failed"."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.references = References(folder / "whole")

    def do(self, case: Case) -> Record:
        """Do a case.

        Raises:
            TortureError: an uninterrupted run of its kind fails.
        """
        run, record = self.folder / "work" / "run", Record(case.number, case.what, case.kind.name)
        shutil.rmtree(run.parent, ignore_errors=True)
        run.parent.mkdir()
        {"kills": self._kills, "resume": self._resume, "load": self._load}[case.what](case, run, record)
        if record.problems and run.exists():
            failed = self.folder / "failed" / str(case.number)
            shutil.rmtree(failed, ignore_errors=True)
            failed.parent.mkdir(exist_ok=True)
            run.rename(failed)
        shutil.rmtree(run.parent, ignore_errors=True)  # with what began anew
        return record

    def _kills(self, case: Case, run: Path, record: Record) -> None:
        """A run that is killed and started again, and then left alone."""
        whole = self.references.of(case.kind)
        for kill in case.kills:
            before = _steps(run)
            with start(case.kind, run, "--resume=auto") as started:
                killed = strike(kill, started, run, whole.times)
                done = started.finish(LONGEST)
            record.problems += _went_on(before, run, done.stdout)
            if not killed:
                record.late.append(kill.named(bool(before)))
                record.problems += [] if done.returncode == 0 else [f"failed before a kill: {_tail(done.stderr)}"]
                break
            record.kills.append(kill.named(bool(before)))
        if _steps(run) and not (run / FINISHED).exists():
            self._keep_aside(case, run)
        if not (run / FINISHED).exists():
            before = _steps(run)
            done = do(case.kind, run, "--resume=auto")
            record.problems += _went_on(before, run, done.stdout)
            if done.returncode:
                record.problems.append(f"does not go on: {_tail(done.stderr)}")
                return
        record.problems += self._differences(case, run)

    def _keep_aside(self, case: Case, run: Path) -> None:
        """An interrupted run, for damages."""
        aside = self.folder / "interrupted" / case.kind.name
        shutil.rmtree(aside, ignore_errors=True)
        shutil.copytree(run, aside)
        self.references.forget(aside)

    def _damaged(self, case: Case, run: Path, record: Record) -> dict[int, set[str]]:
        """Copy a run, damage the copy, and put down what has to follow; returns the files of each checkpoint."""
        source = self._source(case)
        shutil.copytree(source, run)
        (run / FINISHED).unlink(missing_ok=True)
        files = needed(source)
        for damage in case.damages:
            path = damage.do(run, files[max(files)])
            record.damages.append((damage.way, path or "nothing that would be changed"))
        record.step = newest_sound(files, _paths(record))
        return files

    def _source(self, case: Case) -> Path:
        aside = self.folder / "interrupted" / case.kind.name
        return aside if case.interrupted and aside.exists() else self.references.of(case.kind).run

    def _load(self, case: Case, run: Path, record: Record) -> None:
        """Damage that is loaded as a run would, which is not started."""
        files, source = self._damaged(case, run, record), self._source(case)
        before = _content(run)
        with warnings() as messages:
            try:
                loaded = load(run, source)
            except ExgrpoError as error:
                loaded = None
                messages.append(str(error))
            except Exception as error:  # a traceback, where a program would end in one
                record.problems.append(f"a defect: {error!r}")
                return
        if missing := unnamed(files, _paths(record), record.step, "\n".join(messages)):
            record.problems.append(f"no damaged file of the steps {missing} is named: {messages}")
        if record.step is None:
            record.problems += _refused(loaded is None, before, run)
        elif loaded is None:
            record.problems.append(f"step {record.step} is sound and not gone on with: {messages[-1]}")
        elif loaded != self.references.loaded(source, record.step, self.folder / "sound"):
            record.problems.append(f"step {loaded.step} is loaded, and not as step {record.step} was saved")

    def _resume(self, case: Case, run: Path, record: Record) -> None:
        """Damage of a run that goes on."""
        files = self._damaged(case, run, record)
        before = _content(run)
        done = do(case.kind, run, f"--resume={run}")
        if missing := unnamed(files, _paths(record), record.step, done.stderr):
            record.problems.append(f"no damaged file of the steps {missing} is named: {_tail(done.stderr)}")
        if "Traceback" in done.stderr:
            record.problems.append(f"a traceback: {_tail(done.stderr)}")
        if record.step is None:
            record.problems += _refused(done.returncode > 0, before, run)
            if done.stderr.count("error: ") != 1:
                record.problems.append(f"not one line of an error: {_tail(done.stderr)}")
        elif done.returncode:
            record.problems.append(f"does not go on: {_tail(done.stderr)}")
        else:
            record.problems += _went_on([record.step], run, done.stdout, _paths(record)) + self._differences(case, run)

    def _differences(self, case: Case, run: Path) -> list[str]:
        """What differs from the uninterrupted run."""
        try:
            mine, whole = outcome(run), self.references.of(case.kind).outcome
        except ExgrpoError as error:
            return [f"its end cannot be loaded: {error}"]
        found = [name for name, value in whole.items() if mine[name] != value]
        return [f"differs from the uninterrupted run: {', '.join(found)}"] if found else []


def _paths(record: Record) -> list[str]:
    return [path for _, path in record.damages]


def _steps(run: Path) -> list[int]:
    """Of the complete checkpoints, newest first."""
    return [found.step for found in survey(run)[0]]


def _went_on(before: list[int], run: Path, printed: str, damaged: Collection[str] = ()) -> list[str]:
    """What is wrong after a start that had these checkpoints, whether it was killed or not.

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


def _refused(refused: bool, before: dict[str, str], run: Path) -> list[str]:
    """What is wrong where no checkpoint is sound."""
    problems = [] if refused else ["no checkpoint is sound, and it goes on"]
    return problems + (["it is refused, and files have changed"] if _content(run) != before else [])


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-LINES:])
