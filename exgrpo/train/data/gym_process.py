"""The process that makes questions of reasoning-gym: an order as JSON on standard input, the reply in its last line."""

import dataclasses
import json
import sys
import typing
from collections.abc import Iterator
from typing import Any

from exgrpo.train.common.errors import DataError, nearest, shown
from exgrpo.train.config.sources import checked
from exgrpo.train.data.gym import PREFIX, in_split

_OWN = ("seed", "size")
_DRAWS = 50
"""Draws for each question that is asked for, at most."""
_PATIENCE = 2000
"""After so many draws without a new question there is none."""


def make(order: dict[str, Any]) -> list[tuple[str, str]]:
    """The questions of an order, see `exgrpo.train.data.gym.read_gym`, with their gold answers."""
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
