"""Where the numbers of a run go besides metrics.jsonl: TensorBoard, Weights & Biases, Trackio.

A tracker is asked for by `output.trackers`, and its package is imported only then. Rank 0 alone opens trackers.
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

# The extra of this package that brings a tracker.
EXTRAS = {"tensorboard": "train", "wandb": "wandb", "trackio": "trackio"}
RUN_ID, SENT = "run_id", "sent.json"
"""Files in the folder of a run."""


class Tracker(Protocol):
    """Takes numbers; may raise anything, after which it is not used again. `name` is that of `output.trackers`."""

    name: str

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the numbers of a step, by name; steps never go back, and one step may come several times."""

    def close(self) -> None:
        """Send what is left."""


class TensorBoard:
    """Event files in the run's folder; of a continued run, those after its checkpoint are purged by their readers."""

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
    """A run at Weights & Biases, or of Trackio, which has the same interface; a continued run goes on in it.

    What a service has got it cannot forget: the numbers which a continued run computes again are not sent again.
    Trackio stores locally, or where its environment variables say. Offline, every continuation at Weights & Biases is a
    folder of its own with the run's id, which `wandb sync` puts together.

    Args:
        name: of the package.
        config: of the run.
        folder: of the run.
        sent: by tracked name, the last step of which the service has the number.
    """

    def __init__(self, name: str, config: Config, folder: Path, sent: Mapping[str, int]) -> None:
        module, own = import_module(name), _run_id(folder)
        self.name, self.sent, title = name, sent, folder.resolve().name
        self.close = module.finish  # Trackio calls its run's own method again when the program ends
        arguments: dict[str, Any] = {"name": f"{title}-{own}"}  # by which Trackio finds a run
        if name == "wandb":  # its console would take a progress bar for a log
            arguments = {"id": own, "name": title, "dir": str(folder), "settings": {"console": "off"}}
        settings = config.model_dump(mode="json")
        self.run = module.init(project=config.output.project, config=settings, resume="allow", **arguments)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send what has not been sent yet."""
        if new := {name: value for name, value in values.items() if step > self.sent.get(name, -1)}:
            self.run.log(new, step=step)


def _run_id(folder: Path) -> str:
    """The id of the run in this folder, the same in every continuation; made at the first call."""
    path = folder / RUN_ID
    if not path.exists():
        write_whole(path, secrets.token_hex(4).encode())
    return path.read_text(encoding="utf-8").strip()


def check_trackers(names: Sequence[str]) -> None:
    """Find out on every rank, before anything is set up, whether the packages are there.

    Raises:
        ConfigError: naming those that are missing and how to install them.
    """
    specs = {name: find_spec(name) for name in names}
    # A plain folder of this name, as wandb leaves behind, passes for a package without origin.
    missing = [name for name, spec in specs.items() if spec is None or spec.origin is None]
    if missing:
        extras = ",".join(dict.fromkeys(EXTRAS[name] for name in missing))
        raise ConfigError(
            f"output.trackers: {' and '.join(missing)} cannot be imported; run pip install 'exgrpo[{extras}]', "
            "or leave it out"
        )


def open_trackers(config: Config, folder: Path, step: int | None) -> list[Tracker]:
    """The trackers of `output.trackers`.

    Args:
        config: of the run; trackers show it.
        folder: of the run; its metrics.jsonl still has what was logged after the checkpoint.
        step: the last one of the checkpoint from which a run goes on; None: the run is new.

    Raises:
        ConfigError: where one cannot start.
    """
    names = dict.fromkeys(config.output.trackers)
    sent = {} if step is None or names.keys() <= {TensorBoard.name} else _sent(folder)
    trackers: list[Tracker] = []
    for name in names:
        try:
            of_files = name == TensorBoard.name
            trackers.append(TensorBoard(folder, step) if of_files else Service(name, config, folder, sent))
        except Exception as error:  # packages and services fail in ways of their own
            for tracker in trackers:
                with suppress(Exception):
                    tracker.close()
            raise ConfigError(f"output.trackers: {name} cannot start: {shown(error)}") from error
    return trackers


def tracked(numbers: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record of metrics.jsonl, null or not, under the names that trackers group them by."""
    return {
        name if "/" in name else f"train/{name}": value
        for name, value in numbers.items()
        if name != "step" and value is not None
    }


def _sent(folder: Path) -> dict[str, int]:
    """By tracked name, the last step of which services have the number.

    A file keeps it from one continuation to the next: each cuts what it repeats off metrics.jsonl.
    """
    path = folder / SENT
    last: dict[str, int] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for record in read_records(folder / METRICS)[0]:  # without the line that an interruption cut
        last |= {name: max(record.step, last.get(name, 0)) for name in tracked(record.numbers)}
    write_whole(path, json.dumps(last).encode())
    return last
