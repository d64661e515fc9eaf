"""Which backend computes a call, and why.

- ``torch``: chunks of tokens in plain PyTorch. Runs on every device; the choice of ``auto`` on CPUs. On a GPU
  it waits for the number of tokens that take part: once a call, and once a chunk where gradients are formed with
  the loss.
- ``triton``: the same chunks and library products with Triton kernels between them; the choice of ``auto`` on GPUs. It
  waits for the number of tokens that take part, once a call.
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
from exgrpo.kernels.results import LogProb, PolicyLoss

ENVIRONMENT = "EXGRPO_BACKEND"
REFERENCE = "reference"


class Backend(Protocol):
    """What a backend provides; a module of plain functions is one. All inputs are checked already."""

    def log_prob_forward(self, head: Head) -> tuple[LogProb, tuple[Tensor, ...]]:
        """Log-probability and entropy of each token [T], 0 where left out; and tensors to save."""

    def log_prob_backward(
        self,
        head: Head,
        saved: tuple[Tensor, ...],
        grad_log_prob: Tensor | None,
        grad_entropy: Tensor | None,
        needed: Needed,
    ) -> Gradients:
        """Gradients from those of the two outputs [T]; None stands for zero."""

    def policy_loss_forward(
        self, head: Head, terms: PolicyTerms, needed: Needed
    ) -> tuple[PolicyLoss, tuple[Tensor | None, ...]]:
        """Loss and per-token results [T]; and tensors to save."""

    def policy_loss_backward(
        self, saved: tuple[Tensor | None, ...], grad_loss: Tensor, tokens: int, dtype: torch.dtype
    ) -> Gradients:
        """Gradients from that of the loss; that of hidden is [tokens, D] in ``dtype``."""


BACKENDS = {"torch": "exgrpo.kernels.torch_chunks", "triton": "exgrpo.kernels.triton_chunks"}
"""Modules by name, imported when they are first needed."""


@cache
def load(name: str) -> Backend:
    """The backend of this name."""
    return cast(Backend, import_module(BACKENDS[name]))


def unavailable(name: str, device: torch.device) -> str:
    """Why a backend cannot compute on this device; empty where it can."""
    if name != "triton":
        return ""
    if find_spec("triton") is None:
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
