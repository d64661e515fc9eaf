"""Which backend computes a call, and why.

- ``torch``: chunks of tokens in plain PyTorch. Runs on every device; the choice of ``auto`` on CPUs. On a GPU
  it waits for the number of tokens that take part: once a call, and once a chunk where gradients are formed with
  the loss.
- ``triton``: the same chunks with Triton kernels in them, and where its launch table says so with a matrix product of
  its own; the choice of ``auto`` on GPUs. It waits for the number of tokens that take part, once a call.
- ``reference``: full logits and plain autograd. The oracle; only on request, since its memory is [T, V].

The argument ``backend`` decides; where it is ``"auto"``, the environment variable EXGRPO_BACKEND does.
"""

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol, cast

import torch
from torch import Tensor

from exgrpo.kernels.inputs import Gradients, Head, Needed, PolicyTerms
from exgrpo.kernels.results import LogProb

ENVIRONMENT = "EXGRPO_BACKEND"
REFERENCE = "reference"


class Backend(Protocol):
    """What a backend provides; a module of plain functions is one. All inputs are checked already."""

    def log_prob_forward(self, head: Head) -> tuple[LogProb, Tensor]:
        """Log-probability and entropy of each token [T], 0 where left out; and the statistics [4, T] to save."""

    def log_prob_backward(
        self, head: Head, saved: Tensor, grad_log_prob: Tensor | None, grad_entropy: Tensor | None, needed: Needed
    ) -> Gradients:
        """Gradients from those of the two outputs [T]; None stands for zero."""

    def policy_loss_forward(self, head: Head, terms: PolicyTerms, needed: Needed) -> tuple[Tensor, Tensor, Gradients]:
        """Loss; log-probability, entropy, ratio, clipped [4, T], 0 where left out; gradients in the compute dtype."""

    def token_objective(
        self,
        log_prob: Tensor,
        entropy: Tensor | None,
        old_log_prob: Tensor,
        advantage: Tensor,
        replayed: Tensor | None,
        mask: Tensor | None,
        clip: tuple[float, float] | None,
        beta: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Float64 sums of objectives, entropies and tokens [3]; the per-token results [4, T]; the derivatives [T]."""

    def centre_groups(self, reward: Tensor, group: Tensor, scale_by_std: bool) -> Tensor:
        """Reward [N] minus the mean of its group in float64, divided by the sample deviation if asked for."""

    def segment_mean(self, values: Tensor, counted: Tensor, offsets: Tensor) -> Tensor:
        """Mean of the counted values of each segment."""


BACKENDS = {"torch": "exgrpo.kernels.torch_chunks", "triton": "exgrpo.kernels.triton_chunks"}
"""Modules by name, imported when they are first needed."""


@cache
def load(name: str) -> Backend:
    """The backend of this name."""
    return cast(Backend, import_module(BACKENDS[name]))


TRITON_INSTALLED = find_spec("triton") is not None


def unavailable(name: str, device: torch.device) -> str:
    """Why a backend cannot compute on this device; empty where it can."""
    if name != "triton":
        return ""
    if not TRITON_INSTALLED:
        return "triton is not installed"
    if device.type != "cuda" and not os.environ.get("TRITON_INTERPRET"):
        return f"it needs a GPU, or TRITON_INTERPRET=1 in the environment; the tensors are on {device.type}"
    return ""


def backend_name(requested: str, device: torch.device, vocab_group: object = None) -> str:
    """The backend that a call with this argument gets for tensors on this device.

    Raises:
        ValueError: there is no such backend, or it has no vocab_group.
        RuntimeError: the backend that was asked for cannot run here.
    """
    name = requested
    source = f"backend={requested!r}"
    if requested == "auto" and os.environ.get(ENVIRONMENT):
        name = os.environ[ENVIRONMENT]
        source = f"{ENVIRONMENT}={name}"
    if name == "auto":
        return "torch" if device.type != "cuda" or unavailable("triton", device) else "triton"
    names = [*BACKENDS, REFERENCE]
    if name not in names:
        raise ValueError(f"{source}: expected auto, {', '.join(names[:-1])} or {names[-1]}")
    if name == REFERENCE and vocab_group is not None:
        raise ValueError(f"{source}: it has no vocab_group; expected auto, {' or '.join(BACKENDS)}")
    if reason := unavailable(name, device):
        raise RuntimeError(f"{source}: {reason}; expected auto or torch")
    return name


def token_backend_name(device: torch.device) -> str:
    """The backend of what knows of no head: per-token objectives, advantages, means."""
    name = backend_name("auto", device)
    return "torch" if name == REFERENCE else name
