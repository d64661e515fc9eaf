"""Softmaxes over allowed tokens against full logits that are -inf beside the sets, in float64."""

from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exgrpo.kernels import dispatch, reference

from . import support

TOKENS = 18 if support.INTERPRETING else 60
OPTIONS = [
    {},
    {"temperature": 0.6, "bias": True},
    {"softcap": 5.0, "temperature": torch.linspace(0.5, 2, TOKENS, dtype=torch.float64), "bias": True},
]
SIZES = {
    "few": (2, 8, 3, 1, 1, 5),
    "alone": (1,),
    "whole": (0,),
    "all words": (211,),
    "large": (100, 150),
    "every kind": (1, 0, 2, 211, 9, 1, 40, 17, 3),
}


@pytest.fixture(autouse=True)
def both_kinds(request, monkeypatch):
    """Of 211 words, sets of up to 13 are pairs and larger ones all logits, whatever is faster on a real head."""
    if "backend" in request.fixturenames:
        monkeypatch.setattr(dispatch.load(request.getfixturevalue("backend")), "ALLOWED_PART", 16)


def check(case: support.Case, backend: str, factor=2.0, entropy_coef=0.1):
    call = partial(support.both_functions, tokens=support.make_tokens(case), clip=None, entropy_coef=entropy_coef)
    support.compare(call, case, backend, factor=factor)


def allowed_case(sizes, dtype, device, tokens=TOKENS, width=40, vocabulary=211, **options) -> support.Case:
    return support.make_case(tokens, width, vocabulary, dtype, device, allowed_tokens=sizes, **options)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "plain")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_options(options, dtype, backend, device):
    check(allowed_case(SIZES["every kind"], dtype, device, **options), backend)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
def test_sizes(sizes, entropy_coef, backend, device):
    check(allowed_case(sizes, torch.float64, device, bias=True), backend, entropy_coef=entropy_coef)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype, backend, device):
    case = allowed_case(SIZES["every kind"], dtype, device, tokens=support.fewer_interpreted(240), width=507, bias=True)
    check(case, backend, factor=1.0)


def test_the_reference_is_a_softmax_over_the_set(device):
    case = allowed_case((3, 0, 1), torch.float64, device, tokens=3, ignored=False)
    found = case.log_prob(reference.linear_log_prob)
    logits = case.hidden @ case.weight.T
    ids = case.options["allowed_tokens"][0]
    own = logits[0, ids[:3].long()]
    torch.testing.assert_close(found.log_prob[0], logits[0, case.target[0]] - own.logsumexp(0))
    torch.testing.assert_close(found.log_prob[1], logits[1].log_softmax(0)[case.target[1]])
    torch.testing.assert_close(found.entropy[0], -(own.softmax(0) * own.log_softmax(0)).sum())
    assert found.log_prob[2] == found.entropy[2] == 0


