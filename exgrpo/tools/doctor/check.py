"""What a check is, what it is given and what comes of it; what checks are made of: a small run, and its processes.

The checks are in the tuples CHECKS of `machine` and `training`. At their tops, these modules and this one stay free of
torch and of what imports it.
"""

import base64
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from exgrpo.train.common.errors import ExgrpoError
from exgrpo.train.config.options import Config
from exgrpo.train.config.recipe import DEFAULT_RUN, merged, read_recipe, validate

if TYPE_CHECKING:
    from exgrpo.train.common.distributed import World
    from exgrpo.train.run.build import Inputs

LOG = "log"
"""The file in the folder of a check that has all that its processes print."""
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


@dataclass(frozen=True, eq=False)
class Given:
    """What a check is given.

    Attributes:
        recipe: of the run that this machine is meant for.
        folder: an empty folder of the check's own, except for its log.
        resources: closes what the check opens.
    """

    recipe: Config
    folder: Path
    resources: ExitStack


@dataclass(frozen=True)
class Check:
    """A part that a run needs.

    Attributes:
        name: unique; an identifier.
        function: gives what it has measured as a sentence. It raises Skipped where the check cannot run on this
            machine, and any other exception where the part does not work. Its process unpickles it, so it is a
            function of a module, or a functools.partial of one.
        remedy: what to do where the function raises no ExgrpoError, which has a remedy of its own.
    """

    name: str
    function: Callable[[Given], str]
    remedy: str


class Skipped(Exception):
    """A check cannot run on this machine; the message says why."""


class CheckFailedError(ExgrpoError, RuntimeError):
    """A part does not work; the message says what was found and what to do."""


@dataclass(frozen=True)
class Finding:
    """What came of a check.

    Attributes:
        name: of the check.
        result: what it came to.
        text: what was measured, why it was skipped, or what is wrong and what to do.
        seconds: of its processes.
        output: the last lines of what they printed.
    """

    name: str
    result: Literal["ok", "failed", "skipped"]
    text: str
    seconds: float
    output: tuple[str, ...] = ()


def tiny_run(given: Given) -> Config:
    """The small run.

    Args:
        given: the recipe of the run that the machine is meant for, of which the servers are left out; the folder for
            what the small run leaves.
    """
    recipe = given.recipe
    taken = {key: getattr(getattr(recipe, section), name) for key in TAKEN for section, name in [key.split(".")]}
    if recipe.rollout.engine == "server":
        taken["rollout.engine"] = "auto"
    place = {"output.folder": given.folder}
    return validate(merged(read_recipe(DEFAULT_RUN), SIZES, taken, place), "the small run")


def open_inputs(config: Config, resources: ExitStack) -> "tuple[Inputs, World]":
    """What a run starts from, in a process that is alone."""
    from exgrpo.train.common.distributed import start
    from exgrpo.train.run.build import read_inputs
    from exgrpo.train.run.startup_checks import look

    inputs = read_inputs(config, look(config, resources))
    return inputs, start(config.distributed.timeout_minutes)


def launch(ranks: int, folder: Path, program: Sequence[str], remedy: str) -> None:
    """Run a program; what it prints goes to this process's standard error.

    Args:
        ranks: how many processes of it; one is started without the launcher.
        folder: of the check.
        program: the file of a Python program, or --module and a module, and its arguments.
        remedy: what to do where it fails.

    Raises:
        CheckFailedError: it does.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # `deepspeed` would forget CUDA_VISIBLE_DEVICES, and take GPUs of others: this is what it starts on each host.
    seen: list[str | int] = [*filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","))]
    devices = seen[:ranks] if len(seen) >= ranks else [*range(ranks)]
    world = base64.urlsafe_b64encode(json.dumps({"localhost": devices}).encode()).decode()
    launcher = ["-m", "deepspeed.launcher.launch", f"--world_info={world}", "--master_addr=127.0.0.1"]
    alone = ["-m" if word == "--module" else word for word in program]
    words = alone if ranks == 1 else [*launcher, f"--master_port={port}", "--no_local_rank", *program]
    status = subprocess.run([sys.executable, *words], stdout=sys.stderr, check=False).returncode
    if status:
        printed = (folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
        told = next((f": {line}" for line in reversed(printed) if line.startswith("error")), "")
        raise CheckFailedError(f"{ranks} of its processes ended with status {status}{told}. {remedy}")
