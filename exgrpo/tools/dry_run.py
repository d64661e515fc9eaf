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

SERVER_GPUS = {"A100-40": 40, "A100-80": 80, "H100": 80, "H200": 141, "B200": 180, "L40S": 48, "A6000": 48}
GPUS = SERVER_GPUS | {"RTX3090": 24, "RTX4090": 24, "RTX5090": 32}
"""GiB of memory by name: the data sheet's gigabytes, taken as GiB."""


def machine(words: str) -> tuple[str, int | None]:
    """Parse a key of `GPUS` with an optional count (None if absent), as h100x8; raise ValueError for an unknown GPU."""
    for name in GPUS:
        if found := re.fullmatch(rf"{name}(?:x([1-9][0-9]*))?", words, re.IGNORECASE):
            return name, int(found[1]) if found[1] else None
    raise ValueError(f"expected a GPU and a count, such as h100x8; known GPUs are {', '.join(GPUS)}")


def lines(
    config: Config, startup: StartupResult, resumed: Path | None, processes: int, gpu: str | None
) -> "Iterator[str | Table]":
    """Yield the parts of a dry run, for printing; raise ModelError or ConfigError for a wrong model configuration.

    `resumed` is the folder of the run that would be resumed, None for a new run; `gpu` a key of `GPUS`, None for this
    machine.
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
    """Return the plan of a run as sentences."""
    rows = sum(map(len, startup.questions))
    held_out = {name: sum(map(len, sources)) for name, sources in startup.held_out.items()}
    sets = ", ".join(f"{name} ({count})" for name, count in held_out.items()) or "none"
    samples, every = config.rollout.samples, config.evaluation.every
    again = config.experience.repeat
    begun = ", and answers begin as a stored one" if config.experience.prefix != "none" else ""
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
        else "No answer is replayed.",
        *[f"Up to {again:.0%} of a step's questions are asked again{begun}."] * (again > 0),
        f"Held-out questions: {sets}; asked before the first step, after the last one{between}.",
        f"Checkpoints: {saves}, {config.checkpoint.keep} stay. Results: {folder}.",
        *startup.notes,
        *anew,
        "Nothing was started: this is a dry run.",
    ]
