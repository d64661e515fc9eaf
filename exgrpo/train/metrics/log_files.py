"""metrics.jsonl on disk, read though damaged."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from exgrpo.train.common import jsonl

METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"
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
