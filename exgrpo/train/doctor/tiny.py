"""The small run that checks are made of: the default run's model and questions, the recipe's way to compute."""

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from exgrpo.train.config import Config
from exgrpo.train.doctor.check import Given
from exgrpo.train.recipe import DEFAULT_RUN, merged, read_recipe, validate

if TYPE_CHECKING:
    from exgrpo.train.distributed import World
    from exgrpo.train.inputs import Inputs

SIZES = {
    "steps": 1,
    "questions": 8,
    "preflight": "off",
    "data.train_limit": 64,
    "data.test": None,
    "reward.workers": 1,
    "rollout.samples": 4,
    "checkpoint.every": 1,
    "output.name": "run",
    "output.trackers": [],
}
TAKEN = (
    *("policy.dtype", "policy.attention", "policy.kernel_backend", "rollout.engine", "rollout.sleep_level"),
    *("distributed.timeout_minutes", "distributed.offload_optimizer", "distributed.persistence_threshold"),
)
"""What is as in the recipe."""


def tiny_run(given: Given, changes: dict[str, Any] | None = None) -> Config:
    """The small run.

    Args:
        given: the recipe of the run that the machine is meant for, of which the servers are left out; the folder for
            what the small run leaves.
        changes: values by their dotted keys.
    """
    recipe = given.recipe
    taken = {key: getattr(getattr(recipe, section), name) for key in TAKEN for section, name in [key.split(".")]}
    if recipe.rollout.engine == "server":
        taken["rollout.engine"] = "auto"
    own = {"output.folder": given.folder, **(changes or {})}
    return validate(merged(read_recipe(DEFAULT_RUN), SIZES, taken, own), "the small run")


def open_inputs(config: Config, resources: ExitStack) -> "tuple[Inputs, World]":
    """What a run starts from, in a process that is alone."""
    from exgrpo.train.distributed import start
    from exgrpo.train.early import look
    from exgrpo.train.inputs import read_inputs

    inputs = read_inputs(config, look(config, resources))
    return inputs, start(config.distributed.timeout_minutes)
