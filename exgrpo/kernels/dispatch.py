"""Which backend computes a call, and why.

- ``cpu``: chunks of tokens through the compiled extension; the choice of ``auto`` on CPUs where it is built.
- ``cuda``: the Triton backend with a fused product in CUDA C++; where it is built, the choice of ``auto`` for large
  calls in bf16 on Hopper.
- ``triton``: the same chunks with Triton kernels in them, and where its launch table says so with a matrix product of
  its own; the choice of ``auto`` on other GPUs. It waits for the number of tokens that take part, once a call.
- ``torch``: the same chunks in plain PyTorch. Runs on every device. On a GPU it waits for the number of tokens that
  take part: once a call, and once a chunk where gradients are formed with the loss.
- ``reference``: full logits and plain autograd. The oracle; only on request, since its memory is [T, V].

The argument ``backend`` decides; where it is ``"auto"``, the environment variable EXGRPO_BACKEND does, and else a table
by architecture, dtype and size, `backend_choice`. EXGRPO_DEBUG=1 has each kind of call say what it took. Where the
backend that the table prefers is not available, that is said once without it: nothing else tells of slower kernels.

Before its first call of a kind, a backend other than ``torch`` is tested, see `self_test`. One that fails is left out
where ``auto`` chooses, which is said once; where it was named, the call is an error. The ranks of a vocab_group take a
backend only if all of them can. Other processes decide each for itself, unless they exchange what each one would pass
over and leave it out: `passed_over`, `leave_out`.
"""

import os
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, cast

import torch

from exgrpo.kernels import backend_choice, extension, self_test
from exgrpo.kernels.chunks.passes import Backend
from exgrpo.kernels.inputs import Head
from exgrpo.kernels.trials import HeadTrial, Trial

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ENVIRONMENT = "EXGRPO_BACKEND"
AUTO, REFERENCE = "auto", "reference"
REPORT = "please report this together with what `python -m exgrpo.kernels` prints"


BACKENDS = {name: f"exgrpo.kernels.{name}_chunks" for name in backend_choice.NAMES}
"""Modules by name, imported when they are first needed."""


@cache
def load(name: str) -> Backend:
    """The backend of this name."""
    return cast(Backend, import_module(BACKENDS[name]))


TRITON_INSTALLED = find_spec("triton") is not None

_LEFT_OUT: dict[str, str] = {}
"""Backends that this process does not use although it could, and why."""


def unavailable(name: str, device: torch.device) -> str:
    """Why a backend cannot compute on this device; empty where it can."""
    if name in _LEFT_OUT:
        return _LEFT_OUT[name]
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
    """The same for what knows of no head: per-token objectives, advantages, means.

    A backend that the environment names for heads on another device is not for these: rewards are on a CPU.
    """
    of_gpus = ("cuda",) if os.environ.get("TRITON_INTERPRET") else ("cuda", "triton")
    if os.environ.get(ENVIRONMENT) in (of_gpus if device.type == "cpu" else ("cpu",)):
        return AUTO
    name = requested(AUTO, device)
    return "torch" if name == REFERENCE else name


def automatic(device: torch.device, operand: torch.dtype, logits: int) -> str:
    """What ``auto`` is for operands of a dtype on a device, and so many logits."""
    able = (name for name in backend_choice.order(device, operand, logits) if not unavailable(name, device))
    return next(able, "torch")


def take(name: str, trial: Trial, logits: int, group: "ProcessGroup | None" = None) -> Backend:
    """The backend that was requested for calls like a trial; ``auto`` becomes one here, as the size is known.

    All ranks of a group have to take the same backend: their ``logits`` is the largest number of any rank.

    Raises:
        RuntimeError: the backend that was asked for cannot run here, or failed its self-test.
    """
    taken = name
    if name != AUTO:
        _check_named(name, trial, group)
    else:
        taken, wrong = _first_sound(trial, logits, group)
        for other, why in wrong.items():
            backend_choice.say(
                f"the {taken} backend computes on {trial.device.type}, as {other} is not available: {why}"
            )
    if backend_choice.talkative():
        size = backend_choice.size_class(logits)
        backend_choice.say(
            f"{trial.operation}, {size}, {trial.operand} on {trial.device.type}: {taken} ({name} requested)"
        )
    return load(taken)


def _check_named(name: str, trial: Trial, group: "ProcessGroup | None") -> None:
    source = f"backend={name!r}"
    _check_available(name, source, trial.device)  # a compiled caller has not
    if fault := _fault(name, trial, group):
        remedy = f"expected auto or torch, or {self_test.ENVIRONMENT}=0 in the environment to use it nevertheless"
        raise RuntimeError(f"{source}: {fault}; {remedy}")


def _first_sound(trial: Trial, logits: int, group: "ProcessGroup | None") -> tuple[str, dict[str, str]]:
    """The table's first backend that can compute calls like a trial, and what is wrong with those before it."""
    wrong: dict[str, str] = {}
    for name in backend_choice.order(trial.device, trial.operand, logits):
        if not (found := _fault(name, trial, group)):
            return name, wrong
        wrong[name] = found
    return "torch", wrong


def _fault(name: str, trial: Trial, group: "ProcessGroup | None") -> str:
    """Why a backend cannot compute calls like a trial on all ranks of a group; empty where it can."""
    found = unavailable(name, trial.device)
    if not found and (failed := self_test.fault(name, trial, load)):
        found = f"it failed its self-test of {trial}: {failed} ({REPORT})"
    return self_test.agreed(found, name, trial, group)


def passed_over(name: str, trials: Iterable[Trial]) -> dict[str, str]:
    """The backends that large calls like some trials would pass over, and why, for processes that decide together.

    Raises:
        RuntimeError: a backend was named, and cannot run here or failed its self-test.
    """
    wrong: dict[str, str] = {}
    for trial in trials:
        if name == AUTO:
            wrong |= _first_sound(trial, backend_choice.LARGE + 1, None)[1]
        elif name != REFERENCE:
            _check_named(name, trial, None)
    return wrong


def leave_out(backends: Mapping[str, str]) -> None:
    """Have this process use some backends no more, named with the reasons; before its first call."""
    _LEFT_OUT.update(backends)


def take_for_head(name: str, trial: HeadTrial, head: Head) -> Backend:
    """The same for an operation on a head."""
    shard = head.options.shard
    return take(name, trial, head.target.numel() * shard.largest, shard.group)
