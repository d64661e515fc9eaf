"""Both functions of a head over one table of cases, and what the policy loss does besides."""

from functools import partial

import pytest
import torch

from exgrpo.kernels import linear_policy_loss, reference
from exgrpo.kernels.chunks import products

from .support import Case, both_functions, compare, fewer_interpreted, make_case, make_tokens

SHAPES = [
    (fewer_interpreted(252), 507, 123),  # nothing a multiple of anything
    (fewer_interpreted(64), 64, 512),  # everything a power of two
    (1, 33, 77),  # one token
    (fewer_interpreted(97), 1, 5),  # hidden states of width one
    (fewer_interpreted(40), 16, 1),  # one word: log-prob 0, entropy 0
    (fewer_interpreted(33), 48, 2),
    (fewer_interpreted(36), 31, 4099),  # a vocabulary far beyond tokens and width
    ((2, 3, 5), 24, 101),  # rows of rows
]
TERMS = [
    ({}, {}),
    ({"bias": True}, {"clip": None}),
    ({"temperature": 0.6}, {"clip": (0.1, 0.3)}),
    ({"temperature": 1.5, "bias": True}, {"clip": (0.0, 0.0)}),
    ({"softcap": 5.0}, {"beta": None}),
    ({"softcap": 2.0, "temperature": 0.8, "bias": True}, {"beta": 2.0}),
    ({"bias": True}, {"entropy_coef": 0.01}),
    ({}, {"entropy_coef": -0.5, "clip": None, "beta": None}),
    ({"softcap": 5.0, "bias": True}, {"normalizer": 1000.0}),
    ({"temperature": 0.6, "softcap": 5.0}, {"entropy_coef": 0.1, "normalizer": torch.tensor(37)}),
]


def run(case: Case, tokens, function=linear_policy_loss, upstream=1.0, **more):
    result = case.policy_loss(*tokens, function=function, **more)
    return list(result), case.gradients(result.loss * upstream)


def check(case: Case, backend: str, factor=2.0, **terms):
    compare(partial(both_functions, tokens=make_tokens(case), **terms), case, backend, factor=factor)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_shapes(shape, dtype, backend, device):
    check(make_case(*shape, dtype, device), backend)


@pytest.mark.parametrize(("options", "terms"), TERMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_terms(options, terms, dtype, backend, device):
    check(make_case(fewer_interpreted(100), 40, 211, dtype, device, **options), backend, **terms)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "softcap": 8.0}], ids=str)
def test_sixteen_bits(options, dtype, backend, device):
    """Without clipping: plain torch's rounded logits would put tokens on the wrong side of its range."""
    case = make_case(fewer_interpreted(252), 507, 123, dtype, device, bias=True, **options)
    check(case, backend, factor=1.0, clip=None, entropy_coef=0.01)


def test_one_value_per_row(backend, device):
    temperature = 0.5 + torch.rand(6, 15, dtype=torch.float64)
    case = make_case((6, 15), 24, 101, torch.float64, device, temperature=temperature)
    old, advantage, replayed = make_tokens(case)
    compare(partial(both_functions, tokens=(old, advantage[:, 0], replayed[:, 0])), case, backend)


