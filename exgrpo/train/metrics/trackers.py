"""Where the numbers of a run go besides metrics.jsonl: TensorBoard, Weights & Biases, Trackio.

A tracker is asked for by `output.trackers`, and its package is imported only then. Rank 0 alone opens trackers.
"""

import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from exgrpo.train.common.errors import ConfigError, shown
from exgrpo.train.config.options import Config
from exgrpo.train.metrics.log_files import METRICS, read_records

# The extra of this package that brings a tracker.
EXTRAS = {"tensorboard": "train", "wandb": "wandb", "trackio": "trackio"}
RUN_ID = "run_id"


class Tracker(Protocol):
    """Takes numbers; may raise anything, after which it is not used again."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the numbers of a step, by name; steps never go back, and one step may come several times."""

    def close(self) -> None:
        """Send what is left."""


class TensorBoard:
    """Event files in the run's folder; of a continued run, those after its checkpoint are purged by their readers."""

    def __init__(self, folder: Path, step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        _leave_failures_to_callers()
        self.events = SummaryWriter(str(folder / "tensorboard"), purge_step=None if step is None else step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write one event for each number."""
        for name, value in values.items():
            self.events.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the file."""
        self.events.close()


def _leave_failures_to_callers() -> None:
    """TensorBoard's thread prints the traceback of a failure, which the next call raises as well."""
    before = threading.excepthook

    def hook(failure: threading.ExceptHookArgs) -> None:
        if not type(failure.thread).__module__.startswith("tensorboard."):
            before(failure)

    threading.excepthook = hook


class Wandb:
    """A run at Weights & Biases; a continued one goes on under the same id.

    What the service has got it cannot forget, and it takes no step below its latest: the numbers which a continued run
    computes again are not sent again. Offline, every continuation is a folder of its own with that id, which
    `wandb sync` puts together.
    """

    def __init__(self, config: Config, folder: Path, sent: Mapping[str, int]) -> None:
        import wandb

        self.sent = sent
        self.run = wandb.init(
            project=config.output.project,
            id=_run_id(folder),
            name=folder.name,
            dir=str(folder),
            config=config.model_dump(mode="json"),
            resume="allow",
            settings={"console": "off"},  # a live table, redrawn all the time, is no log
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send what has not been sent yet."""
        if (new := _unsent(step, values, self.sent)) and step >= self.run.step:
            self.run.log(new, step=step)

    def close(self) -> None:
        """Wait until everything has arrived."""
        self.run.finish()


class Trackio:
    """A run of Trackio, in its local storage or where its environment variables say; it goes on under the same name.

    Trackio keeps every number it gets: what a continued run computes again is not sent again.
    """

    def __init__(self, config: Config, folder: Path, sent: Mapping[str, int]) -> None:
        import trackio

        self.sent = sent
        self.finish = trackio.finish  # the run's own method would be called again when the program ends
        self.run = trackio.init(
            project=config.output.project,
            name=f"{folder.name}-{_run_id(folder)}",  # a run is found by its name
            config=config.model_dump(mode="json"),
            resume="allow",
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send what has not been sent yet."""
        if new := _unsent(step, values, self.sent):
            self.run.log(new, step=step)

    def close(self) -> None:
        """Wait until everything is stored."""
        self.finish()


def _unsent(step: int, values: Mapping[str, float], sent: Mapping[str, int]) -> dict[str, float]:
    return {name: value for name, value in values.items() if step > sent.get(name, -1)}


def _run_id(folder: Path) -> str:
    """The id of the run in this folder, the same in every continuation; made at the first call."""
    path = folder / RUN_ID
    if not path.exists():
        path.write_text(secrets.token_hex(4), encoding="utf-8")
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
    sent = {} if step is None else _last_steps(folder / METRICS)
    kinds: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: TensorBoard(folder, step),
        "wandb": lambda: Wandb(config, folder, sent),
        "trackio": lambda: Trackio(config, folder, sent),
    }
    trackers: list[Tracker] = []
    for name in dict.fromkeys(config.output.trackers):
        try:
            trackers.append(kinds[name]())
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


def _last_steps(path: Path) -> dict[str, int]:
    """By tracked name, the last step that metrics.jsonl has it of."""
    last: dict[str, int] = {}
    for record in read_records(path)[0]:  # without the line that an interruption cut
        last.update(dict.fromkeys(tracked(record.numbers), record.step))
    return last
