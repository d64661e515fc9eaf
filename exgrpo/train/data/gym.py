"""Questions of the package reasoning-gym, by the names of its data sets: reasoning_gym:countdown?max_numbers=4.

Splits
    A data set is a function of a seed and an index. Each split has a seed of its own, from the run's seed and the name
    of the split. Two seeds may still give one question, above all where there are few. So a hash of its text decides
    the split that a question belongs to: train and test share no question, whatever the seeds, the arguments and the
    limits are. Within a split, a question comes once.

Process
    Some data sets walk through sets of texts, whose order differs from process to process. All ranks must have the same
    questions, and so must a run that goes on: they are made in a process with a fixed order. It is this module as a
    program: an order as JSON on standard input, the reply in its last line.
"""

import dataclasses
import json
import os
import subprocess
import sys
import typing
from collections.abc import Iterator
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from exgrpo.train.common.errors import DataError, nearest, shown
from exgrpo.train.common.seeds import derive_seed
from exgrpo.train.config.sources import checked, split_arguments

PREFIX = "reasoning_gym:"
"""Begins the name of a source."""
REWARD = "exgrpo.train.reward.reasoning_gym:reward"
SPLITS = {"train": range(8), "test": range(8, 10)}
"""The tenths of all questions that are in a split."""

_ROOT = Path(__file__).parents[3]
_OWN = ("seed", "size")
_DRAWS = 50
"""Draws for each question that is asked for, at most."""
_PATIENCE = 2000
"""After so many draws without a new question there is none."""


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
    """The questions of an order of `read_gym`, with their gold answers."""
    name, split, count = order["name"], order["split"], order["count"]
    kind, config = _data_set(name)
    arguments = checked(name, order["arguments"], _parameters(config))
    try:
        data_set = kind(config=config(**arguments, seed=order["seed"], size=count * _DRAWS))
    except (AssertionError, TypeError, ValueError) as error:
        raise DataError(f"reasoning-gym refuses the arguments: {shown(error)}") from None
    found: dict[str, str] = {}
    idle = 0
    for entry in _entries(data_set, count * _DRAWS):
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


def _entries(data_set: Any, count: int) -> Iterator[dict[str, Any]]:
    for index in range(count):
        try:
            entry = data_set[index]
        except Exception as error:  # of arguments that its own check lets pass
            raise DataError(f"reasoning-gym fails: {type(error).__name__}: {shown(error)}") from None
        yield entry


def _data_set(name: str) -> tuple[Any, Any]:
    """The class of a data set, and that of its configuration."""
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        near = nearest(name, DATASETS)
        raise DataError(
            f"reasoning-gym has no data set {shown(name)}"
            + (f"; did you mean {PREFIX}{near}?" if near else f"; it has {', '.join(sorted(DATASETS))}")
        )
    return DATASETS[name]


def _parameters(config: Any) -> dict[str, Any]:
    """The arguments that a configuration takes, with their types."""
    try:
        types = typing.get_type_hints(config)
    except Exception:  # an annotation that does not resolve is not checked
        types = {}
    names = [field.name for field in dataclasses.fields(config) if field.init and field.name not in _OWN]
    return {name: types.get(name, Any) for name in names}


def _gold(name: str, arguments: dict[str, Any], entry: dict[str, Any]) -> str:
    """What `exgrpo.train.reward.reasoning_gym` reads."""
    # A literal of Python, since verifiers tell tuples from lists, and have keys that are numbers.
    kept = {"data_set": name, "arguments": arguments, "answer": entry["answer"], "entry": repr(_plain(entry))}
    return json.dumps(kept, default=str, ensure_ascii=False)


def _plain(value: Any) -> Any:
    """A value of types that a literal may have."""
    if hasattr(value, "tolist"):  # of NumPy
        return value.tolist()
    if isinstance(value, dict):
        return {_plain(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        kind = tuple if isinstance(value, tuple) else list if isinstance(value, list) else set
        return kind(_plain(inner) for inner in value)
    if isinstance(value, str):
        return str.__str__(value)  # of an enumeration its text
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def main() -> None:
    """Read an order, reply."""
    reply: dict[str, Any]
    try:
        reply = {"questions": make(json.load(sys.stdin))}
    except DataError as error:
        reply = {"problem": str(error)}
    print("\n" + json.dumps(reply))


if __name__ == "__main__":
    main()
