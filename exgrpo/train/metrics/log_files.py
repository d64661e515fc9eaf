"""Lines of metrics.jsonl and samples.jsonl; damaged lines are skipped when they are read."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from exgrpo.train.common.plain import read_log

METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"
HUGE = 1e300

RecordKind = Literal["training", "evaluation"]
"""Values of the key "kind" in a record of metrics.jsonl."""
Writer = Literal["policy", "environment", "prefix"]


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


@dataclass(frozen=True)
class SampledAnswer:
    """An answer as text.

    Attributes:
        parts: (writer, text) in order; without an environment and without a prefix there is one part.
        finished: False if it was cut at the length limit.
        tokens: number of tokens, those of the environment included.
        replayed_from: training step in which a replayed answer was generated; None: it is fresh.
        entropy: mean token entropy in nats of a replayed answer under the policy that selected it; None: not computed.
    """

    parts: tuple[tuple[Writer, str], ...]
    reward: float
    finished: bool
    tokens: int
    replayed_from: int | None = None
    entropy: float | None = None


@dataclass(frozen=True)
class Sample:
    """A group of one step.

    Attributes:
        step: training step, from 1.
        question: index of the training question.
        text: text of the question in its data set.
        followed: True if all later groups of this question are written, too.
        answers: fresh answers, then replayed ones.
    """

    step: int
    question: int
    text: str
    gold: str
    followed: bool
    answers: tuple[SampledAnswer, ...]


def to_line(sample: Sample) -> str:
    """Return a sample as a line of samples.jsonl with its newline; in ASCII, since texts may have lone surrogates."""
    return json.dumps(asdict(sample)) + "\n"


def read_samples(path: Path) -> Iterator[Sample]:
    """Yield the samples of samples.jsonl in order; skips lines that are no samples, such as a cut last line.

    Raises:
        OSError: the file cannot be read.
    """
    for line in read_log(path):
        sample = _sample(line.value)
        if sample is not None:
            yield sample


def _sample(values: Any) -> Sample | None:
    try:
        parts = [tuple((writer, text) for writer, text in answer["parts"]) for answer in values["answers"]]
        answers = [SampledAnswer(**{**of, "parts": own}) for of, own in zip(values["answers"], parts, strict=True)]
        return Sample(**{**values, "answers": tuple(answers)})
    except (ValueError, TypeError, KeyError):
        return None
