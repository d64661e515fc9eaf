"""Read metrics.jsonl, also if it is damaged."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from exgrpo.train.common.plain import read_log

METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"
HUGE = 1e300

RecordKind = Literal["training", "evaluation"]
"""Values of the key "kind" in a record of metrics.jsonl."""


@dataclass(frozen=True, eq=False)
class Record:
    """A line of metrics.jsonl.

    Attributes:
        step: number of finished training steps.
        kind: a training step, or a held-out evaluation after one.
        numbers: numbers by name, including "step".
    """

    step: int
    kind: RecordKind
    numbers: dict[str, float]


def read_records(path: Path) -> tuple[list[Record], list[int]]:
    """Read metrics.jsonl.

    Returns:
        the records in order, and the line numbers, from 1, of lines that are no records, such as the cut last line of
        a killed run.

    Raises:
        OSError: the file cannot be read.
    """
    found = {line.number: _record(line.value) for line in read_log(path)}
    records = [record for record in found.values() if record is not None]
    return records, [number for number, record in found.items() if record is None]


def _record(record: object) -> Record | None:
    if not isinstance(record, dict):
        return None
    numbers = {key: value for key, value in record.items() if type(value) in (int, float) and abs(value) < HUGE}
    step, kind = numbers.get("step", -1), record.get("kind")
    if step < 0 or not float(step).is_integer() or kind not in get_args(RecordKind):
        return None
    return Record(int(step), cast(RecordKind, kind), numbers)
