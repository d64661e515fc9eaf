"""What a training step begins with, and what it leaves."""

from concurrent.futures import Future
from dataclasses import dataclass

from exgrpo.train.answers import Produced
from exgrpo.train.experience import PlannedGroup
from exgrpo.train.step_batch import StepBatch
from exgrpo.train.work import Work


@dataclass(frozen=True, eq=False)
class StepResult:
    """What a training step leaves to be looked at.

    Attributes:
        metrics: plain numbers by name, as written to metrics.jsonl.
        batch: all answers of the step; groups of stored answers alone come last.
        work: what the model read and wrote, by phase.
        notes: sentences that a person should read.
        applied: of each optimiser step, whether it was taken: its gradient was finite.
    """

    metrics: dict[str, float]
    batch: StepBatch
    work: Work
    notes: tuple[str, ...] = ()
    applied: tuple[bool, ...] = ()


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """The groups of a step, and its answers where they are generated while the step before updates."""

    groups: list[PlannedGroup]
    produced: Future[Produced] | None = None
