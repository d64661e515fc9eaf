"""The operations inside PyTorch: frozen inputs, checkpointing, repeatability."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from exgrpo.kernels.chunks import products

from .support import INTERPRETING, fewer_interpreted, long_interpreted, make_case, make_tokens


def both_losses(case, tokens, backend):
    """A scalar of each differentiable operation."""
    old, advantage, replayed = tokens
    log_prob, entropy = case.log_prob(backend=backend)
    yield (log_prob + 0.1 * entropy).sum()
    yield case.policy_loss(old, advantage, replayed=replayed, entropy_coef=0.1, backend=backend).loss


@pytest.mark.parametrize(
    "frozen",
    [("hidden",), ("weight",), *map(long_interpreted, (("hidden", "weight"), ("hidden", "weight", "bias")))],
    ids="-".join,
)
def test_frozen_inputs(frozen, backend, device, monkeypatch):
    """What is frozen gets no gradient, its product is never formed, and the other gradients are the same bits."""
    case = make_case(fewer_interpreted(40), 16, 50, torch.float32, device, bias=True)
    tokens = make_tokens(case)
    names = [name for name in ("hidden", "weight", "bias") if name not in frozen]
    expected = [
        dict(zip(("hidden", "weight", "bias"), case.gradients(loss), strict=True))
        for loss in both_losses(case, tokens, backend)
    ]
    for name in frozen:
        getattr(case, name).requires_grad_(False)
    forbidden = {"hidden": "hidden_gradient", "weight": "add_weight_gradient"}
    for name in frozen:
        if name in forbidden:
            monkeypatch.delattr(products.Products, forbidden[name])
    for loss, gradients in zip(both_losses(case, tokens, backend), expected, strict=True):
        assert loss.requires_grad == bool(names)
        if not names:
            continue
        found = torch.autograd.grad(loss, [getattr(case, name) for name in names])
        assert all(torch.equal(gradients[name], gradient) for name, gradient in zip(names, found, strict=True))


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0), (4,), (2, 3)])
@pytest.mark.parametrize("left_out", ["ignored", "masked", "clipped"])
def test_nothing_to_do(shape, left_out, backend, device):
    """An empty batch, or all left out: zeros attached to the graph, gradients 0; a batch that only keeps step."""
    case = make_case(shape, 8, 20, torch.float32, device, bias=True, ignored=False)
    if left_out == "ignored":
        case.target.fill_(-100)
    found = case.log_prob(backend=backend)
    mask = torch.zeros(shape, dtype=torch.bool, device=device) if left_out == "masked" else None
    old, advantage = found.log_prob.detach() - 1, torch.ones(shape, device=device)
    coef, normalizer = (0.0, None) if left_out == "clipped" else (0.1, 7.0 if mask is not None else None)
    more = {"mask": mask, "normalizer": normalizer, "entropy_coef": coef}
    loss = case.policy_loss(old, advantage, backend=backend, **more)
    scalars = [loss.loss]
    if left_out != "clipped":
        assert not any(values.any() for values in loss)
    if left_out == "ignored":
        assert not any(values.any() for values in found)
        scalars.append(found.log_prob.sum() + found.entropy.sum())
    for scalar in scalars:
        for leaf, gradient in zip(case.leaves, case.gradients(scalar), strict=True):
            assert gradient.shape == leaf.shape
            assert not gradient.any()


@pytest.mark.parametrize("use_reentrant", [False, long_interpreted(True)])
def test_checkpointing(use_reentrant, backend, device):
    case = make_case(fewer_interpreted(40), 16, 50, torch.float64, device)
    tokens = make_tokens(case)
    for which in (0, 1):

        def run(hidden, weight, which=which):
            case.hidden, case.weight = hidden.tanh(), weight
            return list(both_losses(case, tokens, backend))[which]

        leaves = case.hidden.detach().requires_grad_(), case.weight.detach().requires_grad_()
        expected = torch.autograd.grad(run(*leaves), leaves)
        fresh = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        checkpoint(run, *fresh, use_reentrant=use_reentrant).backward()
        assert all(torch.equal(leaf.grad, gradient) for leaf, gradient in zip(fresh, expected, strict=True))
        case.hidden, case.weight = leaves


def test_weight_freed_between_forward_and_backward(backend, device):
    """An engine that shards parameters frees the storage after the forward and brings another for the backward."""
    case = make_case(fewer_interpreted(40), 16, 50, torch.float64, device)
    tokens = make_tokens(case)
    expected = [case.gradients(loss) for loss in both_losses(case, tokens, backend)]
    case.weight = torch.nn.Parameter(case.weight.detach())
    kept = case.weight.detach().clone()
    for which, gradients in enumerate(expected):
        case.weight.data = kept.clone()
        loss = list(both_losses(case, tokens, backend))[which]
        case.weight.data.fill_(torch.nan)
        case.weight.data = torch.empty(0, dtype=torch.float64, device=device)
        case.weight.data = kept.clone()
        assert all(torch.equal(a, b) for a, b in zip(case.gradients(loss), gradients, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_on_every_run(dtype, backend, device, set_chunk):
    set_chunk(12 * 151 * 4, block=5 * 151 * 4)
    case = make_case(fewer_interpreted(90), 32, 151, dtype, device, bias=True)
    tokens = make_tokens(case)

    def run():
        with torch.no_grad():
            found = [*case.log_prob(backend=backend)]
        assert all(map(torch.equal, found, case.log_prob(backend=backend)))
        for loss in both_losses(case, tokens, backend):
            found += [loss, *case.gradients(loss)]
        return found

    first = run()
    for _ in range(1 if INTERPRETING else 2):
        noise = torch.randn(1000, device=device)  # moves the allocations of the next run
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))
        del noise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_graph_that_is_kept_gives_its_gradients_again(dtype, backend, device):
    """Whatever has become of those of an earlier backward; the last one scales in place what the forward has formed."""
    case = make_case((3, 8), 16, 30, dtype, device, bias=True)
    loss = case.policy_loss(*make_tokens(case)[:2], backend=backend).loss
    leaves = (case.hidden, case.weight, case.bias)
    first = [x.clone() for x in torch.autograd.grad(loss, leaves, retain_graph=True)]
    (4 * loss).backward(retain_graph=True)
    for leaf, gradient in zip(leaves, first, strict=True):
        assert torch.equal(leaf.grad, 4 * gradient)  # a power of two rounds nothing
        leaf.grad.zero_()
    loss.backward()
    assert all(torch.equal(leaf.grad, gradient) for leaf, gradient in zip(leaves, first, strict=True))
