"""The training of a model that one process has whole: what DeepSpeed's engine does, where nothing is sharded.

ZeRO-3 with one process keeps three more copies of the weights, and fetches and releases every layer in each pass.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

STATE = "whole.pt"
"""The file of a checkpoint's folder."""


class WholeEngine:
    """A module, its optimiser and its schedule; the part of `deepspeed.DeepSpeedEngine` that `Policy` needs.

    `scale_wrt_gas`, `save_latest`, `exclude_frozen_parameters` and `load_module_strict` are there for DeepSpeed's sake:
    what they switch off there does not exist here. Only what is trained is saved.

    Args:
        module: in float32: AdamW would lose small updates of 16-bit weights.
        optimizer: of its parameters.
        scheduler: of the optimiser's rate.
        clip: largest norm of the gradient; 0: any.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer, scheduler: LRScheduler, clip: float) -> None:
        self.module = module
        self.optimizer = optimizer
        self.scheduler = scheduler
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
            self.scheduler.step()
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

    def save_checkpoint(self, folder: str, tag: str, *, save_latest: bool, exclude_frozen_parameters: bool) -> None:
        """Write all that a run needs to go on to the last bit."""
        path = Path(folder) / tag / STATE
        path.parent.mkdir(parents=True)
        frozen = self._frozen()
        module = {name: value for name, value in self.module.state_dict().items() if name not in frozen}
        parts = {"optimizer": self.optimizer.state_dict(), "scheduler": self.scheduler.state_dict()}
        torch.save({"module": module, **parts, "skipped": self.skipped_steps}, path)

    def load_checkpoint(self, folder: str, tag: str, *, load_module_strict: bool) -> tuple[str | None, dict[str, Any]]:
        """Go on from what `save_checkpoint` wrote; returns its path, None where there is none."""
        path = Path(folder) / tag / STATE
        if not path.exists():
            return None, {}
        state = torch.load(path, weights_only=True)
        missing, unknown = self.module.load_state_dict(state["module"], strict=False)
        if unknown or set(missing) - self._frozen():
            return None, {}
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.skipped_steps = state["skipped"]
        return str(path), {}

    def _frozen(self) -> set[str]:
        named = self.module.named_parameters(remove_duplicate=False)
        return {name for name, parameter in named if not parameter.requires_grad}
