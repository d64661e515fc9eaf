"""The samples of runs in a report: bounded, and as plain values for the page."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from exgrpo.train.report.runs import RunData
from exgrpo.train.report.template import as_json, readable
from exgrpo.train.samples import Sample

MOST_BYTES = 5_000_000
"""Of the samples of all runs in a page."""
SUCCESS = 1.0
"""`reward.success` of a run whose configuration does not say it."""


@dataclass(frozen=True)
class RunSamples:
    """What a page shows of the samples of a run.

    Attributes:
        name: of the run.
        success: a reward of at least this is right.
        samples: in the order of the steps.
        left_out: how many more the run has written.
    """

    name: str
    success: float
    samples: tuple[Sample, ...]
    left_out: int = 0


def samples_of(runs: Sequence[RunData]) -> list[RunSamples]:
    """The samples of runs; those without any are left out, such as those of an older version."""
    return [RunSamples(run.name, _success(run.config), run.samples) for run in runs if run.samples]


def _success(config: dict[str, Any]) -> float:
    reward = config.get("reward")
    success = reward.get("success") if isinstance(reward, dict) else None
    return float(success) if isinstance(success, int | float) else SUCCESS


def bounded(runs: Sequence[RunSamples], most: int = MOST_BYTES) -> list[RunSamples]:
    """Runs with so many of their samples that their JSON has at most so many bytes.

    Those of followed questions stay before others, and newer ones before older ones.
    """
    every = [
        (sample.followed, sample.step, number, sample) for number, run in enumerate(runs) for sample in run.samples
    ]
    kept: list[set[int]] = [set() for _ in runs]
    size = 0
    for _, _, number, sample in sorted(every, key=lambda one: one[:2], reverse=True):
        size += len(as_json(_values(sample))) + 1
        if size > most:
            break
        kept[number].add(id(sample))
    return [
        replace(run, samples=samples, left_out=len(run.samples) - len(samples))
        for run, ids in zip(runs, kept, strict=True)
        for samples in [tuple(sample for sample in run.samples if id(sample) in ids)]
    ]


def for_page(runs: Sequence[RunSamples]) -> list[dict[str, Any]]:
    """Plain values with the names of the dataclasses; characters that cannot be seen stand by their numbers."""
    return [
        {
            "name": readable(run.name),
            "success": run.success,
            "left_out": run.left_out,
            "samples": [_values(sample) for sample in run.samples],
        }
        for run in runs
    ]


def _values(sample: Sample) -> dict[str, Any]:
    values = asdict(sample)
    for name in ("text", "gold"):
        values[name] = readable(values[name])
    for answer in values["answers"]:
        answer["parts"] = [[writer, readable(text)] for writer, text in answer["parts"]]
    return values
