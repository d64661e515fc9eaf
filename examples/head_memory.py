"""Time and memory of the policy loss on this machine: from the hidden states, and from full logits.

    python examples/head_memory.py                                  # under a minute
    python examples/head_memory.py --tokens 8192 --hidden 3584 --vocabulary 152064 --dtype bfloat16 --device cuda

It needs only torch. Memory on a CPU is the high-water mark of the process, which Linux records.
"""

import argparse
import ctypes
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from exgrpo.kernels import PolicyLoss, linear_policy_loss, policy_loss

ROUNDS = 2


class Inputs(NamedTuple):
    """Inputs of a policy loss for T tokens."""

    hidden: Tensor  # [T, D]
    weight: Tensor  # [V, D]
    target: Tensor  # [T], -100 for tokens of a prompt
    old_log_prob: Tensor  # [T]
    advantage: Tensor  # [T]


def make_inputs(options: argparse.Namespace) -> Inputs:
    """Return random tokens, the first fourth of them a prompt."""
    generator = torch.Generator().manual_seed(0)
    tokens, hidden, vocabulary = options.tokens, options.hidden, options.vocabulary

    def draw(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator)
        return values.to(options.device, getattr(torch, options.dtype))

    target = torch.randint(vocabulary, (tokens,), generator=generator)
    target[: tokens // 4] = -100
    states, weight = draw(tokens, hidden).requires_grad_(), (draw(vocabulary, hidden) / hidden**0.5).requires_grad_()
    old_log_prob = torch.full((tokens,), -float(torch.tensor(vocabulary).log()))
    return Inputs(states, weight, *(x.to(options.device) for x in (target, old_log_prob, draw(tokens).float())))


def fused(inputs: Inputs) -> PolicyLoss:
    """Compute the loss from the hidden states."""
    result = linear_policy_loss(*inputs, clip=None)
    result.loss.backward()
    return result


def full_logits(inputs: Inputs) -> PolicyLoss:
    """Compute the same in the usual way: all logits, their log-softmax, the loss, autograd."""
    log_probs = (inputs.hidden @ inputs.weight.T).float().log_softmax(-1)
    kept = inputs.target >= 0
    log_prob = log_probs.gather(-1, inputs.target.clamp(min=0)[:, None]).squeeze(-1)
    entropy = -(log_probs.detach().exp() * log_probs.detach()).sum(-1)
    result = policy_loss(log_prob, inputs.old_log_prob, inputs.advantage, clip=None, entropy=entropy, mask=kept)
    result.loss.backward()
    return result


class Measured(NamedTuple):
    """Measurements of one way to compute the loss."""

    seconds: float  # of the fastest call
    mebibytes: float  # peak of a call, beyond its inputs
    log_prob: Tensor  # [T]


def measure(way: Callable[[Inputs], PolicyLoss], inputs: Inputs) -> Measured:
    """Time several calls; the first one is a warm-up."""
    seconds = []
    for _ in range(1 + ROUNDS):
        inputs.hidden.grad = inputs.weight.grad = None
        marks = high_water(inputs.hidden.device)
        next(marks)
        start = time.perf_counter()
        log_prob = way(inputs).log_prob
        peak = next(marks)
        seconds.append(time.perf_counter() - start)
    return Measured(min(seconds[1:]), peak / 2**20, log_prob)


def high_water(device: torch.device) -> Iterator[float]:
    """Reset the high-water mark of memory, then yield the bytes by which it has risen."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield 0
        torch.cuda.synchronize(device)
        yield torch.cuda.max_memory_allocated(device) - before
        return
    mark, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    if not mark.exists():
        yield 0
        yield float("nan")
        return
    ctypes.CDLL(None).malloc_trim(0)  # otherwise memory freed but kept by the process would hide a call's usage
    mark.write_text("5")
    before = kilobytes("VmRSS", status.read_text())
    yield 0
    yield 1024 * (kilobytes("VmHWM", status.read_text()) - before)


def kilobytes(field: str, status: str) -> int:
    """Return a field of a process's status."""
    found = re.search(rf"^{field}:\s+(\d+)", status, re.MULTILINE)
    return int(found[1]) if found else 0


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=50000)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    chosen = options()
    inputs = make_inputs(chosen)
    ours, usual = measure(fused, inputs), measure(full_logits, inputs)
    size = f"{chosen.tokens} tokens, hidden {chosen.hidden}, vocabulary {chosen.vocabulary}"
    print(f"{size}, {chosen.dtype} on {chosen.device}\n")
    print(f"{'policy loss, forward and backward':35} {'time':>12} {'memory':>14}")
    for name, one in (("full logits", usual), ("fused", ours)):
        print(f"{name:35} {one.seconds * 1e3:>9,.0f} ms {one.mebibytes:>10,.0f} MiB")
    faster, smaller = usual.seconds / ours.seconds, usual.mebibytes / max(ours.mebibytes, 1)
    print(f"{'full logits / fused':35} {faster:>12.2f} {smaller:>14.1f}\n")
    apart = (ours.log_prob - usual.log_prob).abs().max().item()
    print(f"Their log-probabilities differ by at most {apart:.1e}. A fourth of the tokens is a prompt,")
    print("which costs the fused loss nothing.")


if __name__ == "__main__":
    main()
