"""Runs that nothing interrupts, one of each kind: what all others are compared with, and what damages are done to."""

import json
import shutil
import time
from pathlib import Path
from typing import Any, NamedTuple

from exgrpo.train.checkpoint.listing import FOLDER, folder_name, folders
from exgrpo.train.checkpoint.resume import FINISHED
from tests.torture.jobs import LONGEST, STEPS, Kind, start
from tests.torture.kills import LOOK_EVERY, Times
from tests.torture.loading import Loaded, load, outcome


class TortureError(Exception):
    """What has to be right before anything can be tried is wrong."""


class Reference(NamedTuple):
    """An uninterrupted run: its folder, the times of its parts, and what it has come to."""

    run: Path
    times: Times
    outcome: dict[str, Any]


class References:
    """Makes uninterrupted runs in a folder when they are asked for, and takes those that are there already."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[str, Reference] = {}
        self._loaded: dict[tuple[Path, int], Loaded] = {}

    def of(self, kind: Kind) -> Reference:
        """The uninterrupted run of a kind.

        Raises:
            TortureError: it fails.
        """
        if kind.name not in self._known:
            run, times = self.folder / kind.name, self.folder / f"{kind.name}.json"
            if not (run / FINISHED).exists() or not times.exists():
                shutil.rmtree(run, ignore_errors=True)
                times.write_text(json.dumps(_done(kind, run)))
            self._known[kind.name] = Reference(run, json.loads(times.read_text()), outcome(run))
        return self._known[kind.name]

    def loaded(self, source: Path, step: int, work: Path) -> Loaded:
        """What a sound run goes on from where the checkpoint of a step is its newest; `work` is for a copy."""
        key = (source, step)
        if key not in self._loaded:
            shutil.copytree(source, work)
            for folder in folders(work):
                if int(folder.name[-8:]) > step:
                    shutil.rmtree(folder)
            self._loaded[key] = load(work)
            shutil.rmtree(work)
        return self._loaded[key]

    def forget(self, source: Path) -> None:
        """Take no more for granted what a run goes on from: its folder is another one now."""
        self._loaded = {key: loaded for key, loaded in self._loaded.items() if key[0] != source}


def _done(kind: Kind, run: Path) -> Times:
    """Do a run without interruption; returns its times."""
    run.parent.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    marks: Times = {}
    with start(kind, run) as started:
        while started.running():
            names = {folder.name for folder in folders(run)}
            for mark, come in (("start", bool(names)), ("end", folder_name(STEPS) in names)):
                if come:
                    marks.setdefault(mark, time.monotonic() - begun)
            time.sleep(10 * LOOK_EVERY)
        done = started.finish(LONGEST)
    whole = time.monotonic() - begun
    if done.returncode or not (run / FOLDER).is_dir():
        raise TortureError(f"a run of {kind.name} that nothing interrupts fails:\n{done.stdout[-2000:]}{done.stderr}")
    return {"whole": whole, "start": marks["start"], "end": whole - marks["end"]}
