"""Write metrics and samples into a run's folder, and send metrics to trackers."""

import json
import logging
import math
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TextIO

from exgrpo.train.common.errors import OutputError, os_errors_as, shown
from exgrpo.train.metrics.log_files import METRICS, SAMPLES, RecordKind, Sample, to_line
from exgrpo.train.metrics.trackers import Tracker, tracked

logger = logging.getLogger(__name__)

SAMPLES_SIZE = "samples_jsonl"
"""Key of `RunLog.position` for the size of samples.jsonl in bytes."""
GO_ON = "Make room there and start again with --resume auto, which goes on from the last checkpoint"
"""Remedy in messages if the results of a run cannot be written."""


class RunLog:
    """Writes metrics.jsonl and samples.jsonl into a run's folder, and logs metrics to trackers.

    A tracker that fails is dropped with one warning, since metrics.jsonl has everything.

    Args:
        trackers: trackers; they are closed with the log.
        resume: `position` at the checkpoint of a resumed run; later lines are truncated. If a file is shorter, the run
            appends to it after a warning.
    """

    def __init__(self, folder: Path, trackers: Sequence[Tracker] = (), *, resume: dict[str, int] | None = None) -> None:
        self._trackers = list(trackers)
        self._step = 0
        self._metrics = (folder / METRICS).open("a", encoding="utf-8")
        self._samples = (folder / SAMPLES).open("a", encoding="utf-8")
        if resume is not None:
            self._step = resume["step"]
            for file, size in ((self._metrics, resume["metrics"]), (self._samples, resume[SAMPLES_SIZE])):
                if (now := os.fstat(file.fileno()).st_size) < size:  # truncate would fill it up with NUL bytes
                    logger.warning("%s is damaged: it has %d bytes and had %d", file.name, now, size)
                    file.write("\n")  # the last line may be incomplete
                else:
                    file.truncate(size)

    def metrics(self, kind: RecordKind, record: dict[str, float]) -> None:
        """Append one record; NaN becomes null.

        Raises:
            OutputError: metrics.jsonl cannot be written.
        """
        self._step = step = int(record["step"])
        plain = {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in record.items()}
        with _written(self._metrics):
            self._metrics.write(json.dumps({"step": step, "kind": kind, **plain}) + "\n")
            self._metrics.flush()
        self._tell(lambda tracker: tracker.log(step, tracked(plain)))

    def _tell(self, message: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            try:
                message(tracker)
            except Exception as error:  # a failing service must not end the training
                self._trackers.remove(tracker)
                warning = "%s failed (%s) and gets no more numbers; metrics.jsonl has all of them"
                logger.warning(warning, tracker.name, shown(error))

    def position(self) -> dict[str, int]:
        """Flush the files to disk; returns the latest step and the files' sizes in bytes.

        Raises:
            OutputError: the files cannot be written.
        """
        for file in (self._metrics, self._samples):
            with _written(file):
                file.flush()
                os.fsync(file.fileno())
        metrics, samples = (os.fstat(file.fileno()).st_size for file in (self._metrics, self._samples))
        return {"step": self._step, "metrics": metrics, SAMPLES_SIZE: samples}

    def sample(self, sample: Sample) -> None:
        """Append a group to samples.jsonl.

        Raises:
            OutputError: samples.jsonl cannot be written.
        """
        with _written(self._samples):
            self._samples.write(to_line(sample))
            self._samples.flush()

    def close(self) -> None:
        """Flush and close everything."""
        for file in (self._metrics, self._samples):
            with suppress(OSError):  # unflushed data is left only after a write error, which was raised then
                file.close()
        self._tell(lambda tracker: tracker.close())


def _written(file: TextIO) -> AbstractContextManager[None]:
    return os_errors_as(OutputError, f"{file.name} cannot be written", GO_ON)
