"""Engines that take the optimiser steps: AdamW and its schedule, under DeepSpeed ZeRO-3 or in one process.

ZeRO-3 with one process keeps more copies of the weights, and fetches and releases every layer in each pass. So a
process that is alone has the model whole, and does what DeepSpeed's engine does by itself.
"""

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from exgrpo.train.config.options import Config
from exgrpo.train.config.policy import OptimizerConfig

SCALE_POWER, SCALE_WINDOW = 16, 1000
"""In fp16 the loss is multiplied by a power of two, 2^16 at first: half of it after a step with a gradient that is not
finite, which is skipped, but never less than 1, and twice as much after so many steps without one."""
FP16 = {
    "enabled": True,
    "loss_scale": 0,  # a dynamic one
    "initial_scale_power": SCALE_POWER,
    "loss_scale_window": SCALE_WINDOW,
    "hysteresis": 1,  # overflows before one lowers the scale: as in a process that is alone
    "min_loss_scale": 1,
}


def deepspeed_settings(config: Config) -> dict[str, Any]:
    """The DeepSpeed configuration of a run with several processes."""
    zero: dict[str, Any] = {
        "stage": 3,
        "stage3_param_persistence_threshold": config.distributed.persistence_threshold,
        "overlap_comm": False,
    }
    if config.distributed.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    # Gradients are scaled until they are in fp32: added up in fp16, those of many ranks would overflow.
    scaled = {"fp16": FP16, "communication_data_type": "fp32"} if config.policy.dtype == "fp16" else {}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": config.optimizer.grad_clip,
        "bf16": {"enabled": config.policy.dtype == "bf16"},
        **scaled,
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
    }


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
    last = max(1, config.steps * config.optimizer.steps_per_batch)
    return LambdaLR(optimizer, partial(rate_factor, options=config.optimizer, last=last))


def rate_factor(step: int, options: OptimizerConfig, last: int) -> float:
    """Factor of the learning rate in an optimiser step (from 0): linear warm-up, then the schedule.

    A linear or cosine one has come to its end in the step `last`. transformers has the same, but imports peft for them
    where it is installed: seconds of each start.
    """
    if step < options.warmup_steps:
        return step / options.warmup_steps
    if options.schedule == "constant":
        return 1.0
    left = max(0, last - step) / max(1, last - options.warmup_steps)
    if options.schedule == "cosine":
        left = 0.5 * (1 - math.cos(math.pi * left))
    end = options.min_lr / options.lr
    return end + (1 - end) * left


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a module that are trained, by name, with what ZeRO-3 has added to them."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def sharded_engine(module: nn.Module, config: Config) -> Any:
    """DeepSpeed's, of a module that ZeRO-3 cuts."""
    optimizer = make_optimizer(trained(module).values(), config.optimizer)
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=optimizer,
        lr_scheduler=make_schedule(optimizer, config),
        config=deepspeed_settings(config),
        dist_init_required=False,
    )
    if config.policy.dtype == "fp16":  # the run ends by a message, see `exgrpo.train.metrics.soundness`
        engine.optimizer.loss_scaler.raise_error_at_min_scale = False
    return engine


