"""metrics.jsonl and samples.jsonl on disk: read though damaged, copied into checkpoints, restored from there."""

import logging
import shutil
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Literal, cast, get_args

from exgrpo.train.common import jsonl
from exgrpo.train.common.durable import write_whole

logger = logging.getLogger(__name__)

METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"
DAMAGED = ".damaged"
"""Ends the name of what was set aside because of damage."""
HUGE = 1e300

Kind = Literal["training", "evaluation"]
"""What a record of metrics.jsonl is about, which it says under the key "kind"."""


@dataclass(frozen=True, eq=False)
class Record:
    """A line of metrics.jsonl.

    Attributes:
        step: training steps before it, its own included.
        kind: whether it is that of a training step or that of a held-out evaluation after it.
        numbers: by name, the step included.
    """

    step: int
    kind: Kind
    numbers: dict[str, float]


def read_records(path: Path) -> tuple[list[Record], list[int]]:
    """The numbers of metrics.jsonl.

    Returns:
        its records in their order, and the numbers, from 1, of the lines that are none, such as the cut last line of a
        killed run, or bytes that are no text.

    Raises:
        OSError: it cannot be read.
    """
    found = {line.number: _record(line.value) for line in jsonl.read_log(path)}
    records = [record for record in found.values() if record is not None]
    return records, [number for number, record in found.items() if record is None]


def _record(record: object) -> Record | None:
    if not isinstance(record, dict):
        return None
    numbers = {key: value for key, value in record.items() if type(value) in (int, float) and abs(value) < HUGE}
    step, kind = numbers.get("step", -1), record.get("kind")
    if step < 0 or not float(step).is_integer() or kind not in get_args(Kind):
        return None
    return Record(int(step), cast(Kind, kind), numbers)


def copy_logs(run: Path, folder: Path) -> None:
    """Copy the logs that a run has into a checkpoint's folder."""
    for name in (METRICS, SAMPLES):
        if (run / name).exists():
            shutil.copyfile(run / name, folder / name)


def restore_logs(run: Path, folder: Path) -> None:
    """Where a log of a run does not begin with its copy in a checkpoint, put the copy in place of that beginning.

    What follows stays; the damaged file is kept under another name, and a warning says so.
    """
    for name in (METRICS, SAMPLES):
        live, copy = run / name, folder / name
        if not copy.exists():
            continue
        kept, now = copy.read_bytes(), live.read_bytes() if live.exists() else b""
        if now.startswith(kept):
            continue
        lines = enumerate(zip_longest(kept.split(b"\n"), now.split(b"\n")), start=1)
        number = next(number for number, (before, after) in lines if before != after)
        aside = live.with_name(name + DAMAGED)
        if live.exists():
            live.replace(aside)
            reason = f"is damaged in line {number}; it is kept as {aside}"
        else:
            reason = "is missing"
        write_whole(live, kept + now[len(kept) :])
        logger.warning("%s %s and restored from %s", live, reason, copy)
