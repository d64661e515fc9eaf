"""AdamW and its schedule, as a run's options want them."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from exgrpo.train.config import Config
from exgrpo.train.policy.settings import OptimizerConfig


def make_optimizer(parameters: Iterable[nn.Parameter], options: OptimizerConfig) -> torch.optim.AdamW:
    """The optimiser of a model, whose parameters may be partitioned by ZeRO-3."""
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in parameters:
        kept = options.decay == "matrices" and len(getattr(parameter, "ds_shape", parameter.shape)) < 2
        (others if kept else decayed).append(parameter)
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=options.lr,
        betas=options.betas,
        weight_decay=options.weight_decay,
        fused=True,
    )


def make_schedule(optimizer: torch.optim.Optimizer, config: Config) -> LRScheduler:
    """The schedule of an optimiser over the steps of a run."""
    options = config.optimizer
    above_zero: dict[str, tuple[str, dict[str, float]]] = {
        "linear": ("polynomial", {"lr_end": options.min_lr, "power": 1.0}),
        "cosine": ("cosine_with_min_lr", {"min_lr": options.min_lr}),
    }
    name, more = above_zero[options.schedule] if options.min_lr else (options.schedule, {})
    return get_scheduler(
        "constant_with_warmup" if name == "constant" else name,
        optimizer,
        num_warmup_steps=options.warmup_steps,
        num_training_steps=max(1, config.steps * options.steps_per_batch),
        scheduler_specific_kwargs=more,
    )
