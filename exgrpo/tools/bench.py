"""Time the policy loss of a head by each backend and by plain torch, on this machine: `exgrpo bench`.

It takes about a minute and writes bench.json. All rows take turns. "Floor / time" compares with the three bare matrix
products of forward and backward in the same dtype; higher is faster. Memory is the peak of a call beyond its inputs.
The error is the relative error of the gradients against float64, on 256 tokens.
"""

import argparse
import datetime
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import exgrpo
from exgrpo.kernels import linear_log_prob, linear_policy_loss
from exgrpo.kernels.dispatch import BACKENDS, unavailable
from exgrpo.tools.timing import FEWEST_ROUNDS, Call, Shape, interleave, make_inputs, paired_spread, peak_bytes

FLOOR, OURS, PLAIN = "floor", "exgrpo", "full logits"
"""Row names: bare products, prefix of the backends, plain torch."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
HEADS = {"cpu": Shape(512, 896, 32000), "cuda": Shape(8192, 1536, 151936)}
"""Default sizes."""
SECONDS = {"cpu": 60.0, "cuda": 30.0}
"""Seconds of measurement; a round that has begun is completed."""
ERROR_TOKENS = 256
WRONG = 8.0
"""A row is wrong if its error exceeds this multiple of plain torch's error in the same dtype."""
CLIP = 0.2
OLD_NOISE = 0.05
"""Standard deviation of log pi - log pi_old in nats: so that almost no token is clipped and skips its products."""


class LossInputs(NamedTuple):
    """Inputs of a policy loss: hidden [T, D] and weight [V, D], both leaves; target, old_log_prob, advantage [T]."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    old_log_prob: Tensor
    advantage: Tensor

    @property
    def active(self) -> Tensor:
        """[T] bool: tokens in the loss; the others have no advantage."""
        return self.advantage != 0

    def part(self, tokens: int, dtype: torch.dtype) -> "LossInputs":
        """Return the first tokens in a dtype, with new leaves."""
        leaves = (x.detach().to(dtype, copy=True).requires_grad_() for x in (self.hidden[:tokens], self.weight))
        return LossInputs(*leaves, *(x[:tokens] for x in self[2:]))


Gradients = tuple[Tensor, ...]
Loss = Callable[[LossInputs], Gradients]


def make_problem(shape: Shape, dtype: torch.dtype, device: torch.device) -> LossInputs:
    """Return seeded inputs of a shape, with the sharp softmax of a language model."""
    hidden, weight, target, _ = make_inputs(*shape, dtype, device)
    generator = torch.Generator(device).manual_seed(1)
    noise, advantage = torch.randn(2, shape.tokens, generator=generator, device=device)
    old = linear_log_prob(hidden, weight, target, backend="torch").log_prob + OLD_NOISE * noise
    return LossInputs(
        hidden.requires_grad_(), weight.requires_grad_(), target, old, advantage.sign() * (0.5 + advantage.abs())
    )


def full_logits(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Return log-probs [T] from all logits, with softmax in fp32 (float64 for float64 inputs)."""
    logits = hidden @ weight.T
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits.log_softmax(-1).gather(-1, target[:, None]).squeeze(-1)


def plain_loss(log_prob: Tensor, problem: LossInputs) -> Tensor:
    """Return the clipped loss of log-probs [T], a sum over tokens divided by T."""
    ratio, advantage = (log_prob - problem.old_log_prob).exp(), problem.advantage
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).sum() / len(log_prob)


def plain(log_probs: Callable[[Tensor, Tensor, Tensor], Tensor], problem: LossInputs) -> Gradients:
    """Return the gradients by plain torch from a function of log-probs."""
    loss = plain_loss(log_probs(*problem[:3]), problem)
    return torch.autograd.grad(loss, (problem.hidden, problem.weight))


def fused(backend: str, problem: LossInputs) -> Gradients:
    """Return the gradients by a backend of `exgrpo.kernels`."""
    loss = linear_policy_loss(*problem, clip=(CLIP, CLIP), normalizer=len(problem.target), backend=backend).loss
    return torch.autograd.grad(loss, (problem.hidden, problem.weight))


def products(hidden: Tensor, weight: Tensor, *, forward: bool = False) -> Call:
    """Return a call that computes the bare products of hidden [T, D] and weight [V, D] into preallocated memory.

    With `forward` it computes only the logits, without the gradients of hidden and weight.
    """
    logits = hidden.new_empty(len(hidden), len(weight))
    # Random values: some CPUs multiply denormals 26 times slower, and GPUs multiply equal numbers faster.
    grad = torch.empty_like(logits).uniform_(0.1, 1.0)
    d_hidden, d_weight = torch.empty_like(hidden), torch.empty_like(weight)

    def multiply() -> None:
        torch.mm(hidden, weight.T, out=logits)
        if not forward:
            torch.mm(grad, weight, out=d_hidden)
            torch.mm(grad.T, hidden, out=d_weight)

    return multiply


