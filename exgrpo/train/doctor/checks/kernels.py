"""Does each backend of the kernels compute rightly, and how near is it to the bare matrix products?"""

import statistics
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from exgrpo.train.doctor.check import Check, CheckFailedError, Given, Skipped
from exgrpo.train.doctor.machine import device

if TYPE_CHECKING:
    from exgrpo.kernels.tuning.workload import Workload

BACKENDS = ("cpu", "cuda", "torch", "triton")
"""Those of `exgrpo.kernels.dispatch`, which imports torch."""
SHAPES = {"cpu": (256, 512, 8192), "cuda": (4096, 2048, 65536)}
"""By kind of device: tokens, width and vocabulary of the timed policy loss."""
TURNS = 5


def check(backend: str, given: Given) -> str:
    """Compare a small policy loss with float64, and time a larger one in the recipe's dtype."""
    from exgrpo.kernels import dispatch
    from exgrpo.kernels.self_check import TOLERANCES, self_check
    from exgrpo.kernels.tables import dtype_name
    from exgrpo.kernels.tuning.workload import Shape, make_workload

    here = device()
    if reason := dispatch.unavailable(backend, here):
        raise Skipped(reason)
    errors = {dtype: self_check(backend, here, dtype) for dtype in TOLERANCES}
    told = ", ".join(f"{dtype_name(dtype)} {error:.1e}" for dtype, error in errors.items())
    if not all(errors[dtype] < TOLERANCES[dtype] for dtype in TOLERANCES):
        raise CheckFailedError(f"its gradients are wrong, relative errors: {told}. {REMEDY}")
    dtype = {"fp32": "float32", "bf16": "bfloat16"}[given.recipe.policy.dtype]
    seconds, floor = turns(make_workload(Shape(*SHAPES[here.type]), dtype, here, backend))
    return (
        f"right (errors {told}); {seconds * 1e3:.1f} ms in {dtype}, {floor / seconds:.2f} of the bare products' speed"
    )


def turns(work: "Workload") -> tuple[float, float]:
    """Median seconds of the policy loss with its gradients, and of its three matrix products, in turns."""
    from exgrpo.kernels.tuning.workload import seconds_of

    calls = (work.loss, products(work))
    for call in calls:  # compiles, and fills caches
        call()
    times = [[seconds_of(call) for call in calls] for _ in range(TURNS)]
    loss, floor = map(statistics.median, zip(*times, strict=True))
    return loss, floor


def products(work: "Workload") -> "Callable[[], tuple]":
    """The products of the loss: logits [T, V], and with their gradients those of hidden [T, D] and weight [V, D]."""
    import torch

    hidden, weight = work.hidden.detach(), work.weight.detach()
    logits = hidden.new_empty(len(hidden), len(weight))
    # Not any values: some processors multiply denormals slower, and GPUs multiply equal numbers faster.
    gradient = torch.empty_like(logits).uniform_(0.1, 1.0)
    of_hidden, of_weight = torch.empty_like(hidden), torch.empty_like(weight)

    def multiply() -> tuple:
        torch.mm(hidden, weight.T, out=logits)
        torch.mm(gradient, weight, out=of_hidden)
        torch.mm(gradient.T, hidden, out=of_weight)
        return ()

    return multiply


REMEDY = "Take another --policy.kernel_backend; `torch` needs nothing but torch"
CHECKS = tuple(Check(f"kernels_{backend}", partial(check, backend), 1, REMEDY) for backend in BACKENDS)
