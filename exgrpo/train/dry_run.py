"""What a run would do, without doing it: its configuration, its plan and an estimate."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from exgrpo.train.checkpoint.resume import AUTO, begun_anew
from exgrpo.train.config import Config
from exgrpo.train.early import Early
from exgrpo.train.estimate.options import Options
from exgrpo.train.recipe import to_yaml


def show(config: Config, early: Early, resumed: Path | None, processes: int, say: Callable[[Any], None]) -> None:
    """Say it all.

    Args:
        config: the resolved configuration.
        early: the questions that were read.
        resumed: the folder of the run that would go on; None: a new one.
        processes: of the run.
        say: gets texts and tables.

    Raises:
        ExgrpoError: the model is not there, or cannot be estimated.
    """
    say(to_yaml(config))
    for sentence in plan(config, early, resumed, processes):
        say(sentence)
    from exgrpo.train.estimate.shape import read_shape
    from exgrpo.train.estimate.tables import show as estimate

    say("")
    shape = read_shape(config.policy.path, None, config.policy.overrides)
    estimate(config, shape, Options(gpus=processes, **_gpu_here()), say)


def plan(config: Config, early: Early, resumed: Path | None, processes: int) -> list[str]:
    """The plan of a run in sentences."""
    rows = sum(map(len, early.train))
    held_out = {name: sum(map(len, sources)) for name, sources in early.held_out.items()}
    sets = ", ".join(f"{name} ({count})" for name, count in held_out.items()) or "none"
    samples, every = config.rollout.samples, config.evaluation.every
    folder = resumed or config.output.folder / (config.output.name or "DATE_TIME")
    saves = f"every {config.checkpoint.every} steps" if config.checkpoint.every else "never"
    between = f", every {every} steps" if every else ""
    anew = [begun_anew(config, folder)] if config.resume == AUTO and resumed is None else []
    return [
        f"{processes} processes train {config.policy.path} in {config.policy.dtype} for {config.steps} steps.",
        f"A step has {config.questions} questions with {samples} answers each, {config.questions * samples} in all; "
        f"there are {rows} questions, before over-long ones are left out.",
        f"Up to {config.experience.ratio:.0%} of a step's questions are replayed ones, once "
        f"{config.experience.start_pass_rate:.0%} of the answers of a step were right."
        if config.experience.ratio
        else "Nothing is replayed.",
        f"Held-out questions: {sets}; asked before the first step, after the last one{between}.",
        f"Checkpoints: {saves}, {config.checkpoint.keep} stay. Results: {folder}.",
        *anew,
        "Nothing was started: this is a dry run.",
    ]


def _gpu_here() -> dict[str, str]:
    """The name of this machine's GPU, if its data sheet is known."""
    import torch

    from exgrpo.train.estimate.data_sheets import GPUS

    if not torch.cuda.is_available():
        return {}
    words = torch.cuda.get_device_name().replace("-", " ").split()
    known = [name for name in GPUS if name in words]
    return {"gpu": known[0]} if known else {}