def relative_error(found: Tensor, true: Tensor) -> float:
    """Return the norm of the difference relative to that of the true tensor."""
    return ((found.double() - true).norm() / true.norm()).item()


def gradient_error(loss: Loss, problem: LossInputs) -> float:
    """Return the larger relative error of both gradients against float64, on the first `ERROR_TOKENS` tokens."""
    some = problem.part(ERROR_TOKENS, problem.hidden.dtype)
    pairs = zip(loss(some), plain(full_logits, some.part(ERROR_TOKENS, torch.float64)), strict=True)
    return max(relative_error(found, true) for found, true in pairs)


def measure(
    problem: LossInputs, losses: Mapping[str, Loss], device: torch.device, seconds: float
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Time losses and the bare products in turns; return the rows that ran, fastest first, and failures by name."""
    calls: dict[str, Call] = {FLOOR: products(problem.hidden.detach(), problem.weight.detach())}
    calls |= {name: partial(loss, problem) for name, loss in losses.items()}
    end = time.perf_counter() + seconds
    times, failed = interleave(calls, device, seconds, least=FEWEST_ROUNDS, end=end)
    rows: list[dict[str, Any]] = []
    for name, of_row in times.items():
        row: dict[str, Any] = {"row": name, "median": statistics.median(of_row), "seconds": of_row, "peak_bytes": None}
        with suppress(OSError):  # some systems do not report it
            row["peak_bytes"] = peak_bytes(calls[name], device)
        if name != FLOOR:
            row["floor_over_time"] = paired_spread(times[FLOOR], of_row)
            row["gradient_error"] = gradient_error(losses[name], problem)
        rows.append(row)
    plain_error = next((row["gradient_error"] for row in rows if row["row"] == PLAIN), math.inf)
    for row in rows:
        row["wrong"] = not row.get("gradient_error", 0.0) <= WRONG * plain_error
    return sorted(rows, key=lambda row: row["median"]), failed


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Format the rows as a table."""
    lines = [f"{'':26}{'time':>13}{'floor / time':>24}{'memory':>12}{'error':>10}"]
    for row in rows:
        ratio = "{:.2f} ({:.2f} to {:.2f})".format(*row["floor_over_time"]) if "floor_over_time" in row else ""
        memory = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:,.0f} MiB"
        error = f"{row['gradient_error']:.1e}" if "gradient_error" in row else ""
        lines.append(
            f"{row['row']:26}{1e3 * row['median']:10,.1f} ms{ratio:>24}{memory:>12}{error:>10}{' WRONG' * row['wrong']}"
        )
    return "\n".join(line.rstrip() for line in lines)


def machine(device: torch.device) -> dict[str, Any]:
    """Return the conditions of the measurement: device, threads, load before the start, versions."""
    return {
        "date": str(datetime.date.today()),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "versions": {"exgrpo": exgrpo.__version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def _count(words: str) -> int:
    if not words.isdecimal() or not int(words):
        raise argparse.ArgumentTypeError(f"{words!r} is no number above 0")
    return int(words)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("exgrpo bench", description=__doc__, formatter_class=formatter)
    parser.add_argument("--tokens", type=_count, help="rows of the head (512; on a GPU 8192)")
    parser.add_argument("--hidden", type=_count, help="width of the hidden states (896; on a GPU 1536)")
    parser.add_argument("--vocabulary", type=_count, help="words of the head (32000; on a GPU 151936)")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of hidden states and head (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("runs/bench"), help="folder of bench.json (%(default)s)")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Run the program; return 1 if a row of ours fails or is wrong."""
    options = parse(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    usual = HEADS[device.type]
    shape = Shape(options.tokens or usual.tokens, options.hidden or usual.width, options.vocabulary or usual.vocabulary)
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"error: --output: {error}", file=sys.stderr)
        return 2
    here = machine(device)
    print(f"policy loss in {options.dtype} at {shape}: tokens, width, vocabulary\n{here}", flush=True)
    missing = {f"{OURS} {name}": reason for name in BACKENDS if (reason := unavailable(name, device))}
    ours: dict[str, Loss] = {f"{OURS} {name}": partial(fused, name) for name in BACKENDS}
    losses = {name: loss for name, loss in ours.items() if name not in missing}
    losses[PLAIN] = partial(plain, full_logits)
    losses[f"{PLAIN}, compiled"] = partial(plain, torch.compile(full_logits, dynamic=False))
    problem = make_problem(shape, DTYPES[options.dtype], device)
    rows, failed = measure(problem, losses, device, SECONDS[device.type])
    print(f"\n{table(rows)}\n")
    for name, reason in (missing | failed).items():
        print(f"no {name}: {reason}")
    content = {**here, "dtype": options.dtype, "shape": shape, "rows": rows, "left_out": missing | failed}
    file = options.output / "bench.json"
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(file)
    return int(any(row["wrong"] for row in rows) or any(name in ours for name in failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
