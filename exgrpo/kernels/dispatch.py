"""Choice of the backend that computes a call.

- ``cpu``: chunks of tokens through the compiled extension; the choice of ``auto`` on CPUs where it is built.
- ``cuda``: the Triton backend with a fused product in CUDA C++; where it is built, the choice of ``auto`` for large
  calls in bf16 on Hopper.
- ``triton``: the same chunks with Triton kernels in them, and where its launch plan says so with a matrix product of
  its own; the choice of ``auto`` on other GPUs. It waits for the number of tokens that take part, once a call.
- ``torch``: the same chunks in plain PyTorch. Runs on every device. On a GPU it waits for the number of tokens that
  take part: once a call, and once a chunk where gradients are formed with the loss.
- ``reference``: full logits and plain autograd. The oracle; only on request, since its memory is [T, V].

The argument ``backend`` decides; where it is ``"auto"``, the environment variable EXGRPO_BACKEND does, and else the
order of `backend_choice`. EXGRPO_DEBUG=1 prints a line for each kind of call. A preferred backend that is missing is
named once without it: nothing else would reveal slower kernels.

Before its first use in a dtype, a backend other than ``torch`` is tested, see `self_test`. One that fails is left out
where ``auto`` chooses, with a line on stderr; where it was named, the call is an error. The ranks of a vocab_group take
a backend only if all of them can. Other processes decide each for itself, unless they exchange what each one would pass
over and leave it out: `passed_over`, `leave_out`.
"""

import os
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from exgrpo.kernels import backend_choice, extension, self_test
from exgrpo.kernels.chunks.passes import Backend
from exgrpo.kernels.inputs import Head

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ENVIRONMENT = "EXGRPO_BACKEND"
AUTO, REFERENCE = "auto", "reference"
REPORT = "please report this together with what `python -m exgrpo.kernels` prints"


BACKENDS = {name: f"{__package__}.{name}_chunks" for name in backend_choice.NAMES}
"""Modules by name, imported when they are first needed."""


@cache
def load(name: str) -> Backend:
    """Return the backend of a name."""
    return cast(Backend, import_module(BACKENDS[name]))


TRITON_INSTALLED = find_spec("triton") is not None

_LEFT_OUT: dict[str, str] = {}
"""Backends that this process does not use although it could, and why."""
_AGREED: "WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, torch.dtype], str]]" = WeakKeyDictionary()
"""Faults on any rank of a group, "" if there is none, by backend and dtype."""


def unavailable(name: str, device: torch.device) -> str:
    """Return why a backend cannot compute on this device, "" if it can."""
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
        return extension.cuda_unavailable(device)
    return ""


def requested(backend: str, device: torch.device, vocab_group: object = None) -> str:
    """Return the backend that a call with this argument requests, ``auto`` included, for tensors on this device.

    Raises:
        ValueError: there is no such backend, or it has no vocab_group.
        RuntimeError: the backend that was requested cannot run here.
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
    """Return the backend for operations without a head: per-token objectives, advantages, means.

    A backend that the environment names for heads on another device is not for these: rewards are on a CPU.
    """
    of_gpus = ("cuda",) if os.environ.get("TRITON_INTERPRET") else ("cuda", "triton")
    if os.environ.get(ENVIRONMENT) in (of_gpus if device.type == "cpu" else ("cpu",)):
        return AUTO
    name = requested(AUTO, device)
    return "torch" if name == REFERENCE else name


def automatic(device: torch.device, operand: torch.dtype, logits: int) -> str:
    """Return the backend that ``auto`` takes for operands of a dtype on a device and a number of logits."""
    able = (name for name in backend_choice.order(device, operand, logits) if not unavailable(name, device))
    return next(able, "torch")


class CallKind(NamedTuple):
    """Call that needs a backend."""

    operation: str
    device: torch.device
    dtype: torch.dtype
    """Dtype of the operands."""
    size: int
    """Number of logits or of entries, the largest of any rank of a group: all have to take the same backend."""


def take(name: str, kind: CallKind, group: "ProcessGroup | None" = None) -> Backend:
    """Return the backend that was requested for a call; ``auto`` is decided here, as the size is known.

    Raises:
        RuntimeError: the backend that was requested cannot run here, or failed its self-test.
    """
    operation, device, dtype, size = kind
    tested = dtype if dtype.is_floating_point else torch.float32
    taken = name
    if name != AUTO:
        _check_named(name, device, tested, group)
    else:
        taken, wrong = _first_sound(device, tested, size, group)
        for other, why in wrong.items():
            backend_choice.say(f"the {taken} backend computes on {device.type}, as {other} is not available: {why}")
    if backend_choice.talkative():
        called = f"{operation}, {'large' if size > backend_choice.LARGE else 'small'}, {dtype} on {device.type}"
        backend_choice.say(f"{called}: {taken} ({name} requested)")
    return load(taken)


def take_for_head(name: str, operation: str, head: Head) -> Backend:
    """Return the backend for an operation on a head, as `take` does."""
    options = head.options
    logits = head.target.numel() * options.shard.largest
    return take(name, CallKind(operation, head.hidden.device, options.operand, logits), options.shard.group)


def take_for_values(name: str, operation: str, values: torch.Tensor) -> Backend:
    """Return the backend for an operation on some values, as `take` does."""
    return take(name, CallKind(operation, values.device, values.dtype, values.numel()))


def _check_named(name: str, device: torch.device, dtype: torch.dtype, group: "ProcessGroup | None") -> None:
    source = f"backend={name!r}"
    _check_available(name, source, device)  # a compiled caller has not
    if fault := _fault(name, device, dtype, group):
        remedy = f"expected auto or torch, or {self_test.ENVIRONMENT}=0 in the environment to use it nevertheless"
        raise RuntimeError(f"{source}: {fault}; {remedy}")


def _first_sound(
    device: torch.device, dtype: torch.dtype, size: int, group: "ProcessGroup | None"
) -> tuple[str, dict[str, str]]:
    """Return the first backend of the order that can compute, and the faults of those before it."""
    wrong: dict[str, str] = {}
    for name in backend_choice.order(device, dtype, size):
        if not (found := _fault(name, device, dtype, group)):
            return name, wrong
        wrong[name] = found
    return "torch", wrong


def _fault(name: str, device: torch.device, dtype: torch.dtype, group: "ProcessGroup | None") -> str:
    found = unavailable(name, device)
    if not found and (failed := self_test.fault(name, device, dtype, load)):
        found = f"it failed its self-test in {dtype} on {device.type}: {failed} ({REPORT})"
    # Collective whether or not this rank tests, or has the backend: settings that differ cannot part the ranks.
    if group is None or name == "torch":
        return found
    known = _AGREED.setdefault(group, {})
    if (name, dtype) not in known:
        good = torch.tensor(0 if found else 1, device=device)
        dist.all_reduce(good, op=dist.ReduceOp.MIN, group=group)
        known[name, dtype] = found or ("" if good.item() else "another rank of the vocab_group cannot use it")
    return known[name, dtype]


def passed_over(name: str, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """Return the backends that large calls in a dtype would pass over, and why, for processes that decide together.

    Raises:
        RuntimeError: a backend was named, and cannot run here or failed its self-test.
    """
    if name == AUTO:
        return _first_sound(device, dtype, backend_choice.LARGE + 1, None)[1]
    if name != REFERENCE:
        _check_named(name, device, dtype, None)
    return {}


def leave_out(backends: Mapping[str, str]) -> None:
    """Use some backends, named with the reasons, no more in this process; call it before the first call."""
    _LEFT_OUT.update(backends)
