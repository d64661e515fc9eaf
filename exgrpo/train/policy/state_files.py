"""The states of training as files, from which any number of processes goes on.

    training.json                     steps that were taken and left out, the schedule, the elements of each parameter
    rank_00001_00000.safetensors      the parts of rank 1 of some parameters, named weight/NAME, exp_avg/NAME, ...;
                                      average/NAME where the weights are averaged

The parts of a state in the order of the ranks are the state, however many they are.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from exgrpo.train.errors import CheckpointError
from exgrpo.train.policy.states import MOMENTS, WEIGHT, States

TRAINING = "training.json"
AVERAGE = "average"
Weights = Mapping[str, Tensor]
FILE_BYTES = 1 << 30
"""Of a file, about: a rank copies so much to CPU memory at once."""


def save_states(states: States, folder: Path, rank: int, average: Weights | None = None) -> None:
    """Write what this rank holds, and its part of the average of the weights if there is one.

    Raises:
        OSError: a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    keys = _keys(states.steps)
    for number, names in enumerate(_in_files(states, len(keys))):
        tensors = {f"{key}/{name}": states.get(name, key).cpu().clone() for name in names for key in keys}
        tensors |= {f"{AVERAGE}/{name}": average[name].cpu().clone() for name in names if average}
        try:
            save_file(tensors, folder / f"rank_{rank:05d}_{number:05d}.safetensors")
        except SafetensorError as error:
            raise OSError(str(error)) from error


def save_training(states: States, scheduler: LRScheduler, skipped: int, folder: Path) -> None:
    """Write what all ranks have in common.

    Raises:
        OSError: it cannot be written.
    """
    values = {
        "steps": states.steps,
        "skipped": skipped,
        "schedule": scheduler.state_dict(),
        "numel": {name: states.numel(name) for name in states.parameters},
    }
    (folder / TRAINING).write_text(json.dumps(values), encoding="utf-8")


def load_states(states: States, folder: Path, average: Weights | None = None) -> dict[str, Any]:
    """Read what this rank holds; returns the values that all have in common. `States.apply` has to follow.

    Where the weights are averaged, `average` is filled.

    Raises:
        CheckpointError: the files are of other parameters.
        OSError: one cannot be read.
    """
    values = json.loads((folder / TRAINING).read_text(encoding="utf-8"))
    own = {name: states.numel(name) for name in states.parameters}
    if differing := sorted(dict(own.items() ^ values["numel"].items())):
        raise CheckpointError(
            f"{folder} has the states of other parameters than this run trains, {differing[0]} among them: is it of "
            "another model or of other adapters?"
        )
    states.begin(values["steps"])
    with ExitStack() as resources:
        parts: dict[str, list[Any]] = {}
        for path in sorted(folder.glob("rank_*.safetensors")):
            file = resources.enter_context(safe_open(path, "pt"))
            for name in file.keys():  # noqa: SIM118 -- it is no mapping
                parts.setdefault(name, []).append(file.get_slice(name))

        def read(name: str, key: str) -> Tensor:
            part = states.part(name)
            found = _joined(parts.get(f"{key}/{name}", []), part)
            if len(found) < part.stop - part.start:
                raise CheckpointError(f"{folder} lacks a part of {key}/{name}: a file of it is missing")
            return found

        for name in own:
            for key in _keys(values["steps"]):
                states.set(name, key, read(name, key))
            if average:
                average[name].copy_(read(name, AVERAGE))
    return values


def _keys(steps: int) -> tuple[str, ...]:
    return (WEIGHT, *MOMENTS) if steps else (WEIGHT,)


def _in_files(states: States, keys: int) -> Iterator[list[str]]:
    """The names of the parameters, by file."""
    names: list[str] = []
    size = 0
    for name in states.parameters:
        part = states.part(name)
        names.append(name)
        size += 4 * keys * (part.stop - part.start)
        if size >= FILE_BYTES:
            yield names
            names, size = [], 0
    if names:
        yield names


def _joined(parts: list[Any], wanted: slice) -> Tensor:
    """The wanted elements of a state whose parts follow each other."""
    found, start = [torch.empty(0)], 0
    for part in parts:
        (length,) = part.get_shape()
        first, last = max(wanted.start - start, 0), min(wanted.stop - start, length)
        if first < last:
            found.append(part[first:last])
        start += length
    return torch.cat(found)
