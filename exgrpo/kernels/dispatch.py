"""Which backend computes a call, and why.

- ``cpu``: chunks of tokens through the compiled extension; the choice of ``auto`` on CPUs where it is built.
- ``cuda``: the Triton backend with kernels in CUDA C++ for what Triton cannot do; only on request, until measured.
- ``triton``: the same chunks with Triton kernels in them, and where its launch table says so with a matrix product of
  its own; the choice of ``auto`` on GPUs. It waits for the number of tokens that take part, once a call.
- ``torch``: the same chunks in plain PyTorch. Runs on every device. On a GPU it waits for the number of tokens that
  take part: once a call, and once a chunk where gradients are formed with the loss.
- ``reference``: full logits and plain autograd. The oracle; only on request, since its memory is [T, V].

The argument ``backend`` decides; where it is ``"auto"``, the environment variable EXGRPO_BACKEND does, and else a table
by architecture, dtype and size, `backend_choice`. EXGRPO_DEBUG=1 has each kind of call say what it took. Where the
backend that the table prefers is not available, that is said once without it: nothing else tells of slower kernels.
"""

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol, cast

import torch
from torch import Tensor

from exgrpo.kernels import backend_choice, debug, extension
from exgrpo.kernels.chunks.head import ChunkedHead
from exgrpo.kernels.chunks.passes import Passes
from exgrpo.kernels.inputs import Head, ScoredTokens, Surrogate
from exgrpo.kernels.objective import TokenObjective

ENVIRONMENT = "EXGRPO_BACKEND"
AUTO, REFERENCE = "auto", "reference"


class Backend(Protocol):
    """What a backend provides; a module of plain functions is one. All inputs are checked already."""

    def passes_of(self, head: ChunkedHead) -> Passes:
        """Makes the passes over the logits of a head."""

    def token_objective(self, scored: ScoredTokens, surrogate: Surrogate) -> TokenObjective:
        """The objective of tokens whose log-probabilities are known."""

    def centre_groups(self, reward: Tensor, group: Tensor, scale_by_std: bool) -> Tensor:
        """Reward [N] minus the mean of its group in float64, divided by the sample deviation if asked for."""

    def segment_mean(self, values: Tensor, counted: Tensor, offsets: Tensor) -> Tensor:
        """Mean of the counted values of each segment."""


BACKENDS = {name: f"exgrpo.kernels.{name}_chunks" for name in backend_choice.NAMES}
"""Modules by name, imported when they are first needed."""


@cache
def load(name: str) -> Backend:
    """The backend of this name."""
    return cast(Backend, import_module(BACKENDS[name]))


TRITON_INSTALLED = find_spec("triton") is not None


def unavailable(name: str, device: torch.device) -> str:
    """Why a backend cannot compute on this device; empty where it can."""
    if name == "cpu":
        return extension.MISSING if device.type == "cpu" else f"it needs a CPU; the tensors are on {device.type}"
    if name in ("triton", "cuda"):
        if not TRITON_INSTALLED:
            return "triton is not installed"
        if os.environ.get("TRITON_INTERPRET") and find_spec("numpy") is None:
            return "Triton's interpreter (TRITON_INTERPRET) needs numpy, which is not installed"
    if name == "triton" and device.type != "cuda" and not os.environ.get("TRITON_INTERPRET"):
        return f"it needs a GPU, or TRITON_INTERPRET=1 in the environment; the tensors are on {device.type}"
    if name == "cuda":
        from exgrpo.kernels.cuda_chunks import binding  # which imports triton

        return binding.unavailable(device)
    return ""


def requested(backend: str, device: torch.device, vocab_group: object = None) -> str:
    """The backend that a call with this argument asks for, ``auto`` included, for tensors on this device.

    Raises:
        ValueError: there is no such backend, or it has no vocab_group.
        RuntimeError: the backend that was asked for cannot run here.
    """
    name, source = backend, f"backend={backend!r}"
    if backend == AUTO and os.environ.get(ENVIRONMENT):
        name = os.environ[ENVIRONMENT]
        source = f"{ENVIRONMENT}={name}"
    if name == AUTO:
        return name
    names = [*BACKENDS, REFERENCE]
    if name not in names:
        raise ValueError(f"{source}: expected auto, {', '.join(names[:-1])} or {names[-1]}")
    if name == REFERENCE and vocab_group is not None:
        *others, last = BACKENDS
        raise ValueError(f"{source}: it has no vocab_group; expected auto, {', '.join(others)} or {last}")
    if not torch.compiler.is_compiling():  # the check looks at files, which a compiler does not follow
        _check_available(name, source, device)
    return name


def _check_available(name: str, source: str, device: torch.device) -> None:
    if reason := unavailable(name, device):
        raise RuntimeError(f"{source}: {reason}; expected auto or torch")


def requested_for_tokens(device: torch.device) -> str:
    """The same for what knows of no head: per-token objectives, advantages, means."""
    name = requested(AUTO, device)
    return "torch" if name == REFERENCE else name


def automatic(device: torch.device, operand: torch.dtype, logits: int) -> str:
    """What ``auto`` is for operands of a dtype on a device, and so many logits."""
    able = (name for name in backend_choice.order(device, operand, logits) if not unavailable(name, device))
    return next(able, "torch")


def take(name: str, operation: str, device: torch.device, operand: torch.dtype, logits: int) -> Backend:
    """The backend that was requested; ``auto`` becomes one here, when the number of logits is known.

    All ranks of a group have to take the same backend: their ``logits`` is the largest number of any rank.
    """
    taken = name
    if name != AUTO:
        _check_available(name, f"backend={name!r}", device)  # a compiled caller has not
    else:
        taken, preferred = automatic(device, operand, logits), backend_choice.order(device, operand, logits)[0]
        if taken != preferred:
            reason = unavailable(preferred, device)
            debug.say(f"the {taken} backend computes on {device.type}, as {preferred} is not available: {reason}")
    if debug.wanted():
        size = backend_choice.size_class(logits)
        debug.say(f"{operation}, {size}, {operand} on {device.type}: {taken} ({name} requested)")
    return load(taken)


def take_for_head(name: str, operation: str, head: Head) -> Backend:
    """The same for an operation on a head."""
    options = head.options
    logits = head.target.numel() * options.shard.largest
    return take(name, operation, head.hidden.device, options.operand, logits)
