"""Policy loss over allowed-token sets, forward and backward, against the whole vocabulary and a dense mask."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from benchmarks.heads import POLICY_LOSS, Case, default_backend, make_problem
from benchmarks.measure import Budget, Results, race
from benchmarks.timing import CLOCK, budget
from exgrpo import kernels
from exgrpo.tools.bench import OLD_NOISE, LossInputs, plain_loss

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


def masked(hidden: Tensor, weight: Tensor, target: Tensor, allowed_tokens: tuple[Tensor, Tensor]) -> Tensor:
    """Return log-probs by all logits and a mask [T, V], as slime computes them."""
    ids, offsets = allowed_tokens
    logits = (hidden @ weight.T).float()
    allowed = torch.zeros_like(logits, dtype=torch.bool)
    allowed[torch.repeat_interleave(offsets.diff()), ids.long()] = True
    log_prob = logits.masked_fill(~allowed, -torch.inf).log_softmax(-1)
    return log_prob.gather(-1, target[:, None]).squeeze(-1)


def measure(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, budget: Budget) -> Results:
    """Compare the gradients of both implementations with sets, then measure times and memory of all rows."""
    problem = make_problem(Case(POLICY_LOSS, *shape, dtype), device)
    allowed_tokens = make_sets(problem)
    hidden, weight, target = problem[:3]

    def log_prob() -> Tensor:
        return masked(hidden, weight, target, allowed_tokens)

    with torch.no_grad():
        problem = problem._replace(old_log_prob=log_prob() + OLD_NOISE * torch.randn_like(problem.old_log_prob))

    def ours(allowed_tokens: tuple[Tensor, Tensor] | None) -> tuple[Tensor, ...]:
        tokens = target, problem.old_log_prob, problem.advantage
        loss = kernels.linear_policy_loss(
            hidden, weight, *tokens, normalizer=len(target), allowed_tokens=allowed_tokens
        ).loss
        return torch.autograd.grad(loss, (hidden, weight))

    def plain() -> tuple[Tensor, ...]:
        return torch.autograd.grad(plain_loss(log_prob(), problem), (hidden, weight))

    for mine, theirs in zip(ours(allowed_tokens), plain(), strict=True):
        tolerance = 1e-3 if dtype == torch.float32 else 0.1  # plain torch rounds the logits to bf16
        assert (mine - theirs).float().norm() < tolerance * theirs.float().norm()
    facts: dict[str, object] = {
        "pairs": len(allowed_tokens[0]),
        "alone": (allowed_tokens[1].diff() == 1).float().mean().item(),
    }
    calls: dict[str, Callable[[], object]] = {
        ROWS[0]: partial(ours, allowed_tokens),
        ROWS[1]: partial(ours, None),
        ROWS[2]: plain,
    }
    return race(calls, device, budget, dict.fromkeys(ROWS, facts))


@pytest.mark.timeout(3600)
@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_kept(benchmark, groups, options, device, dtype, row):
    sizes = options.sizes
    shape = FULL_GPU if sizes == "full" and device.type == "cuda" else SHAPES[sizes]
    group = f"policy loss over kept sets {str(dtype).removeprefix('torch.')} {'x'.join(map(str, shape))}"
    groups.report(group, row, partial(measure, shape, dtype, device, budget(options, device)), benchmark)
