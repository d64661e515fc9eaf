"""Whether a backend computes rightly on this machine: held against plain PyTorch on a small case, before it is used.

Each process tests a backend before its first call of a kind (see `trials`), in some milliseconds and without a trace in
the state of any random generator. EXGRPO_SELF_TEST=0 leaves the tests out.

A backend passes if its error against float64 is at most FACTOR times that of the torch backend in the same dtype and
under the same settings, TF32 for instance, plus some roundings, since plain torch may be exact by chance.

The test runs in a thread of its own. None of the caller's modes (autocast, inference mode, torch.func) holds there, and
the caller can leave it behind if it does not end. Nothing can stop it then: on a CPU it goes on in the background. On a
GPU the driver may then wait in any further call, and after an illegal memory access every further call fails: the
process cannot go on with another backend, which is an error that says how to start again.
"""

import os
import threading
import time
from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from exgrpo.kernels import backend_choice
from exgrpo.kernels.chunks.passes import Backend
from exgrpo.kernels.inputs import compute_dtype
from exgrpo.kernels.trials import GRADIENT, Outcomes, Trial

ENVIRONMENT = "EXGRPO_SELF_TEST"
PLAIN = "torch"
"""The backend that the others are held against."""
LIMIT = 300.0
"""Seconds that a test may take: compilers, whose time counts, take some tens of them."""
DEVICE_LIMIT = 30.0
"""Seconds in which a GPU has to finish what is queued when a test has failed."""
FACTOR = 5.0
"""Of two such errors. With TF32 one was 3.2 times the other on an H100."""
ROUNDINGS = 256
"""Of the compute dtype, relative to an entry plus the typical one: 3e-5 in float32."""
GRADIENT_ROUNDINGS = 8
"""Of the operands' dtype, where it is the coarser one: 16-bit products may round one of their factors."""
LEAST = 1e-11
"""Of float64, whose exact value has an error of its own."""

_VERDICTS: dict[tuple[str, Trial], str] = {}
_LOCK = threading.Lock()
_AGREED: "WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, Trial], str]]" = WeakKeyDictionary()


def verdicts() -> dict[tuple[str, Trial], str]:
    """What has been tested in this process: by backend and trial what is wrong, empty where nothing is."""
    return dict(_VERDICTS)


def forget() -> None:
    """Have everything tested again: for tests."""
    _VERDICTS.clear()
    _AGREED.clear()


def fault(name: str, trial: Trial, load: Callable[[str], Backend]) -> str:
    """What is wrong with a backend, as a sentence; empty where nothing is, or where it is not tested.

    Raises:
        RuntimeError: it has left the GPU in a state in which this process cannot use it.
    """
    if name == PLAIN or os.environ.get(ENVIRONMENT, "1") == "0":
        return ""
    with _LOCK:
        if (name, trial) not in _VERDICTS:
            if trial.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return ""  # a capture admits no waiting
            _VERDICTS[name, trial] = _tested(name, trial, load)
        return _VERDICTS[name, trial]


def agreed(found: str, name: str, trial: Trial, group: "dist.ProcessGroup | None") -> str:
    """What is wrong on this rank, or on another one of a group; a collective call, once for each group and trial.

    It takes place whether or not this rank tests, or has the backend: settings that differ cannot part the ranks.
    """
    if group is None or name == PLAIN:
        return found
    known = _AGREED.setdefault(group, {})
    if (name, trial) not in known:
        good = torch.tensor(0 if found else 1, device=trial.device)
        dist.all_reduce(good, op=dist.ReduceOp.MIN, group=group)
        known[name, trial] = found or ("" if good.item() else "another rank of the vocab_group cannot use it")
    return known[name, trial]


def _tested(name: str, trial: Trial, load: Callable[[str], Backend]) -> str:
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(_compared(name, trial, load)), daemon=True)
    thread.start()
    thread.join(LIMIT)
    hangs = thread.is_alive()
    wrong = f"it did not end within {LIMIT:.0f} s" if hangs else "".join(found or ["it ended its thread"])
    if wrong and trial.device.type == "cuda" and (hangs or not _finishes(trial.device)):
        raise RuntimeError(
            f"the {name} backend failed its self-test of {trial}: {wrong}; the GPU is of no more use to this process: "
            f"start it again with EXGRPO_BACKEND={PLAIN} in the environment"
        )
    return wrong


@torch.no_grad()
def _compared(name: str, trial: Trial, load: Callable[[str], Backend]) -> str:
    try:
        exact, plain = (fetched(trial.outcomes(load(PLAIN), exact=wide)) for wide in (True, False))
    except Exception as error:
        backend_choice.say(f"the {name} backend goes untested, as plain torch cannot compute {trial}: {_text(error)}")
        return ""
    try:
        ours = fetched(trial.outcomes(load(name)))
    except torch.OutOfMemoryError:
        return ""  # no fault of the backend: the call itself will say so
    except Exception as error:
        return f"it raised {_text(error)}"
    return difference(ours, plain, exact, trial.operand)


def difference(
    ours: dict[str, Tensor], plain: dict[str, Tensor], exact: dict[str, Tensor], operand: torch.dtype
) -> str:
    """What is wrong with our results, in a few words; empty where they are right."""
    # By all values, and all gradients, together: of a single number plain torch may be exact by chance.
    allowed = {False: 0.0, True: 0.0}
    for result, true in exact.items():
        kind = result.startswith(GRADIENT)
        allowed[kind] = max(allowed[kind], FACTOR * _error(plain[result], true))
    for result, true in exact.items():
        if ours[result].shape != true.shape:
            return f"{result} has shape {list(ours[result].shape)}, where {list(true.shape)} is right"
        off, bound = _error(ours[result], true), allowed[result.startswith(GRADIENT)] + _roundings(result, operand)
        if not off <= bound:
            return f"{result} is off by {off:.1e} of its size, where {bound:.1e} is allowed"
    return ""


def fetched(outcomes: Outcomes) -> dict[str, Tensor]:
    """In float64 and on the CPU: waits for the device."""
    return {name: value.to("cpu", torch.float64) for name, value in outcomes.items()}


def _error(value: Tensor, exact: Tensor) -> float:
    """The largest error of an entry by its size plus the typical one, the root mean square; NaN where one is NaN."""
    error, typical = (value - exact).abs(), exact.square().mean().sqrt()
    return (error / (exact.abs() + typical).clamp(min=torch.finfo(exact.dtype).tiny)).max().item()


def _roundings(result: str, operand: torch.dtype) -> float:
    floating = operand if operand.is_floating_point else torch.float64
    allowed = max(LEAST, ROUNDINGS * torch.finfo(compute_dtype(floating)).eps)
    if result.startswith(GRADIENT):
        allowed = max(allowed, GRADIENT_ROUNDINGS * torch.finfo(floating).eps)
    return allowed


def _text(error: Exception) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def _finishes(device: torch.device) -> bool:
    """Whether a GPU completes what is queued on it."""
    try:
        event = torch.cuda.Event()
        event.record(torch.cuda.default_stream(device))
        deadline = time.monotonic() + DEVICE_LIMIT
        while not event.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
    except RuntimeError:
        return False
    return True
