"""What the parts of a training step give each other, and what the step leaves."""

from concurrent.futures import Future
from dataclasses import dataclass

from exgrpo.train.answers import Answers, Produced
from exgrpo.train.experience import PlannedGroup, Selected
from exgrpo.train.metrics.work import Work
from exgrpo.train.records import Trajectory


@dataclass(frozen=True, eq=False)
class StepResult:
    """What a training step leaves to be looked at.

    Attributes:
        metrics: plain numbers by name, as written to metrics.jsonl.
        questions: index of the question of each group; those that replay come last.
        answers: the fresh answers of each group.
        replayed: the replayed trajectories of each group.
        entropies: mean token entropy in nats of each of them when it was chosen; None where nobody asked for it.
        work: what the model read and wrote, by phase.
        notes: sentences that a person should read.
        applied: of each optimiser step, whether it was taken: its gradient was finite.
    """

    metrics: dict[str, float]
    questions: list[int]
    answers: Answers
    replayed: list[tuple[Trajectory, ...]]
    entropies: list[tuple[float | None, ...]]
    work: Work
    notes: tuple[str, ...] = ()
    applied: tuple[bool, ...] = ()


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """The groups of a step, and its answers where they are generated while the step before updates."""

    groups: list[PlannedGroup]
    produced: Future[Produced] | None = None


@dataclass(frozen=True, eq=False)
class Asked:
    """What a step has asked and been answered.

    Attributes:
        questions: index of the question of each group.
        joined: the stored answers that join each group.
        answers: the fresh ones.
    """

    questions: list[int]
    joined: list[list[Selected]]
    answers: Answers
