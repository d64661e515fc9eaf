"""The same bits for any number of threads: of all sums but those in products of the library, whose order is its own."""

import os

import pytest
import torch

from exgrpo.kernels import dispatch, group_advantage, policy_loss, sequence_entropy
from exgrpo.kernels.chunks.products import Products

from .conftest import backends_of
from .support import make_case, make_tokens

THREADS = (2, 3, 4)
"""More than processors, perhaps: sums are cut into as many parts all the same."""
SHAPES = [(1, 5, 7), (33, 9, 129), (300, 70, 700), (1001, 16, 1031), (3001, 9, 64), (5, 8, 50_001)]
MANY = (33_001, 2, 3)
"""Of so many tokens torch makes a sum of one part for each thread, on any processor."""
OPTIONS = {
    "shaped": {"temperature": torch.linspace(0.5, 2, 301, dtype=torch.float64), "softcap": 5.0},
    "allowed_tokens": {"allowed_tokens": (1, 0, 2, 211, 9, 1, 40, 17, 3)},
}
CASES = [*((shape, "plain") for shape in (*SHAPES, MANY)), *(((301, 40, 211), name) for name in OPTIONS)]


@pytest.fixture(params=backends_of("cpu"))
def name(request, monkeypatch):
    """A backend; that of functions without a head, too."""
    monkeypatch.setenv("EXGRPO_BACKEND", request.param)
    monkeypatch.setattr(dispatch.load(request.param), "ALLOWED_PART", 16)
    return request.param


@pytest.fixture(params=[torch.float64, torch.float32, torch.bfloat16], ids=str)
def dtype(request):
    return request.param


@pytest.fixture
def library_alone(dtype, monkeypatch):
    """Each product of the library is one thread's, unless MKL is asked for the same bits (docs/kernels.md)."""
    if dtype != torch.bfloat16 and os.environ.get("MKL_CBWR", "").endswith("STRICT"):
        return

    def alone(product):
        def run(*args, **kwargs):
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            try:
                return product(*args, **kwargs)
            finally:
                torch.set_num_threads(threads)

        return run

    for method in ("logits", "hidden_gradient", "add_weight_gradient"):
        monkeypatch.setattr(Products, method, alone(getattr(Products, method)))


def everything_of(shape, options, dtype, backend):
    """A function that returns results and gradients of heads, by their names."""
    case = make_case(*shape, dtype, "cpu", bias=True, **OPTIONS.get(options, {}))
    old, advantage, replayed = make_tokens(case)
    bounds = torch.tensor([0, len(case.target) // 3, len(case.target)])

    def everything():
        loss = case.policy_loss(old, advantage, replayed=replayed, entropy_coef=0.1, backend=backend)
        clipped = case.policy_loss(old, advantage, backend=backend)
        found = case.log_prob(backend=backend)
        entropy = case.log_prob(lambda *head, **more: sequence_entropy(*head, bounds, **more), backend=backend)
        results = {"loss": loss.loss, "clipped": clipped.loss, "entropies": entropy, **found._asdict()}
        for of, value in {"loss": loss.loss, "clipped": clipped.loss, "log_prob": found.log_prob}.items():
            gradients = torch.autograd.grad(value, case.leaves, torch.ones_like(value))
            for leaf, gradient in zip(("hidden", "weight", "bias"), gradients, strict=True):
                results[f"{leaf}, by {of}"] = gradient
        return results

    return everything


def assert_same_bits(function, set_threads):
    set_threads(1)
    alone = function()
    for threads in THREADS:
        set_threads(threads)
        found = function()
        assert [key for key in alone if not torch.equal(alone[key], found[key])] == [], f"{threads} threads"


@pytest.mark.parametrize(("shape", "options"), CASES, ids=str)
@pytest.mark.usefixtures("library_alone")
def test_heads(shape, options, dtype, name, set_threads):
    assert_same_bits(everything_of(shape, options, dtype, name), set_threads)


@pytest.mark.parametrize("tokens", [7, 4099, 33_001])
@pytest.mark.usefixtures("name")
def test_tokens(tokens, dtype, set_threads):
    """Several losses: sums in another order may have the same bits by chance."""
    old, log_prob, entropy, advantage = torch.randn(4, 8, tokens, dtype=torch.float64).to(dtype)
    group = torch.arange(tokens) // 8

    def everything():
        results = {"advantage": group_advantage(advantage[0].float(), group)}
        for i in range(8):
            loss = policy_loss(log_prob[i], old[i], advantage[i], entropy=entropy[i], entropy_coef=0.1)
            results |= {f"{key} {i}": value for key, value in loss._asdict().items()}
        return results

    assert_same_bits(everything, set_threads)
