"""Computations besides the head: objective from log-probs, entropy of replay candidates."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from benchmarks.heads import default_backend, full_logits
from benchmarks.measure import Budget, Results, race
from benchmarks.timing import CLOCK
from exgrpo import kernels
from exgrpo.tools.timing import make_inputs

OURS = f"exgrpo {default_backend()}"
BUDGET = Budget(2.0)
TOKENS = (16_384, 1_048_576)
CANDIDATES, CANDIDATE_TOKENS, WIDTH, VOCABULARY = 16, 128, 256, 32000


def objective(log_prob: Tensor, old: Tensor, advantage: Tensor, replayed: Tensor) -> Tensor:
    """Compute the mixed objective as first written (arXiv 2510.02245, section 3.3)."""
    ratio = (log_prob - old).exp()
    fresh = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return -torch.where(replayed, ratio / (ratio + 0.1) * advantage, fresh).sum() / len(log_prob)


def of_objective(tokens: int, device: torch.device) -> Results:
    """Measure the loss from log-probs, forward and backward."""
    old = -torch.rand(tokens, device=device)
    log_prob = (old + 0.1 * torch.randn_like(old)).requires_grad_()
    advantage, replayed = torch.randn_like(old), torch.rand_like(old) < 0.1
    compiled = torch.compile(objective, dynamic=False)

    def ours() -> object:
        loss = kernels.policy_loss(log_prob, old, advantage, replayed=replayed, normalizer=tokens).loss
        return torch.autograd.grad(loss, log_prob)

    def plain(function) -> object:
        return torch.autograd.grad(function(log_prob, old, advantage, replayed), log_prob)

    torch.testing.assert_close(ours(), plain(objective), rtol=1e-4, atol=1e-9)
    calls = {OURS: ours, "plain torch": lambda: plain(objective), "plain torch, compiled": lambda: plain(compiled)}
    return race(calls, device, BUDGET, {})


def of_entropies(device: torch.device) -> Results:
    """Measure mean entropies of packed replay candidates of different lengths."""
    lengths = torch.randint(CANDIDATE_TOKENS // 2, 3 * CANDIDATE_TOKENS // 2, (CANDIDATES,))
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(device)
    inputs = make_inputs(int(ends[-1]), WIDTH, VOCABULARY, torch.float32, device)
    offsets = ends.tolist()

    @torch.no_grad()
    def ours() -> Tensor:
        return kernels.sequence_entropy(inputs.hidden, inputs.weight, inputs.target, ends)

    @torch.no_grad()
    def padded() -> Tensor:
        # Every candidate is padded to the longest.
        longest = int(lengths.max())
        hidden = inputs.hidden.new_zeros(CANDIDATES, longest, WIDTH)
        for i in range(CANDIDATES):
            hidden[i, : lengths[i]] = inputs.hidden[offsets[i] : offsets[i + 1]]
        flat = hidden.flatten(0, 1)
        entropy = full_logits(flat, inputs.weight, torch.zeros(len(flat), dtype=torch.int64, device=device))[1]
        return torch.stack([row[:n].mean() for row, n in zip(entropy.view(CANDIDATES, -1), lengths, strict=True)])

    torch.testing.assert_close(ours(), padded(), rtol=1e-4, atol=1e-5)
    return race({OURS: ours, "padded, full logits": padded}, device, BUDGET, {})


GROUPS_OF_ROWS: dict[str, tuple[Callable[[torch.device], Results], tuple[str, ...]]] = {
    **{
        f"objective, {tokens} tokens": (partial(of_objective, tokens), (OURS, "plain torch", "plain torch, compiled"))
        for tokens in TOKENS
    },
    f"entropy of {CANDIDATES} candidates": (of_entropies, (OURS, "padded, full logits")),
}
PAIRS = [(group, row) for group, (_, rows) in GROUPS_OF_ROWS.items() for row in rows]


@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize(("group", "row"), PAIRS, ids=[f"{group}-{row}" for group, row in PAIRS])
def test_around_the_head(benchmark, groups, device, group, row):
    torch.manual_seed(0)
    groups.report(group, row, lambda: GROUPS_OF_ROWS[group][0](device), benchmark)
