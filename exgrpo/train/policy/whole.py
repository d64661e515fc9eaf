"""The training of a model that one process has whole: what DeepSpeed's engine does, where nothing is sharded.

ZeRO-3 with one process keeps three more copies of the weights, and fetches and releases every layer in each pass.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class WholeEngine:
    """A module, its optimiser and its schedule; the part of `deepspeed.DeepSpeedEngine` that `Policy` needs.

    `scale_wrt_gas` is there for DeepSpeed's sake: what it switches off there does not exist here.

    Args:
        module: in float32: AdamW would lose small updates of 16-bit weights.
        optimizer: of its parameters.
        scheduler: of the optimiser's rate.
        clip: largest norm of the gradient; 0: any.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer, scheduler: LRScheduler, clip: float) -> None:
        self.module = module
        self.optimizer = optimizer
        self.lr_scheduler = scheduler
        self.clip = clip
        self.skipped_steps = 0
        self._norm = 0.0

    def __call__(self, *arguments: Any) -> Any:
        """The module's forward."""
        return self.module(*arguments)

    def train(self) -> None:
        """See `torch.nn.Module`."""
        self.module.train()

    def eval(self) -> None:
        """See `torch.nn.Module`."""
        self.module.eval()

    def backward(self, loss: Tensor, *, scale_wrt_gas: bool) -> None:
        """Add the gradients of a loss to those of the step."""
        loss.backward()

    def step(self) -> None:
        """Clip the gradient, take an optimiser step and one of the schedule; none where the gradient is not finite."""
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.clip or float("inf"))
        self._norm = norm.item()
        if norm.isfinite():
            self.optimizer.step()
            self.lr_scheduler.step()
        else:
            self._norm = float("inf")
            self.skipped_steps += 1
        self.optimizer.zero_grad()

    def get_global_grad_norm(self) -> float:
        """The norm of the latest step's gradient, before it was clipped."""
        return self._norm

    def get_lr(self) -> list[float]:
        """The rates of the next step."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]
