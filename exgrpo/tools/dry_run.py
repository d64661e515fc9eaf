"""A run's configuration, plan, memory and FLOPs, without starting it: `exgrpo train --dry-run`."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from exgrpo.train.checkpoint.resume import AUTO, begun_anew
from exgrpo.train.common.errors import ModelError
from exgrpo.train.config.options import Config
from exgrpo.train.config.recipe import to_yaml
from exgrpo.train.run.startup_checks import StartupResult

if TYPE_CHECKING:
    from rich.table import Table

GPUS = {
    "A100-40": 40,
    "A100-80": 80,
    "H100": 80,
    "H200": 141,
    "B200": 180,
    "L40S": 48,
    "A6000": 48,
    "RTX3090": 24,
    "RTX4090": 24,
    "RTX5090": 32,
}
"""GiB of memory by name. A data sheet's gigabytes are taken as GiB."""


def machine(words: str) -> tuple[str, int | None]:
    """Return a GPU's name in `GPUS` and the number of GPUs, None if not given: h100x8, A100-80.

    Raises:
        ValueError: the GPU is unknown.
    """
    for name in GPUS:
        if found := re.fullmatch(rf"{name}(?:x([1-9][0-9]*))?", words, re.IGNORECASE):
            return name, int(found[1]) if found[1] else None
    raise ValueError(f"give a GPU and how many of them, as h100x8; known ones are {', '.join(GPUS)}")


def lines(
    config: Config, startup: StartupResult, resumed: Path | None, processes: int, gpu: str | None
) -> "Iterator[str | Table]":
    """Yield the parts of a dry run, to be printed.

    Args:
        config: the resolved configuration.
        startup: the questions that were read.
        resumed: the folder of the run that would go on; None: a new one.
        processes: of the run.
        gpu: the kind of GPU they run on, one of `GPUS`; None: this machine.

    Raises:
        ModelError: the model's configuration cannot be read.
        ConfigError: an override does not suit it.
    """
    yield "\n".join((to_yaml(config), *plan(config, startup, resumed, processes), ""))
    # transformers and DeepSpeed take seconds to import
    from exgrpo.tools.costs import costs
    from exgrpo.train.policy.shape import shape_of
    from exgrpo.train.policy.source import find_model

    source = find_model(config.policy.path, config.policy.overrides)
    try:
        shape = shape_of(source.config)
    except ModelError as error:
        yield f"no memory plan, since {error}"
    else:
        yield from costs(config, shape, processes, None if gpu is None else GPUS[gpu])


def plan(config: Config, startup: StartupResult, resumed: Path | None, processes: int) -> list[str]:
    """Return the plan of a run in sentences."""
    rows = sum(map(len, startup.questions))
    held_out = {name: sum(map(len, sources)) for name, sources in startup.held_out.items()}
    sets = ", ".join(f"{name} ({count})" for name, count in held_out.items()) or "none"
    samples, every = config.rollout.samples, config.evaluation.every
    folder = resumed or config.output.folder / (config.output.name or "DATE_TIME")
    saves = f"every {config.checkpoint.every} steps" if config.checkpoint.every else "never"
    between = f", every {every} steps" if every else ""
    anew = [begun_anew(config, folder)] if config.resume == AUTO and resumed is None else []
    train = "processes train" if processes > 1 else "process trains"
    return [
        f"{processes} {train} {config.policy.path} in {config.policy.dtype} for {config.steps} steps.",
        f"A step has {config.questions} questions with {samples} answers each, {config.questions * samples} in all; "
        f"there are {startup.counted}{rows} questions, before over-long ones are left out.",
        f"Up to {config.experience.ratio:.0%} of a step's questions are replayed ones, once "
        f"{config.experience.start_pass_rate:.0%} of the answers of a step were right."
        if config.experience.ratio
        else "Nothing is replayed.",
        f"Held-out questions: {sets}; asked before the first step, after the last one{between}.",
        f"Checkpoints: {saves}, {config.checkpoint.keep} stay. Results: {folder}.",
        *startup.notes,
        *anew,
        "Nothing was started: this is a dry run.",
    ]
