"""A run against one that was not interrupted: the same metrics, weights, moments and experience, bit for bit."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from exgrpo.train.checkpoint.listing import find
from exgrpo.train.checkpoint.log_files import SAMPLES
from exgrpo.train.checkpoint.manifest import MANIFEST
from exgrpo.train.checkpoint.resume import FINISHED
from exgrpo.train.model_folder import MODEL
from tests.torture.loading import digests, load
from tests.train.test_run import untimed


@dataclass(frozen=True)
class Outcome:
    """What a run has come to.

    Attributes:
        finished: whether it says that nothing is left to do.
        metrics: its records without what is measured in time.
        samples: the groups that people read.
        steps: of its checkpoints, newest first.
        states: SHA-256 of the files with the last weights and moments.
        trainer: SHA-256 of the last state of the trainer with its experience.
        evaluations: what the run keeps of its evaluations.
        model: SHA-256 of the weights that are its result.
    """

    finished: bool
    metrics: list[dict[str, Any]]
    samples: str
    steps: list[int]
    states: dict[str, str]
    trainer: str
    evaluations: Any
    model: dict[str, str]


def fingerprint(run: Path) -> str:
    """Of the training questions of a run, from any manifest of its own."""
    manifest = next((run / "checkpoints").glob(f"step_*/{MANIFEST}"))
    return json.loads(manifest.read_bytes())["fingerprint"]


def outcome(run: Path) -> Outcome:
    """What a finished run has come to.

    Raises:
        ExgrpoError: its checkpoints cannot be loaded.
    """
    last = load(run, fingerprint(run))
    return Outcome(
        finished=(run / FINISHED).exists(),
        metrics=untimed(run),
        samples=(run / SAMPLES).read_text(),
        steps=[found.step for found in find(run)],
        states=last.policy,
        trainer=last.trainer,
        evaluations=last.progress["evaluations"],
        model={name: digest for name, digest in digests(run / MODEL).items() if name.endswith(".safetensors")},
    )


def differences(of: Outcome, whole: Outcome) -> list[str]:
    """The names of what differs; nothing may.

    Of the checkpoints the newest must be there. Older ones may be damaged or gone after damage, and a run that is
    killed before it deletes some keeps them until its next checkpoint.
    """
    differing = [field.name for field in fields(Outcome) if getattr(of, field.name) != getattr(whole, field.name)]
    if "steps" in differing and of.steps[:1] == whole.steps[:1]:
        differing.remove("steps")
    return differing
