"""Policy loss over allowed-token sets, forward and backward, against the whole vocabulary and a dense mask."""

from functools import partial

import pytest
import torch
from torch import Tensor

from benchmarks.heads import OLD_NOISE, POLICY_LOSS, Case, LossInputs, default_backend, make_problem, plain_loss
from benchmarks.timing import Budget, Call, Results, clock, race
from exgrpo import kernels

OURS = f"exgrpo {default_backend()}"
ROWS = (OURS, f"{OURS}, whole vocabulary", "full logits, dense mask")
ALONE, CENTRE, SPREAD, MOST = 0.45, 1.9, 1.19, 2000
"""Sizes of sets: fraction with one token; mean and deviation of the others' logarithms; largest size.

The mean is 8, the median 2, and one set of a hundred has more than about 80 tokens, as prime-rl reports for p = 0.97
(its pull request 3431).
"""
SHAPES = {"tiny": (64, 64, 1000), "small": (512, 896, 32000), "full": (2048, 896, 49152)}
FULL_GPU = (8192, 1536, 151936)
ROUNDS = 256


def make_sets(problem: LossInputs) -> tuple[Tensor, Tensor]:
    """Return the likeliest tokens of each position, the target among them; seeded."""
    hidden, weight, target = (x.detach() for x in problem[:3])
    count, device = len(target), target.device
    generator = torch.Generator(device).manual_seed(2)
    drawn = torch.randn(count, generator=generator, device=device).mul(SPREAD).add(CENTRE).exp()
    sizes = drawn.round().clamp(2, min(MOST, len(weight))).long()
    sizes[torch.rand(count, generator=generator, device=device) < ALONE] = 1
    found = []
    for start in range(0, count, ROUNDS):
        rows = slice(start, start + ROUNDS)
        logits = (hidden[rows] @ weight.T).float()
        logits.scatter_(1, target[rows].unsqueeze(1), torch.inf)  # puts the target first
        words = logits.topk(int(sizes[rows].max())).indices
        found.append(words[torch.arange(words.shape[1], device=device) < sizes[rows].unsqueeze(1)])
    return torch.cat(found).int(), torch.cat((sizes.new_zeros(1), sizes.cumsum(0)))


def measure(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, budget: Budget) -> Results:
    """Compare the gradients of both implementations with sets, then measure times and memory of all rows."""
    problem = make_problem(Case(POLICY_LOSS, *shape, dtype), device)
    ids, offsets = allowed_tokens = make_sets(problem)
    hidden, weight, target = problem[:3]

    def log_prob() -> Tensor:
        """Return log-probs [T] by all logits and a mask [T, V], as slime computes them."""
        logits = (hidden @ weight.T).float()
        allowed = torch.zeros_like(logits, dtype=torch.bool)
        allowed[torch.repeat_interleave(offsets.diff()), ids.long()] = True
        return logits.masked_fill(~allowed, -torch.inf).log_softmax(-1).gather(-1, target[:, None]).squeeze(-1)

    with torch.no_grad():
        problem = problem._replace(old_log_prob=log_prob() + OLD_NOISE * torch.randn_like(problem.old_log_prob))

    def ours(sets: tuple[Tensor, Tensor] | None) -> tuple[Tensor, ...]:
        result = kernels.linear_policy_loss(*problem, normalizer=len(target), allowed_tokens=sets)
        return torch.autograd.grad(result.loss, (hidden, weight))

    def plain() -> tuple[Tensor, ...]:
        return torch.autograd.grad(plain_loss(log_prob(), problem), (hidden, weight))

    for mine, theirs in zip(ours(allowed_tokens), plain(), strict=True):
        tolerance = 1e-3 if dtype == torch.float32 else 0.1  # plain torch rounds the logits to bf16
        assert (mine - theirs).float().norm() < tolerance * theirs.float().norm()
    rows: tuple[Call, ...] = (partial(ours, allowed_tokens), partial(ours, None), plain)
    calls = dict(zip(ROWS, rows, strict=True))
    return race(calls, device, budget, {})


@pytest.mark.timeout(3600)
@pytest.mark.benchmark(timer=clock)
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_kept(benchmark, groups, options, budget, device, dtype, row):
    shape = FULL_GPU if options.sizes == "full" and device.type == "cuda" else SHAPES[options.sizes]
    group = f"policy loss over kept sets {str(dtype).removeprefix('torch.')} {'x'.join(map(str, shape))}"
    groups.report(group, row, partial(measure, shape, dtype, device, budget), benchmark)
