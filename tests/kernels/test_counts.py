"""Numbers that the caller knows: the same results, and no host that waits for its device."""

from functools import partial

import pytest
import torch
from torch.overrides import TorchFunctionMode

from exgrpo.kernels import checks, linear_policy_loss, sequence_entropy
from exgrpo.kernels.chunks import walks

from .support import fewer_interpreted, make_case, make_tokens

WAITING = {
    *("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy", "synchronize"),
    *("tensor", "as_tensor", "new_tensor", "from_numpy"),
    *("nonzero", "equal", "allclose", "masked_select", "unique", "bincount", "repeat_interleave"),
}
"""Functions whose results, or their shapes, the host has to know, and those that copy from its memory."""


class Asked(TorchFunctionMode):
    """Names of the functions for which a host would wait for a GPU."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in WAITING:
            self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


def counts_of(case, advantage):
    taking_part = case.target != -100
    return int(taking_part.sum()), int((taking_part & (advantage != 0)).sum())


@pytest.fixture
def case(device):
    return make_case(fewer_interpreted(60), 8, 50, torch.float32, device)


@pytest.mark.parametrize("entropy_coef", [0.0, 0.01])
def test_known_counts_change_no_bit(entropy_coef, case, backend):
    """A larger number of gradients than there are adds zeros."""
    old, advantage, replayed = make_tokens(case)
    bounds = torch.tensor([0, 7, len(case.target)], device=case.target.device)
    more = {"replayed": replayed, "entropy_coef": entropy_coef, "backend": backend}

    def outcome(counts):
        result = case.policy_loss(old, advantage, counts=counts, **more)
        found = case.log_prob(counts=counts, backend=backend)
        entropy = sequence_entropy(case.hidden, case.weight, case.target, bounds, counts=counts, backend=backend)
        loss = (found.log_prob * advantage).sum() + (found.entropy * advantage).sum()
        return [*result, *found, entropy, *case.gradients(result.loss), *case.gradients(loss)]

    known, active = counts_of(case, advantage)
    without = outcome(None)
    assert all(map(torch.equal, outcome((known, active)), without))
    torch.testing.assert_close(outcome((known, known)), without)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_with_known_counts_nothing_waits_for_the_device(dtype, device, backend, monkeypatch):
    if backend not in ("triton", "cuda"):
        pytest.skip("it computes on the host, or takes clipped tokens out of the products")
    case = make_case(20, 8, 50, dtype, device)
    old, advantage, replayed = make_tokens(case)
    counts = counts_of(case, advantage)

    def run(counts):
        log_prob = case.log_prob(counts=None if counts is None else counts[:1] * 2, backend=backend)
        case.gradients(log_prob.log_prob.sum() + log_prob.entropy.sum())
        loss = case.policy_loss(old, advantage, replayed=replayed, normalizer=20.0, counts=counts, backend=backend).loss
        case.gradients(loss)

    run(counts)  # which tests the backend once
    with monkeypatch.context() as patches:
        patches.setattr(checks, "_check", lambda *_: None)  # on a GPU, an assertion is queued
        patches.setattr(checks, "written", lambda old, _: old)  # on a GPU, it is not checked
        asked = Asked()
        for name in ("log_prob_forward", "log_prob_backward", "policy_loss_forward"):
            patches.setattr(walks, name, partial(within, asked, getattr(walks, name)))
        within(asked, run, counts)
        assert asked.names == []
        within(asked, run, None)
        assert asked.names == ["tolist"] * 3  # forward, backward and loss


def within(mode, function, *arguments):
    """A mode sees an operator, not what the operator does: it is entered again there."""
    with mode:
        return function(*arguments)


def test_wrong_counts_are_an_error(case, backend, monkeypatch):
    monkeypatch.setenv("EXGRPO_CHECK", "1")  # else a GPU ends the process
    old, advantage, _ = make_tokens(case)
    known, active = counts_of(case, advantage)
    for wrong in ((known - 1, active), (known + 1, active), (known, active - 1)):
        with pytest.raises(ValueError, match=f"counts: expected {wrong[0]} targets that are not left out and at most"):
            case.policy_loss(old, advantage, counts=wrong, backend=backend)
    with pytest.raises(ValueError, match="counts: expected"):
        case.log_prob(counts=(known + 1, 0), backend=backend)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_a_call_with_known_counts_is_captured_in_a_cuda_graph(device, backend):
    if backend == "torch":
        pytest.skip("it takes clipped tokens out of the products, and asks how many they are")
    case = make_case(64, 64, 512, torch.bfloat16, device)
    old, advantage, replayed = make_tokens(case)
    counts = counts_of(case, advantage)
    bounds = torch.tensor([0, 7, 64], device=device)

    def run():
        options = {"replayed": replayed, "normalizer": 64.0, "counts": counts, "backend": backend}
        loss = linear_policy_loss(case.hidden, case.weight, case.target, old, advantage, **options).loss
        of_tokens = {"counts": counts[:1] * 2, "backend": backend}
        log_prob = case.log_prob(**of_tokens).log_prob
        entropy = sequence_entropy(case.hidden, case.weight, case.target, bounds, **of_tokens)
        return [loss, log_prob, entropy, *case.gradients(loss), *case.gradients(log_prob.sum())]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        expected = [value.clone() for value in run()]
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, found, expected))
