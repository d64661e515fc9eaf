"""Send metrics to TensorBoard, Weights & Biases and Trackio, as `output.trackers` names them.

The package of a tracker is imported only if it is named. Only rank 0 opens trackers.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from exgrpo.train.common.durable import write_whole
from exgrpo.train.common.errors import ConfigError, shown
from exgrpo.train.config.options import Config
from exgrpo.train.metrics.log_files import METRICS, read_records

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

    Services cannot delete numbers, so a resumed run does not send numbers again that it recomputes. Trackio stores
    locally, or as its environment variables say. Offline, each continuation at Weights & Biases is a separate folder
    with the run's id, which `wandb sync` joins.

    Args:
        sent: by tracked name, the last step whose number was sent.
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


def _run_id(folder: Path) -> str:
    """Return the id of the run in this folder, the same when it is resumed; created at the first call."""
    path = folder / RUN_ID
    if not path.exists():
        write_whole(path, secrets.token_hex(4).encode())
    return path.read_text(encoding="utf-8").strip()


def check_trackers(names: Sequence[str]) -> None:
    """Check on every rank that the trackers' packages are installed.

    Raises:
        ConfigError: packages are missing; the message has the command to install them.
    """
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
    """Open the trackers of `output.trackers`.

    Args:
        folder: folder of the run, whose metrics.jsonl is not truncated to the checkpoint yet.
        step: step of the checkpoint that is resumed; None: a new run.

    Raises:
        ConfigError: a tracker cannot start.
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
