"""States of training that a process holds, fp32 weights and the moments of AdamW, and their files.

A state is the weight of a parameter or one of its moments, flattened. A process that is alone has all of it. ZeRO-3
cuts it into as many equal parts as there are ranks, of which the last ones may be filled up or empty. From the files
any number of processes goes on:

    training.json                     steps that were taken and left out, the schedule, the loss scale, the elements of
                                      each parameter
    rank_00001_00000.safetensors      the parts of rank 1 of some parameters, named weight/NAME, exp_avg/NAME, ...

The parts of a state in the order of the ranks are the state, however many they are.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_local_fp32_param,
    safe_get_local_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from exgrpo.train.common.errors import CheckpointError
from exgrpo.train.policy.engine import SCALE_WINDOW, WholeEngine, trained

WEIGHT, MOMENTS = "weight", ("exp_avg", "exp_avg_sq")
TRAINING = "training.json"
FILE_BYTES = 1 << 30
"""Of a file, about: a rank copies so much to CPU memory at once."""


@dataclass(frozen=True)
class LossScale:
    """Factor of the loss in fp16, and the number of steps in a row with finite gradients."""

    scale: float
    finite: int


class States(ABC):
    """The states of the parameters that are trained, by name.

    Args:
        parameters: those parameters, with what ZeRO-3 has added to them, or their masters.
        optimizer: AdamW.
        stepped: the tensors that it moves.
    """

    def __init__(
        self, parameters: dict[str, Any], optimizer: torch.optim.Optimizer, stepped: Collection[Tensor]
    ) -> None:
        self.parameters = parameters
        self.optimizer = optimizer
        self.stepped = stepped

    @property
    def steps(self) -> int:
        """Optimiser steps that were taken; before the first one there are no moments."""
        return int(self.optimizer.state.get(next(iter(self.stepped)), {}).get("step", 0))

    def begin(self, steps: int) -> None:
        """Make moments, and count so many steps as taken."""
        for tensor in self.stepped:
            moments = {key: torch.zeros_like(tensor.data) for key in MOMENTS}
            self.optimizer.state[tensor] = {"step": torch.tensor(float(steps), device=tensor.device), **moments}

    @property
    @abstractmethod
    def loss_scale(self) -> LossScale | None:
        """Loss scale of the next step; None: the loss is not scaled, as in fp32 and bf16."""

    @abstractmethod
    def set_loss_scale(self, kept: LossScale) -> None:
        """Go on with a loss scale."""

    @abstractmethod
    def numel(self, name: str) -> int:
        """Elements of a whole state."""

    @abstractmethod
    def part(self, name: str) -> slice:
        """Which of them are here."""

    @abstractmethod
    def get(self, name: str, key: str) -> Tensor:
        """[n] fp32 the part that is here; it may be a view."""

    @abstractmethod
    def set(self, name: str, key: str, values: Tensor) -> None:
        """Put [n] fp32 in its place; weights are seen by the model after `apply`."""

    @abstractmethod
    def apply(self) -> None:
        """Have the model compute with the weights that were set; all ranks call it together."""


class WholeStates(States):
    """States of an engine whose masters are the weights."""

    def __init__(self, engine: WholeEngine) -> None:
        super().__init__(engine.masters, engine.optimizer, engine.masters.values())
        self.engine = engine

    @property
    def loss_scale(self) -> LossScale | None:
        state = self.engine.scaler.state_dict()
        return LossScale(state["scale"], state["_growth_tracker"]) if state else None

    def set_loss_scale(self, kept: LossScale) -> None:
        scaler = self.engine.scaler
        # DeepSpeed goes on counting where the scale has grown.
        scaler.load_state_dict(
            {**scaler.state_dict(), "scale": kept.scale, "_growth_tracker": kept.finite % SCALE_WINDOW}
        )

    def numel(self, name: str) -> int:
        return self.parameters[name].numel()

    def part(self, name: str) -> slice:
        return slice(0, self.numel(name))

    def get(self, name: str, key: str) -> Tensor:
        parameter = self.parameters[name]
        return (parameter.data if key == WEIGHT else self.optimizer.state[parameter][key]).view(-1)

    def set(self, name: str, key: str, values: Tensor) -> None:
        self.get(name, key).copy_(values)

    def apply(self) -> None:
        self.engine.show_masters()


class ShardedStates(States):
    """States of DeepSpeed's engine under ZeRO-3, on one rank."""

    def __init__(self, engine: Any, rank: int) -> None:
        # AdamW sees parts of many parameters as one tensor.
        optimizer = engine.optimizer
        super().__init__(trained(engine.module), optimizer.optimizer, optimizer.fp32_partitioned_groups_flat)
        self.scaler: Any = optimizer.loss_scaler
        self.rank = rank

    @property
    def loss_scale(self) -> LossScale | None:
        scaler = self.scaler
        return LossScale(scaler.cur_scale, scaler.cur_iter - scaler.last_overflow_iter - 1) if scaler.dynamic else None

    def set_loss_scale(self, kept: LossScale) -> None:
        self.scaler.cur_scale, self.scaler.cur_iter, self.scaler.last_overflow_iter = kept.scale, kept.finite, -1

    def numel(self, name: str) -> int:
        return int(self.parameters[name].ds_numel)

    def part(self, name: str) -> slice:
        whole, size = self.numel(name), self._size(name)
        return slice(min(self.rank * size, whole), min((self.rank + 1) * size, whole))

    def _size(self, name: str) -> int:
        return int(self.parameters[name].ds_tensor.ds_numel)

    def get(self, name: str, key: str) -> Tensor:
        parameter, part = self.parameters[name], self.part(name)
        if key == WEIGHT:
            filled_up = safe_get_local_fp32_param(parameter)
        else:
            filled_up = safe_get_local_optimizer_state(parameter, key)
        return filled_up[: part.stop - part.start]

    def set(self, name: str, key: str, values: Tensor) -> None:
        parameter = self.parameters[name]
        filled_up = nn.functional.pad(values, (0, self._size(name) - len(values)))
        if key == WEIGHT:
            safe_set_local_fp32_param(parameter, filled_up)
        else:
            safe_set_local_optimizer_state(parameter, filled_up, key)

    def apply(self) -> None:
        for parameter in self.parameters.values():
            whole = safe_get_full_fp32_param(parameter)
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                parameter.data.copy_(whole)


