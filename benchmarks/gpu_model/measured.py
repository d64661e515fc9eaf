"""What the model says of measured rows, and how well it fits a record."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.gpu_model import constants
from benchmarks.gpu_model.prediction import Prediction, floor, gpu_of, paths_of, predict, way_of
from benchmarks.gpu_model.walk import CUDA, LIBRARY, TRITON, Size
from benchmarks.record import Record, Row
from exgrpo.kernels.triton_chunks.launch import setting, shape_class
from exgrpo.tools.estimate.parts import Gpu

GROUP = re.compile(r"(\S+) bfloat16 (\d+)x(\d+)x(\d+)")
"""Of a head's benchmark where all tokens count."""
BOUNDED, ROWS_BEFORE = "2026-11-25", 8192
"""From that day on a call's memory is bounded; the records before it are of one GPU and dtype."""
PATH_OF_ROW = {"exgrpo triton": TRITON, "exgrpo cuda": CUDA}


@dataclass(frozen=True)
class Comparison:
    """A measured row that the model knows."""

    group: str
    row: str
    predicted: Prediction
    measured: Row

    @property
    def ratio(self) -> float:
        """Predicted time / measured time."""
        return self.predicted.seconds / self.measured["median"]


def comparisons(record: Record) -> Iterator[Comparison]:
    """The rows of a record that the model knows; none of a device without a data sheet."""
    for row in record.rows:
        found = prediction_of(record.machine.device, row["group"], row.get("row", ""), record.date)
        if found:
            yield Comparison(row["group"], row["row"], found, row)


def prediction_of(device: str, group: str, row: str, date: str) -> Prediction | None:
    """What a row of a group should take on a device, by the launch table of today; None where the model knows none.

    Before `BOUNDED`, a date like the record's, a chunk had `ROWS_BEFORE` rows, and a loss's gradient of 1 was a factor.
    """
    parsed = GROUP.fullmatch(group)
    if device not in constants.DEVICES or not parsed or parsed[1] not in constants.LAUNCHES:
        return None
    gpu, operation, size = gpu_of(device), parsed[1], Size(*map(int, parsed.groups()[1:]))
    if row == "floor":
        return floor(gpu, operation, size)
    path = _path(gpu, row, size)
    if path not in paths_of(gpu):
        return None
    way = way_of(gpu, path, size)
    before = replace(way, chunk_rows=ROWS_BEFORE, forward_rows=ROWS_BEFORE, scales=True)
    return predict(before if date < BOUNDED else way, operation, size)


def _path(gpu: Gpu, row: str, size: Size) -> str | None:
    """Of a row; only the fused product of the CUDA backend is its own."""
    if setting(gpu.architecture, "bfloat16", shape_class(size.width))["logits"] == LIBRARY:
        return LIBRARY if row == "exgrpo triton" else None
    return PATH_OF_ROW.get(row)