@pytest.mark.parametrize("ignore_index", [7, -5])
@pytest.mark.parametrize("masked", [False, True])
def test_ignored_positions(ignore_index, masked, backend, device):
    """As those of target -100 by default, whose loss is the oracle: a word of the vocabulary may stand for them.

    Their hidden states are never read: not even NaN there does any harm.
    """
    case = make_case((4, 10), 16, 50, torch.float64, device, bias=True)
    case.target[case.target == 7] = 8
    tokens = make_tokens(case)
    mask = (torch.arange(40, device=device) % 3 > 0).view(4, 10) if masked else None
    exact = both_functions(case, "reference", tokens, entropy_coef=0.1, mask=mask)
    ignored = case.target == -100
    case.target[ignored] = case.options["ignore_index"] = ignore_index
    torch.testing.assert_close(both_functions(case, "reference", tokens, entropy_coef=0.1, mask=mask), exact)
    with torch.no_grad():
        case.hidden[ignored] = torch.nan
    values, gradients = both_functions(case, backend, tokens, entropy_coef=0.1, mask=mask)
    torch.testing.assert_close((values, gradients), exact)
    assert not any(found[ignored].any() for found in (*values[1:], gradients[0], gradients[3]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("oracle", [False, True], ids=["backend", "reference"])
def test_the_gradient_of_the_weight_is_added_where_one_says(dtype, oracle, backend, device):
    """Over two micro-batches, by both functions: it is the same before it is rounded, and the others are the same."""
    case = make_case(fewer_interpreted(40), 24, 101, dtype, device, bias=True)
    old, advantage, replayed = make_tokens(case)
    backend = "reference" if oracle else backend
    total = torch.ones(101, 24, dtype=torch.float64 if dtype == torch.float64 else torch.float32, device=device)
    exact = torch.ones(101, 24, dtype=torch.float64, device=device)
    for function in (
        lambda **more: case.policy_loss(old, advantage, replayed=replayed, backend=backend, **more).loss,
        lambda **more: torch.stack(case.log_prob(backend=backend, **more)).square().sum() / 100,
    ):
        hidden, weight, bias = case.gradients(function())
        exact += weight.double()
        for leaf in case.leaves:
            leaf.grad = None
        function(weight_grad=total).backward()
        assert case.weight.grad is None
        assert torch.equal(case.hidden.grad, hidden)
        assert torch.equal(case.bias.grad, bias)
        # What autograd gets is rounded to the dtype of the weight once.
        torch.testing.assert_close(
            total.double(), exact, rtol=2e-6, atol=2 * torch.finfo(dtype).eps * weight.max().item()
        )
    before = total.clone()
    with torch.no_grad():
        case.policy_loss(old, advantage, backend=backend, weight_grad=total)
    assert torch.equal(total, before)
    if not oracle and device.type == "cpu":  # on a GPU, an assertion is queued
        twice = 2 * case.policy_loss(old, advantage, backend=backend, weight_grad=total).loss
        with pytest.raises(ValueError, match=r"weight_grad: expected a loss that is differentiated with gradient 1"):
            twice.backward()


@pytest.mark.parametrize("rows", [1, 7, 60, 1000])
@pytest.mark.parametrize(("dtype", "entropy_coef"), [(torch.float32, 0.1), (torch.bfloat16, 0.0)])
def test_chunk_boundaries(rows, dtype, entropy_coef, set_chunk, device):
    case = make_case(61, 30, 47, dtype, device, ignored=False, bias=True)
    tokens = make_tokens(case)
    whole, gradients = both_functions(case, "torch", tokens, entropy_coef=entropy_coef)
    set_chunk(rows * 47 * 4, block=3 * 47 * 4, tile=11 * 30 * 4)
    parts, more = both_functions(case, "torch", tokens, entropy_coef=entropy_coef)
    del parts[3], whole[3]  # the log-ratio: its error is that of the log-prob, which may be larger than it
    for a, b in zip(parts + more, whole + gradients, strict=True):
        tolerance = 16 * torch.finfo(b.dtype).eps * b.abs().max().item()
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


@pytest.fixture
def rows_in_products(monkeypatch):
    """Counts the rows that enter the product for the logits and those for the two gradients."""
    seen = {"logits": 0, "hidden_gradient": 0, "add_weight_gradient": 0}
    monkeypatch.setenv("EXGRPO_SELF_TEST", "0")  # whose rows would be counted too

    def count(name):
        method = getattr(products.Products, name)

        def counted(self, matrix, *rest, **more):
            seen[name] += matrix.shape[0]
            return method(self, matrix, *rest, **more)

        monkeypatch.setattr(products.Products, name, counted)

    for name in seen:
        count(name)
    return seen


@pytest.mark.parametrize(("chunk", "clip"), [(1 << 20, (0.2, 0.2)), (9 * 47 * 4, (0.2, 0.2)), (9 * 47 * 4, None)])
def test_only_tokens_that_matter_enter_the_products(chunk, clip, set_chunk, rows_in_products, backend, device):
    """Masked tokens enter none, those without advantage only the first, as clipped ones by the torch backend."""
    set_chunk(chunk, block=2 * 47 * 4)
    case = make_case(45, 30, 47, torch.float64, device)
    old, advantage, _ = make_tokens(case, ratio_spread=0.0)
    mask = torch.arange(45, device=device) >= 5
    advantage[5:20] = 0
    advantage[20:35] = advantage[20:35].abs() + 0.1
    old[20:35] -= 1.0
    exact, exact_gradients = run(case, (old, advantage), reference.linear_policy_loss, mask=mask, clip=clip)
    ours, gradients = run(case, (old, advantage), mask=mask, clip=clip, backend=backend)
    torch.testing.assert_close(ours + gradients, exact + exact_gradients)
    taking_part = (case.target != -100) & mask
    assert rows_in_products["logits"] == taking_part.sum()
    with_gradient = taking_part & (advantage != 0)
    if clip is None or backend == "torch":
        with_gradient &= ours[4] == 0
        assert rows_in_products["hidden_gradient"] == rows_in_products["add_weight_gradient"] == with_gradient.sum() > 0


def test_loss_does_not_depend_on_packing(backend, device):
    """With a common normaliser, micro-batches in any order and of any size add up to the whole."""
    case = make_case(47, 24, 101, torch.float64, device)
    old, advantage, replayed = make_tokens(case)
    more = {"normalizer": 64.0, "entropy_coef": 0.01, "backend": backend}
    whole, gradients = run(case, (old, advantage), replayed=replayed, **more)
    order = torch.randperm(47, device=device)
    total = 0
    for part in order.split([1, 20, 0, 15, 11]):
        pick = (x[part] for x in (case.hidden, case.target, old, advantage, replayed))
        hidden, target, part_old, part_advantage, part_replayed = pick
        result = linear_policy_loss(
            hidden, case.weight, target, part_old, part_advantage, replayed=part_replayed, **more
        )
        torch.testing.assert_close(result.log_prob, whole[1][part])
        total = total + result.loss
    torch.testing.assert_close(total, whole[0])
    torch.testing.assert_close(case.gradients(total), gradients)


@pytest.mark.parametrize("terms", [{}, {"clip": None, "beta": None, "entropy_coef": 0.1}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_inf_stands_for_the_log_prob_of_the_present_policy(terms, dtype, backend, device):
    """Against float64 with the log-probs themselves in these places, fresh and replayed ones."""
    case = make_case(fewer_interpreted(100), 40, 211, dtype, device, bias=True)
    old, advantage, replayed = make_tokens(case)
    present = torch.rand(old.shape, device=device) < 0.6

    def call(some, name):
        known = some.log_prob(backend=name).log_prob.detach() if name == "reference" else torch.inf
        recorded = torch.where(present, known, old)
        result = some.policy_loss(recorded, advantage, replayed=replayed, backend=name, **terms)
        return list(result), some.gradients(result.loss)

    compare(call, case, backend)
    assert (call(case, backend)[0][3][present & (case.target >= 0)] == 1).all()
