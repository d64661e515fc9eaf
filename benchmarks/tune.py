"""Time the launches of the Triton kernels on the GPU at hand: `python -m benchmarks.tune --output FILE`.

The fastest plan belongs into `PLANS` of exgrpo/kernels/triton_chunks/launch.py.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from benchmarks.heads import ENTROPY_COEF
from benchmarks.inputs import make_inputs
from benchmarks.timing import Budget, interleave
from exgrpo.kernels import linear_policy_loss
from exgrpo.kernels.backend_choice import architecture
from exgrpo.kernels.dispatch import unavailable
from exgrpo.kernels.triton_chunks import launch
from exgrpo.kernels.triton_chunks.launch import LaunchPlan

ROWS = tuple(product((1024, 2048, 4096, 8192, 16384), (4, 8, 16)))
TILES = (
    *((128, 128, 64, 8, 3), (128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (128, 128, 64, 8, 4), (256, 128, 64, 8, 3)),
    *((256, 128, 64, 8, 4), (128, 128, 64, 4, 3), (64, 256, 64, 4, 3), (128, 128, 32, 8, 3), (128, 256, 32, 8, 3)),
    *((256, 128, 32, 8, 3), (64, 256, 64, 8, 4), (64, 128, 64, 4, 4), (128, 64, 64, 4, 4), (128, 128, 64, 8, 2)),
)
NOISE = 0.01
"""A smaller gain does not replace the present plan."""
WRONG = 1e-2
"""Relative difference between results: right ones differ by rounding alone, which is far less."""

Run = Callable[[LaunchPlan], Tensor]


def run_with(plan: LaunchPlan, key: str, loss: Callable[[], Tensor]) -> Tensor:
    """Compute a loss's gradient with a plan in the place of the present one."""
    launch.PLANS[key] = plan
    launch.plan.cache_clear()
    return loss()


def fastest(plans: Sequence[LaunchPlan], run: Run, device: torch.device, budget: float) -> LaunchPlan:
    """Return the plan with the shortest median; the first one unless another is faster by more than NOISE."""
    right = run(plans[0])
    calls = {}
    for plan in plans:
        try:
            wrong = (run(plan) - right).norm() > WRONG * right.norm()
        except Exception as error:  # compilers and devices refuse in many ways; each only rules a plan out
            print(f"  {plan}: skipped, {type(error).__name__}: {str(error).partition(chr(10))[0]}", flush=True)
            continue
        if wrong:
            print(f"  {plan}: skipped, its results are wrong", flush=True)
        else:
            calls[plan] = partial(run, plan)
    seconds, _ = interleave({str(plan): call for plan, call in calls.items()}, device, Budget(budget))
    times = {plan: median(seconds[str(plan)]) for plan in calls}
    for plan, time in times.items():
        print(f"  {plan}: {time * 1e3:.3f} ms", flush=True)
    best = min(times, key=times.__getitem__)
    return best if times[best] < (1 - NOISE) * times[plans[0]] else plans[0]


def tune(size: tuple[int, int, int], dtype: torch.dtype, device: torch.device, budget: float) -> tuple[str, LaunchPlan]:
    """Return the key and the fastest plan for heads of T, D, V: row kernels, then tiles, then the kind of product."""
    hidden, weight, target = make_inputs(*size, dtype, device)
    hidden.requires_grad_()
    advantage = torch.ones(size[0], device=device)

    def loss() -> Tensor:
        old = torch.zeros_like(advantage)
        result = linear_policy_loss(
            hidden, weight.requires_grad_(), target, old, advantage, entropy_coef=ENTROPY_COEF, backend="triton"
        )
        return torch.autograd.grad(result.loss, (hidden, weight))[0].float()

    width = "wide" if size[1] >= launch.WIDE else "narrow"
    key = f"{architecture(device)} {str(dtype).removeprefix('torch.')} {width}"
    plan = launch.planned(architecture(device), dtype, size[1])
    run = partial(run_with, key=key, loss=loss)
    by_library = replace(plan, fused=False)
    rows = [replace(by_library, rows=launch.Launch(*numbers)) for numbers in ROWS]
    by_library = fastest([by_library, *rows], run, device, budget / 3)
    if dtype not in (torch.bfloat16, torch.float16):
        return key, by_library
    fused = replace(by_library, fused=True)
    fused = fastest([fused, *(replace(fused, tile=launch.Tile(*t)) for t in TILES)], run, device, budget / 3)
    return key, fastest([by_library, fused], run, device, budget / 3)


def main(argv: list[str]) -> int:
    """Run the program; return its exit status."""
    parser = argparse.ArgumentParser("python -m benchmarks.tune", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("launch.txt"), help="the plan, as a line (%(default)s)")
    parser.add_argument("--shape", nargs=3, type=int, default=(8192, 1536, 151936), metavar=("T", "D", "V"))
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32", "float64"), default="bfloat16")
    parser.add_argument("--minutes", type=float, default=12.0, help="for the timing (%(default)s)")
    options = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if reason := unavailable("triton", device):
        print(f"error: nothing to tune here: {reason}", file=sys.stderr)
        return 2
    key, plan = tune(tuple(options.shape), getattr(torch, options.dtype), device, 60 * options.minutes)
    options.output.write_text(f'"{key}": {plan}\n', encoding="utf-8")
    print(options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
