"""Questions of the package reasoning-gym, by the names of its data sets: reasoning_gym:countdown?max_numbers=4.

Splits
    A data set is a function of a seed and an index. Each split has its own seed, derived from the run's seed and the
    name of the split. Two seeds may still give the same question, above all in small data sets. So a hash of its text
    decides the split of a question: train and test share no question, whatever the seeds, arguments and limits. Within
    a split, every question is unique.

Process
    Some data sets iterate over sets of texts, whose order differs between processes. All ranks and a resumed run need
    the same questions, so a process with a fixed hash seed makes them. It runs this module as a program: the request is
    JSON on standard input, the reply the last line of the output.
"""

import json
import os
import subprocess
import sys
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from exgrpo.train.common.errors import DataError, nearest, shown
from exgrpo.train.common.seeds import derive_seed
from exgrpo.train.config.sources import checked, parameters, split_arguments

PREFIX = "reasoning_gym:"
"""Prefix of a source's name."""
REWARD = "exgrpo.train.reward.reasoning_gym:reward"
SPLITS = {"train": range(8), "test": range(8, 10)}
"""Tenths of all questions in each split."""

_ROOT = Path(__file__).parents[3]
_OWN = ("seed", "size")
_DRAWS = 50  # largest number of draws per requested question
_PATIENCE = 2000  # draws without a new question after which there is none


def read_gym(source: str, split: str, count: int, seed: int) -> list[tuple[str, str]]:
    """Return [count] different questions of a split with the data for their verifier, deterministic in the arguments.

    Raises:
        DataError: the package is missing; the data set, argument or split does not exist; the arguments contradict each
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
    made = _made(source, order)
    if "problem" in made:
        raise DataError(f"{source}: {made['problem']}")
    return [(question, gold) for question, gold in made["questions"]]


def in_split(question: str, split: str) -> bool:
    """Return True if a question, by its text, belongs to a split."""
    return int.from_bytes(sha256(question.encode("utf-8", "surrogatepass")).digest()[:8], "big") % 10 in SPLITS[split]


def _made(source: str, order: dict[str, Any]) -> dict[str, Any]:
    # This process's import path without the working directory (-P): a file there may have the name of a module.
    paths = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-P", "-m", "exgrpo.train.data.gym"],
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


def make(order: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the questions requested by `read_gym`, with their gold answers."""
    name, split, count = order["name"], order["split"], order["count"]
    kind, config = _data_set(name)
    arguments = checked(name, order["arguments"], parameters(config, _OWN))
    try:
        data_set = kind(config=config(**arguments, seed=order["seed"], size=count * _DRAWS))
    except (AssertionError, TypeError, ValueError) as error:
        raise DataError(f"reasoning-gym refuses the arguments: {shown(error)}") from None
    found: dict[str, str] = {}
    idle = 0
    for index in range(count * _DRAWS):
        try:
            entry = data_set[index]
        except Exception as error:  # arguments that pass the package's own check
            raise DataError(f"reasoning-gym fails: {type(error).__name__}: {shown(error)}") from None
        question, idle = entry["question"], idle + 1
        if question not in found and in_split(question, split):
            found[question] = _gold(name, arguments, entry)
            idle = 0
        if len(found) == count:
            return list(found.items())
        if idle == _PATIENCE:
            break
    raise DataError(
        f"there are only {len(found)} different questions in the {split} split, and the limit is {count}: lower it, or "
        "give arguments that make more questions"
    )


def _data_set(name: str) -> tuple[Any, Any]:
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        near = nearest(name, DATASETS)
        raise DataError(
            f"reasoning-gym has no data set {shown(name)}"
            + (f"; did you mean {PREFIX}{near}?" if near else f"; it has {', '.join(sorted(DATASETS))}")
        )
    return DATASETS[name]


def _gold(name: str, arguments: dict[str, Any], entry: dict[str, Any]) -> str:
    """Return the gold answer that `exgrpo.train.reward.reasoning_gym` parses."""
    # A Python literal, since verifiers distinguish tuples from lists and use numbers as keys.
    kept = {"data_set": name, "arguments": arguments, "answer": entry["answer"], "entry": repr(_plain(entry))}
    return json.dumps(kept, default=str, ensure_ascii=False)


def _plain(value: Any) -> Any:
    """Convert a value to types that a Python literal can express."""
    if hasattr(value, "tolist"):  # NumPy
        return value.tolist()
    if isinstance(value, dict):
        return {_plain(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        kind = tuple if isinstance(value, tuple) else list if isinstance(value, list) else set
        return kind(_plain(inner) for inner in value)
    if isinstance(value, str):
        return str.__str__(value)  # the text of an enum member
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def reply(order: dict[str, Any]) -> dict[str, Any]:
    """Return the questions of a request, or the problem."""
    try:
        return {"questions": make(order)}
    except DataError as error:
        return {"problem": str(error)}


if __name__ == "__main__":
    print("\n" + json.dumps(reply(json.load(sys.stdin))))
