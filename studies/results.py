"""Results of runs, one per line of a text file that is only appended to."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from exgrpo.train.common.errors import OutputError, os_errors_as
from exgrpo.train.metrics.report.runs import MetricColumns

FloatArray = npt.NDArray[np.float64]
DIGITS = 5  # significant digits in the file
COSTS = ("generated_tokens", "gradient_tokens", "seconds")
"""Training costs up to an evaluation."""
TRAINING = (
    "pass_rate",
    "entropy",
    "entropy_gap",
    "replayed_entropy",
    "replayed_age",
    "replayed_times",
    "replayed_ratio",
    "idle_group_fraction",
    "buffer_questions",
    "buffer_trajectories",
    "retired",
)
"""Metrics of training steps; the file has their means since the previous evaluation, under "train/"."""
CURVES = ("pass_at_1", "pass_at_k", "distinct_at_k", *(f"train/{name}" for name in TRAINING))
"""Curves that claims may refer to."""


@dataclass(frozen=True, eq=False)
class Result:
    """Result of a run.

    Attributes:
        key: hash of the settings, see `studies.study.key_of`.
        settings: options of the computation.
        commit: commit of the code; a trailing "+" means with changes.
        date: last day of the run, YYYY-MM-DD.
        versions: versions of the packages that affect its numbers.
        processor: name of the processor.
        seconds: time of training and evaluations.
        curves: [evaluations] values by name: "step", `COSTS`, "pass_at_1", "pass_at_k" and "distinct_at_k" of the k
            answers to each held-out question, and "train/" with `TRAINING`; NaN: missing.
    """

    key: str
    settings: Mapping[str, Any]
    commit: str
    date: str
    versions: Mapping[str, str]
    processor: str
    seconds: float
    curves: Mapping[str, FloatArray]

    def to_line(self) -> str:
        """Return one line of JSON; NaN becomes null."""
        plain = {**asdict(self), "seconds": _rounded(self.seconds)}
        plain["curves"] = {name: [_rounded(value) for value in values] for name, values in self.curves.items()}
        return json.dumps(plain, separators=(",", ":"))

    @classmethod
    def of_line(cls, line: str | bytes) -> "Result":
        """Parse a line; raise ValueError, KeyError or TypeError for a bad one."""
        plain = json.loads(line)
        curves = {name: np.array(values, np.float64) for name, values in plain["curves"].items()}
        return cls(**{field.name: plain[field.name] for field in fields(cls)} | {"curves": curves})


def _rounded(value: float) -> float | int | None:
    if not np.isfinite(value):
        return None
    return int(value) if float(value).is_integer() else float(f"{value:.{DIGITS}g}")


def curves_of(columns: MetricColumns, samples: int) -> dict[str, FloatArray]:
    """Return the curves of a `Result` from the columns of a run with `samples` answers per held-out question."""
    none = np.full(len(columns["step"]), np.nan)
    scores = {
        "pass_at_1": "test/pass_rate",
        "pass_at_k": f"pass_at/{samples}",
        "distinct_at_k": f"distinct_at/{samples}",
    }
    found = {name: columns.get(column, none) for name, column in scores.items()}
    rows = np.flatnonzero(np.isfinite(found["pass_at_1"]))
    curves = {name: values[rows] for name, values in {"step": columns["step"], **found}.items()}
    for name in COSTS:
        spent = columns[name] if name == "generated_tokens" else np.nancumsum(columns[name])
        curves[name] = spent[rows]
    for name in TRAINING:
        curves[f"train/{name}"] = _means(columns.get(name, none), rows + 1)
    return curves


def _means(column: FloatArray, ends: npt.NDArray[np.intp]) -> FloatArray:
    """Return means of a column over the steps between evaluations; NaN if there are none."""
    parts = [column[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    return np.array([np.nanmean(part) if np.isfinite(part).any() else np.nan for part in parts])


class ResultFile:
    """The results of a file by key; the newest of several with one key.

    Args:
        path: path of the file, which may be missing.

    Attributes:
        by_key: the results.

    Raises:
        OutputError: it cannot be read, or a line other than the last is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.by_key: dict[str, Result] = {}
        with os_errors_as(OutputError, f"{path} cannot be read"):
            content = path.read_bytes() if path.exists() else b""
        *lines, self._rest = content.split(b"\n")  # the rest is a line that a killed program did not finish
        for number, line in enumerate(lines, start=1):
            try:
                result = Result.of_line(line)
            except (ValueError, KeyError, TypeError):
                raise OutputError(f"{path}: line {number} is no result: remove it to repeat its run") from None
            self.by_key[result.key] = result

    def add(self, result: Result) -> None:
        """Append a result; it is on disk on return. Raise OutputError if the file cannot be written.

        The result is kept with the file's precision: a search resumed from the file must take the same way.
        """
        line = result.to_line()
        with os_errors_as(OutputError, f"{self.path} cannot be written"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("r+b" if self.path.exists() else "wb") as file:
                file.seek(-len(self._rest), os.SEEK_END)
                file.truncate()
                file.write(f"{line}\n".encode())
                file.flush()
                os.fsync(file.fileno())
        self._rest = b""
        self.by_key[result.key] = Result.of_line(line)