@settings(max_examples=support.fewer_interpreted(24), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_sets(data, backend, device):
    vocabulary = data.draw(st.integers(1, 40), "vocabulary")
    tokens = data.draw(st.integers(0, 12), "tokens")
    sizes = data.draw(st.lists(st.integers(0, vocabulary), min_size=tokens, max_size=tokens), "sizes")
    torch.manual_seed(data.draw(st.integers(0, 9), "seed"))
    case = allowed_case(sizes or (0,), torch.float64, device, tokens, 7, vocabulary, ignored=data.draw(st.booleans()))
    if tokens and data.draw(st.booleans(), "all rows alike"):
        with torch.no_grad():
            case.hidden.copy_(case.hidden[:1].expand(tokens, -1))
        case.target.fill_(int(case.target[-1]))
        case.options["allowed_tokens"] = support.draw(case, [sizes[0]])
    check(case, backend)


def test_tokens_with_one_word(backend, device):
    """Exactly 0, whatever their hidden states are."""
    case = allowed_case((1, 4), torch.float32, device, ignored=False)
    with torch.no_grad():
        case.hidden[::2] = torch.inf
    found = case.log_prob(backend=backend)
    hidden, weight = case.gradients(found.log_prob.sum() + found.entropy.sum())
    assert not found.log_prob[::2].any()
    assert not found.entropy[::2].any()
    assert not hidden[::2].any()
    assert hidden[1::2].any(1).all()
    assert weight.isfinite().all()


def test_what_is_broken_shows(backend, device):
    """A word's weight in the tokens whose sets have it, be it their target or not."""
    case = allowed_case((3,), torch.float32, device, ignored=False)
    with torch.no_grad():
        case.weight[case.target[0], 0] = torch.nan
        log_prob, entropy = case.log_prob(backend=backend)
    ids, _ = case.options["allowed_tokens"]
    having = (ids == case.target[0]).view(-1, 3).any(1)
    assert torch.equal(log_prob.isnan(), having)
    assert torch.equal(entropy.isnan(), having)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_on_every_run(dtype, backend, device):
    case = allowed_case(SIZES["every kind"], dtype, device, tokens=support.fewer_interpreted(120), bias=True)
    case.hidden.data.copy_(case.hidden.data[:7].repeat(100, 1)[: len(case.hidden)])
    tokens = support.make_tokens(case)
    first, *others = (support.both_functions(case, backend, tokens) for _ in range(2 if support.INTERPRETING else 3))
    assert all(all(map(torch.equal, *pair)) for again in others for pair in zip(first, again, strict=True))


def test_many_chunks(backend, device, set_chunk):
    """What one chunk gives, up to the order of sums; and in little memory."""
    case = allowed_case(SIZES["every kind"], torch.float64, device, bias=True, temperature=0.7)
    tokens = support.make_tokens(case)
    whole = support.both_functions(case, backend, tokens)
    case.options["memory"] = 1 << 19
    torch.testing.assert_close(support.both_functions(case, backend, tokens), whole)
    del case.options["memory"]
    set_chunk(2000)
    torch.testing.assert_close(support.both_functions(case, backend, tokens), whole)


def test_left_out_tokens_may_lack_their_targets(backend, device):
    case = allowed_case((3,), torch.float64, device)
    ids = case.options["allowed_tokens"][0]
    mask = torch.arange(TOKENS, device=device) % 2 == 0
    target = case.target.view(-1)
    lacking = (~mask).nonzero().squeeze(1)
    ids.view(-1, 3)[lacking] = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
    target[lacking] = 5
    old, advantage, replayed = support.make_tokens(allowed_case((0,), torch.float64, device))
    more = {"replayed": replayed, "mask": mask}
    ours = case.policy_loss(old, advantage, backend=backend, **more)
    exact = case.policy_loss(old, advantage, function=reference.linear_policy_loss, **more)
    torch.testing.assert_close(ours.loss, exact.loss)


def test_autocast(backend, device):
    """Weights are rounded, and sums over the pairs of a word are not, however many they are."""
    case = allowed_case((0,), torch.float32, device, tokens=support.fewer_interpreted(300), width=8, ignored=False)
    case.target.fill_(5)
    case.options["allowed_tokens"] = support.draw(case, (2,))
    case.weight.data.copy_(case.weight.data.bfloat16())  # Triton's interpreter does not round to the nearest
    with torch.autocast(device.type, torch.bfloat16):
        ours = case.log_prob(backend=backend)
        gradients = case.gradients(ours.log_prob.sum())
    rounded = case.to(torch.bfloat16).to(torch.float64)
    exact = rounded.log_prob(reference.linear_log_prob)
    torch.testing.assert_close(ours.log_prob.double(), exact.log_prob, rtol=1e-4, atol=1e-4)
    for mine, true in zip(gradients, rounded.gradients(exact.log_prob.sum()), strict=True):
        assert support.relative_error(mine, true) < 1e-5


def wrong(allowed_tokens, target):
    """Sets with one thing wrong, and the error that says so."""
    ids, offsets = allowed_tokens[0].clone(), allowed_tokens[1].clone()
    own, first = int((ids[:3] == target[0]).nonzero()), offsets[:1]
    others = torch.tensor([word for word in range(9) if word != target[0]][:3], dtype=torch.int32)
    ascending, between = r"\[1\]: expected bounds ascending from 0 to 1", r"\[0\]: expected ids in \[0, 211\)"
    twice = torch.cat((ids[[own, own, own]], ids[3:]))
    yield ids, TypeError, r"allowed_tokens: expected a pair \(ids, offsets\) or None, got Tensor"
    yield (ids.long(), offsets), TypeError, r"allowed_tokens\[0\]: expected dtype torch.int32, got torch.int64"
    yield (ids, offsets.int()), TypeError, r"allowed_tokens\[1\]: expected dtype torch.int64, got torch.int3"
    yield (ids[:, None], offsets), ValueError, r"allowed_tokens\[0\]: expected shape \[M\]"
    yield (ids, offsets[:-1]), ValueError, r"allowed_tokens\[1\]: expected shape \[5\], got \[4\]"
    yield (ids, offsets[[0, 2, 1, 3, 4]]), ValueError, ascending
    yield (ids, offsets.clamp(min=1)), ValueError, ascending
    yield (ids[:-1], offsets), ValueError, ascending
    yield (ids.index_fill(0, first, -1), offsets), ValueError, between
    yield (ids.index_fill(0, first, 211), offsets), ValueError, between
    yield (twice, offsets), ValueError, r"allowed_tokens\[0\]: expected different ids in the set of each token; 2 of 12"
    yield (torch.cat((others, ids[3:])), offsets), ValueError, "target: expected ids among their allowed tokens; 1 of 4"


@pytest.mark.parametrize("name", ["auto", "reference"])
def test_wrong_sets(name):
    case = allowed_case((3,), torch.float32, torch.device("cpu"), tokens=4, ignored=False)
    for allowed_tokens, kind, message in list(wrong(case.options["allowed_tokens"], case.target)):
        case.options["allowed_tokens"] = allowed_tokens
        with pytest.raises(kind, match=message):
            case.log_prob(backend=name)
        with pytest.raises(kind, match=message):
            case.policy_loss(torch.zeros(4), torch.ones(4), backend=name)