class WholeEngine:
    """A whole module, its optimiser and its schedule; the part of `deepspeed.DeepSpeedEngine` that `Policy` needs.

    The optimiser moves fp32 masters, since AdamW would lose small updates of 16-bit weights. A parameter that is in
    fp32 where the optimiser is, is its own master. Any other has a copy, whose gradient is the fp32 sum of those of all
    micro-batches. In fp16 the loss is scaled, and the sums are unscaled before they are clipped.

    In bf16 a ``head`` is spared the way through autograd: while the module is trained, its attribute ``main_grad`` is
    the fp32 sum, and the module adds to it by itself.

    Args:
        module: on its device.
        config: of the run.
        head: a parameter whose `main_grad` the module heeds, if that is a tensor.

    Attributes:
        masters: [...] fp32 of what is trained, by name.
        scaler: of the loss; it does nothing but in fp16.
        clips_in_kernel: AdamW's kernel divides the gradient as it reads it, which rounds otherwise than a product.
    """

    def __init__(self, module: nn.Module, config: Config, head: nn.Parameter | None = None) -> None:
        self.module = module
        device = torch.device("cpu") if config.distributed.offload_optimizer else None
        parameters = trained(module)
        self.masters = {name: _master(parameter, device) for name, parameter in parameters.items()}
        pairs = zip(parameters.values(), self.masters.values(), strict=True)
        self._copied = [(parameter, master) for parameter, master in pairs if master is not parameter]
        for parameter, master in self._copied:
            parameter.register_post_accumulate_grad_hook(partial(_hand_over, master))
        bf16 = [pair for pair in self._copied if pair[0].dtype == torch.bfloat16 and device is None]
        self._head = next((pair for pair in bf16 if pair[0] is head), None)
        self.optimizer = make_optimizer(self.masters.values(), config.optimizer)
        self.lr_scheduler = make_schedule(self.optimizer, config)
        kind = next(iter(parameters.values())).device.type
        scaled = config.policy.dtype == "fp16"
        self.scaler = GradScaler(kind, 2.0**SCALE_POWER, growth_interval=SCALE_WINDOW, enabled=scaled)
        # From here on the scale is where the sums are: from a GPU it would come to the CPU too late, unwaited for.
        self.scaler.scale(next(iter(self.masters.values())).new_zeros(()))
        self.clip = config.optimizer.grad_clip
        self.clips_in_kernel = kind == "cuda" and device is None
        self.skipped_steps = 0
        self._norm = 0.0

    def __call__(self, *arguments: Any) -> Any:
        return self.module(*arguments)

    def train(self) -> None:
        self.module.train()
        if self._head:
            parameter, master = self._head
            master.grad = torch.zeros_like(master) if master.grad is None else master.grad
            parameter.main_grad = master.grad  # type: ignore[attr-defined]

    def eval(self) -> None:
        self.module.eval()

    def backward(self, loss: Tensor, *, scale_wrt_gas: bool) -> None:
        """Add the gradients of a loss to those of the step; what DeepSpeed switches off besides is not there."""
        self.scaler.scale(loss).backward()

    def step(self) -> None:
        """Clip the gradient, take an optimiser step and one of the schedule; none where the gradient is not finite."""
        self.scaler.unscale_(self.optimizer)
        norm = get_total_norm([master.grad for master in self.masters.values() if master.grad is not None])
        self._norm = norm.item()
        if math.isfinite(self._norm):
            self._step_clipped(norm)
            self.lr_scheduler.step()
            self.show_masters()
        else:
            self._norm = float("inf")
            self.skipped_steps += 1
        self.scaler.update()
        if self.scaler.is_enabled() and self.scaler.get_scale() < 1:
            self.scaler.update(1.0)
        self.optimizer.zero_grad()
        if self._head:
            self._head[0].main_grad = None  # type: ignore[attr-defined]

    def _step_clipped(self, norm: Tensor) -> None:
        """Take an optimiser step on the gradient of this norm, clipped; one that is small is not multiplied by 1."""
        factor = self.clip / (norm + 1e-6)
        clips = bool(self.clip) and bool(factor < 1)
        if clips and not self.clips_in_kernel:
            clip_grads_with_norm_(self.masters.values(), self.clip, norm)
        self.optimizer.grad_scale = factor.reciprocal() if clips and self.clips_in_kernel else None  # type: ignore[attr-defined]
        self.optimizer.step()

    @torch.no_grad()
    def show_masters(self) -> None:
        """Have the module compute with the masters, rounded to its dtype."""
        if self._copied:  # few launches on GPUs
            parameters, masters = zip(*self._copied, strict=True)
            torch._foreach_copy_(parameters, masters)

    def get_global_grad_norm(self) -> float:
        """The norm of the latest step's gradient, before it was clipped."""
        return self._norm

    def get_lr(self) -> list[float]:
        """The rates of the next step."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]


def _master(parameter: nn.Parameter, device: torch.device | None) -> nn.Parameter:
    weight = parameter.data
    master = weight.to(device or weight.device, torch.float32)
    return parameter if master is weight else nn.Parameter(master)


def _hand_over(master: nn.Parameter, parameter: Tensor) -> None:
    """Add the gradient of a micro-batch to the master's, and free it: beside the fp32 sums one is there at a time."""
    if parameter.grad is None:  # a head has added its own
        return
    if master.grad is None:
        master.grad = parameter.grad.to(master)
    else:
        master.grad.add_(parameter.grad.to(master.device))
    parameter.grad = None
