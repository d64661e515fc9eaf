"""Write metrics and samples into a run's folder, and send metrics to TensorBoard, Weights & Biases and Trackio.

The package of a tracker is imported only if `output.trackers` names it. Only rank 0 opens trackers.
"""

import json
import logging
import math
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, TextIO

from exgrpo.train.common.durable import write_whole
from exgrpo.train.common.errors import ConfigError, OutputError, os_errors_as, shown
from exgrpo.train.config.options import Config
from exgrpo.train.metrics.log_files import METRICS, SAMPLES, RecordKind, Sample, read_records, to_line

logger = logging.getLogger(__name__)

SAMPLES_SIZE = "samples_jsonl"
"""Key of `RunLog.position` for the size of samples.jsonl in bytes."""
GO_ON = "Make room there and start again with --resume auto, which goes on from the last checkpoint"
"""Remedy in messages if the results of a run cannot be written."""
# Extra of this package that installs a tracker.
EXTRAS = {"tensorboard": "train", "wandb": "wandb", "trackio": "trackio"}
RUN_ID, SENT = "run_id", "sent.json"
"""Files in the folder of a run."""


class Tracker(Protocol):
    """Receives metrics; may raise anything, and is not used again then. `name` is its name in `output.trackers`."""

    name: str

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log numbers of a step by name; steps never decrease, and one step may be logged several times."""

    def close(self) -> None:
        """Flush and close."""


class TensorBoard:
    """Writes event files into the run's folder; readers purge those of a resumed run after its checkpoint."""

    name = "tensorboard"

    def __init__(self, folder: Path, step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.events = SummaryWriter(str(folder / "tensorboard"), purge_step=None if step is None else step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write one event for each number."""
        for name, value in values.items():
            self.events.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the file."""
        self.events.close()


class Service:
    """A run of Weights & Biases or of Trackio, which has the same interface; a resumed run continues it.

    Services cannot delete numbers, so a resumed run does not send numbers again that it recomputes: `sent` has the last
    step of each. Trackio stores locally, or as its environment variables say. Offline, each continuation at Weights &
    Biases is a separate folder with the run's id, which `wandb sync` joins.
    """

    def __init__(self, name: str, config: Config, folder: Path, sent: Mapping[str, int]) -> None:
        module, own = import_module(name), _run_id(folder)
        self.name, self.sent, title = name, sent, folder.resolve().name
        self.close = module.finish  # not the run's method: Trackio calls that again at exit
        arguments: dict[str, Any] = {"name": f"{title}-{own}"}  # Trackio identifies a run by its name
        if name == "wandb":  # without its console, which would log every frame of the progress bar
            arguments = {"id": own, "name": title, "dir": str(folder), "settings": {"console": "off"}}
        settings = config.model_dump(mode="json")
        self.run = module.init(project=config.output.project, config=settings, resume="allow", **arguments)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the numbers that have not been sent yet."""
        if new := {name: value for name, value in values.items() if step > self.sent.get(name, -1)}:
            self.run.log(new, step=step)


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
        """Append one record; NaN becomes null; raise OutputError if metrics.jsonl cannot be written."""
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
        """Flush the files to disk; return the latest step and their sizes in bytes, or raise OutputError."""
        for file in (self._metrics, self._samples):
            with _written(file):
                file.flush()
                os.fsync(file.fileno())
        metrics, samples = (os.fstat(file.fileno()).st_size for file in (self._metrics, self._samples))
        return {"step": self._step, "metrics": metrics, SAMPLES_SIZE: samples}

    def sample(self, sample: Sample) -> None:
        """Append a group to samples.jsonl; raise OutputError if it cannot be written."""
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


def _run_id(folder: Path) -> str:
    """Return the id of the run in this folder, the same when it is resumed; created at the first call."""
    path = folder / RUN_ID
    if not path.exists():
        write_whole(path, secrets.token_hex(4).encode())
    return path.read_text(encoding="utf-8").strip()


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError, with the command to install them, if the trackers' packages are missing on this rank."""
    specs = {name: find_spec(name) for name in names}
    # A plain folder of this name, such as wandb's output, is found as a package without origin.
    missing = [name for name, spec in specs.items() if spec is None or spec.origin is None]
    if missing:
        extras = ",".join(dict.fromkeys(EXTRAS[name] for name in missing))
        raise ConfigError(
            f"output.trackers: {' and '.join(missing)} cannot be imported; run pip install 'exgrpo[{extras}]', "
            "or leave it out"
        )


def open_trackers(config: Config, folder: Path, step: int | None) -> list[Tracker]:
    """Open the trackers of `output.trackers`; raise ConfigError if one cannot start.

    Args:
        folder: folder of the run, whose metrics.jsonl is not truncated to the checkpoint yet.
        step: step of the checkpoint that is resumed; None: a new run.
    """
    names = dict.fromkeys(config.output.trackers)
    sent = {} if step is None or names.keys() <= {TensorBoard.name} else _sent(folder)
    trackers: list[Tracker] = []
    for name in names:
        try:
            of_files = name == TensorBoard.name
            trackers.append(TensorBoard(folder, step) if of_files else Service(name, config, folder, sent))
        except Exception as error:  # packages and services may raise anything
            for tracker in trackers:
                with suppress(Exception):
                    tracker.close()
            raise ConfigError(f"output.trackers: {name} cannot start: {shown(error)}") from error
    return trackers


def tracked(numbers: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record of metrics.jsonl, without nulls, under names with the prefix that groups them."""
    return {
        name if "/" in name else f"train/{name}": value
        for name, value in numbers.items()
        if name != "step" and value is not None
    }


def _sent(folder: Path) -> dict[str, int]:
    """Return, by tracked name, the last step whose number was sent to services.

    A file keeps this over several continuations, since each truncates metrics.jsonl to its checkpoint.
    """
    path = folder / SENT
    last: dict[str, int] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for record in read_records(folder / METRICS)[0]:  # skips a line cut by an interruption
        last |= {name: max(record.step, last.get(name, 0)) for name in tracked(record.numbers)}
    write_whole(path, json.dumps(last).encode())
    return last