def save_states(states: States, folder: Path, rank: int) -> None:
    """Write what this rank holds. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    keys = _keys(states.steps)
    for number, names in enumerate(_in_files(states, len(keys))):
        tensors = {f"{key}/{name}": states.get(name, key).cpu().clone() for name in names for key in keys}
        try:
            save_file(tensors, folder / f"rank_{rank:05d}_{number:05d}.safetensors")
        except SafetensorError as error:
            raise OSError(str(error)) from error


def save_training(states: States, scheduler: LRScheduler, skipped: int, folder: Path) -> None:
    """Write what all ranks have in common. Raises OSError."""
    values = {
        "steps": states.steps,
        "skipped": skipped,
        "schedule": scheduler.state_dict(),
        "loss_scale": states.loss_scale and asdict(states.loss_scale),
        "numel": {name: states.numel(name) for name in states.parameters},
    }
    (folder / TRAINING).write_text(json.dumps(values), encoding="utf-8")


def load_states(states: States, folder: Path) -> dict[str, Any]:
    """Read what this rank holds; returns the values that all have in common. `States.apply` has to follow.

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
    return values


def _keys(steps: int) -> tuple[str, ...]:
    return (WEIGHT, *MOMENTS) if steps else (WEIGHT,)


def _in_files(states: States, keys: int) -> Iterator[list[str]]:
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
    found, start = [torch.empty(0)], 0
    for part in parts:
        (length,) = part.get_shape()
        first, last = max(wanted.start - start, 0), min(wanted.stop - start, length)
        if first < last:
            found.append(part[first:last])
        start += length
    return torch.cat(found)
