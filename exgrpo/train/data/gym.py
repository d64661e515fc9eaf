"""Questions of the package reasoning-gym, by the names of its data sets: reasoning_gym:countdown?max_numbers=4.

Splits
    A data set is a function of a seed and an index. Each split has a seed of its own, from the run's seed and the name
    of the split. Two seeds may still give one question, above all where there are few. So a hash of its text decides
    the split that a question belongs to: train and test share no question, whatever the seeds, the arguments and the
    limits are. Within a split, a question comes once.

Process
    Some data sets walk through sets of texts, whose order differs from process to process. All ranks must have the same
    questions, and so must a run that goes on: they are made in a process with a fixed order (`gym_process`).
"""

import json
import os
import subprocess
import sys
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from exgrpo.train.common.errors import DataError, shown
from exgrpo.train.common.seeds import derive_seed
from exgrpo.train.config.sources import split_arguments

PREFIX = "reasoning_gym:"
"""Begins the name of a source."""
REWARD = "exgrpo.train.reward.reasoning_gym:reward"
SPLITS = {"train": range(8), "test": range(8, 10)}
"""The tenths of all questions that are in a split."""

_ROOT = Path(__file__).parents[3]
_PROCESS = "exgrpo.train.data.gym_process"


def read_gym(source: str, split: str, count: int, seed: int) -> list[tuple[str, str]]:
    """[count] different questions of a split with what their verifier needs, the same ones for the same arguments.

    Raises:
        DataError: the package is missing; there is no such data set, argument or split; the arguments contradict each
            other; or there are too few different questions.
    """
    place, arguments = split_arguments(source)
    if split not in SPLITS:
        raise DataError(f"{source}: there is no split {shown(split)}; there is {', '.join(SPLITS)}")
    if find_spec("reasoning_gym") is None:
        raise DataError(f"{source}: this needs the package reasoning-gym: pip install 'exgrpo[tasks]'")
    order = {
        "source": source,
        "name": place.removeprefix(PREFIX),
        "arguments": arguments,
        "split": split,
        "count": count,
        "seed": derive_seed(seed, f"{PREFIX}{split}") % 2**32,
    }
    reply = _made(source, order)
    if "problem" in reply:
        raise DataError(f"{source}: {reply['problem']}")
    return [(question, gold) for question, gold in reply["questions"]]


def in_split(question: str, split: str) -> bool:
    """Whether a question, by its text, belongs to a split."""
    return int.from_bytes(sha256(question.encode("utf-8", "surrogatepass")).digest()[:8], "big") % 10 in SPLITS[split]


def _made(source: str, order: dict[str, Any]) -> dict[str, Any]:
    # As this process finds the project, but not in the working directory: a file there may have the name of a module.
    paths = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-P", "-m", _PROCESS],
        input=json.dumps(order, default=str),
        env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise DataError(f"{source}: the process that makes its questions failed: {shown(last)}")
    return json.loads(done.stdout.splitlines()[-1])
