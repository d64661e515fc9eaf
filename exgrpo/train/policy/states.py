"""What a process holds of the states of training: fp32 weights, and the moments of AdamW.

A state is the weight of a parameter or one of its moments, flattened. A process that is alone has all of it. ZeRO-3
cuts it into as many equal parts as there are ranks, of which the last ones may be filled up or empty.
"""

from typing import Any, Protocol

import deepspeed
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_local_fp32_param,
    safe_get_local_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import Tensor, nn

WEIGHT, MOMENTS = "weight", ("exp_avg", "exp_avg_sq")


class States(Protocol):
    """The states of the parameters that are trained, by name.

    Attributes:
        parameters: those parameters, with what ZeRO-3 has added to them.
    """

    parameters: dict[str, Any]

    @property
    def steps(self) -> int:
        """Optimiser steps that were taken; before the first one there are no moments."""

    def begin(self, steps: int) -> None:
        """Make moments, and count so many steps as taken."""

    def numel(self, name: str) -> int:
        """Elements of a whole state."""

    def part(self, name: str) -> slice:
        """Which of them are here."""

    def get(self, name: str, key: str) -> Tensor:
        """[n] fp32 the part that is here; it may be a view."""

    def set(self, name: str, key: str, values: Tensor) -> None:
        """Put [n] fp32 in its place; weights are seen by the model after `apply`."""

    def apply(self) -> None:
        """Have the model compute with the weights that were set; all ranks call it together."""


def trained(module: nn.Module) -> dict[str, Any]:
    """The parameters of a module that are trained, by name."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


class WholeStates:
    """See `States`.

    Args:
        module: whole and in fp32.
        optimizer: AdamW of its parameters.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.parameters = trained(module)
        self.optimizer = optimizer

    @property
    def steps(self) -> int:
        """See `States`."""
        return _steps(self.optimizer, list(self.parameters.values()))

    def begin(self, steps: int) -> None:
        """See `States`."""
        _begin(self.optimizer, list(self.parameters.values()), steps)

    def numel(self, name: str) -> int:
        """See `States`."""
        return self.parameters[name].numel()

    def part(self, name: str) -> slice:
        """See `States`."""
        return slice(0, self.numel(name))

    def get(self, name: str, key: str) -> Tensor:
        """See `States`."""
        parameter = self.parameters[name]
        return (parameter.data if key == WEIGHT else self.optimizer.state[parameter][key]).view(-1)

    def set(self, name: str, key: str, values: Tensor) -> None:
        """See `States`."""
        self.get(name, key).copy_(values)

    def apply(self) -> None:
        """See `States`; there is one copy of the weights."""


class ShardedStates:
    """See `States`.

    Args:
        engine: DeepSpeed's, under ZeRO-3.
        rank: of this process.
    """

    def __init__(self, engine: Any, rank: int) -> None:
        self.parameters = trained(engine.module)
        self.optimizer: torch.optim.Optimizer = engine.optimizer.optimizer
        # Each is a part of many parameters together: that is what AdamW sees.
        self.flat: list[Tensor] = engine.optimizer.fp32_partitioned_groups_flat
        self.rank = rank

    @property
    def steps(self) -> int:
        """See `States`."""
        return _steps(self.optimizer, self.flat)

    def begin(self, steps: int) -> None:
        """See `States`."""
        _begin(self.optimizer, self.flat, steps)

    def numel(self, name: str) -> int:
        """See `States`."""
        return int(self.parameters[name].ds_numel)

    def part(self, name: str) -> slice:
        """See `States`."""
        whole, size = self.numel(name), self._size(name)
        return slice(min(self.rank * size, whole), min((self.rank + 1) * size, whole))

    def _size(self, name: str) -> int:
        return int(self.parameters[name].ds_tensor.ds_numel)

    def get(self, name: str, key: str) -> Tensor:
        """See `States`."""
        parameter, part = self.parameters[name], self.part(name)
        if key == WEIGHT:
            filled_up = safe_get_local_fp32_param(parameter)
        else:
            filled_up = safe_get_local_optimizer_state(parameter, key)
        return filled_up[: part.stop - part.start]

    def set(self, name: str, key: str, values: Tensor) -> None:
        """See `States`."""
        parameter = self.parameters[name]
        filled_up = nn.functional.pad(values, (0, self._size(name) - len(values)))
        if key == WEIGHT:
            safe_set_local_fp32_param(parameter, filled_up)
        else:
            safe_set_local_optimizer_state(parameter, filled_up, key)

    def apply(self) -> None:
        """See `States`."""
        for parameter in self.parameters.values():
            whole = safe_get_full_fp32_param(parameter)
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                parameter.data.copy_(whole)


def _steps(optimizer: torch.optim.Optimizer, tensors: list[Any]) -> int:
    return int(optimizer.state.get(tensors[0], {}).get("step", 0))


def _begin(optimizer: torch.optim.Optimizer, tensors: list[Any], steps: int) -> None:
    for tensor in tensors:
        moments = {key: torch.zeros_like(tensor.data) for key in MOMENTS}
        optimizer.state[tensor] = {"step": torch.tensor(float(steps), device=tensor.device), **moments}
