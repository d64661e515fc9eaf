"""A run of a study as a separate process on its own core."""

import shutil
import signal
import subprocess
from dataclasses import asdict
from pathlib import Path

import numpy as np

from exgrpo.tools.first import RunFailedError, last_words, start
from exgrpo.train.checkpoint.listing import survey
from exgrpo.train.checkpoint.resume import FINISHED
from exgrpo.train.config.options import CheckpointConfig, Config, OutputConfig
from exgrpo.train.config.recipe import to_yaml
from exgrpo.train.metrics.log_files import METRICS
from exgrpo.train.metrics.report.runs import load_run
from studies.origin import ROOT, Origin, today
from studies.results import Result, curves_of
from studies.study import Planned, key_of, settings_of

KEPT = ("config.yaml", METRICS, FINISHED)
"""Files kept of a run after its result is stored."""
CHECKPOINT_EVERY = 20


class Run:
    """A run as a process; it resumes from its last checkpoint if it was stopped.

    Args:
        planned: the run to do.
        folder: existing folder for the runs of all studies, each in a subfolder named by its key.
        core: number of the core.
    """

    def __init__(self, planned: Planned, folder: Path, core: int) -> None:
        self.planned, self.core = planned, core
        self.folder = folder.absolute() / planned.key
        self.log = self.folder.with_suffix(".log")
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def result(self, origin: Origin) -> Result | None:
        """Do the rest of the run; return None if it was stopped.

        Raise an ExgrpoError if it fails, its folder cannot be read, or the file of one of its functions has changed.
        """
        self._check_functions()
        if not (self.folder / FINISHED).exists():
            status = self._do()
            if self._stopped:
                return None
            if status:
                raise RunFailedError(last_words(self.log))
            try:
                self._check_functions()
            except RunFailedError:  # it may have used both the old and the new function
                shutil.rmtree(self.folder)
                raise
        return self._collected(origin)

    def _check_functions(self) -> None:
        if key_of(self.planned.config) != self.planned.key:
            raise RunFailedError(
                "the file of a function, or a module that it imports from there, has changed since the study was read: "
                "repeat the command to run with the new one"
            )

    def stop(self) -> None:
        """End the process; another thread may call this."""
        self._stopped = True
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def tidy(self) -> None:
        """Remove all files of a stored run except KEPT."""
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in KEPT:
                path.unlink()
        for path in (self.log, self.folder.with_suffix(".yaml")):
            path.unlink(missing_ok=True)

    def _do(self) -> int:
        self._process = start(self.core, self._arguments(), self.log, ROOT)
        if self._stopped:
            self.stop()
        return self._process.wait()

    def _arguments(self) -> list[str]:
        if self.folder.exists():
            if survey(self.folder)[0]:
                return ["--resume", str(self.folder)]
            shutil.rmtree(self.folder)
        recipe = self.folder.with_suffix(".yaml")
        recipe.write_text(to_yaml(self._placed()), encoding="utf-8")
        return ["--recipe", str(recipe)]

    def _placed(self) -> Config:
        """Return the configuration with its folder, and without unused output."""
        config = self.planned.config
        output = OutputConfig(
            folder=self.folder.parent, name=self.folder.name, trackers=(), sample_groups=0, save_model=False
        )
        checkpoint = CheckpointConfig(every=CHECKPOINT_EVERY, keep=1)
        reward = config.reward.model_copy(update={"workers": 1})
        return config.model_copy(update={"output": output, "checkpoint": checkpoint, "reward": reward})

    def _collected(self, origin: Origin) -> Result:
        config = self.planned.config
        columns = load_run(self.folder, self.planned.key).columns
        return Result(
            key=self.planned.key,
            settings=settings_of(config),
            **asdict(origin),
            date=today(),
            seconds=sum(float(np.nansum(columns[name])) for name in ("seconds", "seconds/evaluation")),
            curves=curves_of(columns, config.evaluation.samples),
        )
