"""Packed sequences give what padded ones do: log-probs, loss, gradients; and every sequence is in one pass."""

import copy
from itertools import takewhile

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exgrpo.train.common.records import SHARED, AllowedTokens, Rollout, shared_prefix
from exgrpo.train.common.step_batch import StepBatch
from exgrpo.train.config.objective import MethodOptions
from exgrpo.train.policy import attention, layout
from exgrpo.train.policy.attention import PACKED
from exgrpo.train.policy.layout import Packed, Padded
from exgrpo.train.policy.loss import LossTerms
from exgrpo.train.policy.model import PolicyModel
from exgrpo.train.policy.segments import Lookup
from tests.integrations import tiny
from tests.train.batches import sets

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
TERMS = LossTerms(MethodOptions(temperature=0.8), 13.0, 0.02)
PACKABLE = ["llama", "qwen2", "qwen3", "gemma3_text", "cohere", "granite", "mistral", "olmo2", "qwen3_moe"]


def rows(rng, lengths, *, observing=False, shared=0):
    """Rows of some prompts, in turn with each other; where they observe, some tokens come from two words."""
    begin = np.arange(shared, dtype=np.int32) % tiny.VOCABULARY
    prompts = [rng.integers(3, tiny.VOCABULARY, 1 + rng.integers(9)).astype(np.int32) for _ in range(3)]
    prompts = [np.concatenate([begin, prompt]) for prompt in prompts]
    responses = [rng.integers(3, tiny.VOCABULARY, length).astype(np.int32) for length in lengths]
    written = [np.arange(length) % 3 != 1 if observing else None for length in lengths]
    rollouts = []
    for response, own in zip(responses, written, strict=True):
        words = AllowedTokens.from_lists(sets(response * own)) if observing else None
        rollouts.append(Rollout(response, True, response_mask=own, allowed_tokens=words))
    batch = StepBatch.from_answers([prompts[i % 3] for i in range(len(lengths))], rollouts)
    batch.fill(
        replayed=rng.integers(2, size=len(lengths)),
        advantage=rng.normal(size=len(lengths)),
        ratio_log_prob=rng.normal(-4, 0.3, len(batch.token)),
        factor=np.where(batch.by_token(rng.integers(2, size=len(lengths))), rng.uniform(0.5, 1, len(batch.token)), 1),
    )
    return batch


def results(model, layout, batch, budget):
    """[2, T] log-probs and entropies, and the loss with its gradients, over all passes."""
    policy = PolicyModel(copy.deepcopy(model))
    scores, loss = torch.zeros(2, len(batch.token), dtype=model.dtype), 0.0
    for of_rank in layout.plan(batch, budget, 1):
        for numbers in of_rank:
            of_pass = batch.take(np.array(numbers))
            with torch.no_grad():
                found = policy(layout.tokens(of_pass, CPU), 0.8)
            stacked = torch.stack([found.log_prob, found.entropy]).flatten(1)
            scores[:, batch.places(np.array(numbers))] = stacked[:, layout.places(of_pass)]
            result = policy(layout.rows(of_pass, CPU), TERMS)
            result.loss.backward()
            loss += result.loss.detach()
    gradients = [parameter.grad for parameter in policy.parameters() if parameter.grad is not None]
    return scores, loss, gradients


def assert_same(found, expected):
    """Gradients to float32: transformers' norms compute in that, also those of a float64 model."""
    torch.testing.assert_close(found[:2], expected[:2], rtol=1e-9, atol=1e-10)
    for ours, exact in zip(found[2], expected[2], strict=True):
        assert (ours - exact).norm() <= 1e-6 * exact.norm()


def model_of(name):
    model = tiny.model(name).double()
    model.set_attn_implementation(PACKED)
    return model


def slide(model, window):
    model.config.sliding_window = window
    for layer in model.model.layers:
        layer.self_attn.sliding_window = window


@pytest.mark.parametrize(("budget", "observing", "shared"), [(24, False, 0), (10**6, True, 0), (150, False, SHARED)])
@pytest.mark.parametrize("name", PACKABLE)
def test_packed_is_padded(name, budget, observing, shared):
    """In float64, up to the order of sums."""
    model = model_of(name)
    batch = rows(np.random.default_rng(0), [4, 1, 9, 2, 13, 1, 5, 8], observing=observing, shared=shared)
    assert_same(*(results(model, layout, batch, budget) for layout in (Packed(), Padded())))


@pytest.mark.parametrize("shared", [0, SHARED])
def test_a_sliding_window_bounds_what_packed_tokens_see(shared):
    model = model_of("mistral")
    batch = rows(np.random.default_rng(1), [9, 12, 3], shared=shared)
    whole, _, _ = results(model, Packed(), batch, 10**6)
    slide(model, 3)
    packed, padded = (results(model, layout, batch, 10**6) for layout in (Packed(), Padded()))
    assert_same(packed, padded)
    assert (packed[0][:, :9] - whole[:, :9]).abs().max() > 1e-3


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 30)), max_size=40), st.integers(40, 200), st.integers(1, 4))
def test_every_sequence_is_in_one_pass_within_the_budget(shapes, budget, ranks):
    batch = StepBatch.from_answers(
        [np.full(3 + q, q, np.int32) for q, _ in shapes], [Rollout(np.zeros(n, np.int32), True) for _, n in shapes]
    )
    plan = Packed().plan(batch, budget, ranks)
    assert sorted(i for of_rank in plan for numbers in of_rank for i in numbers) == list(range(len(shapes)))
    assert len({len(of_rank) for of_rank in plan}) == 1
    for numbers in (numbers for of_rank in plan for numbers in of_rank if numbers):
        tensors = Packed().tokens(batch.take(np.array(numbers)), CPU)
        assert tensors.tokens.shape[1] <= budget
        assert len(tensors.target) == sum(shapes[i][1] for i in numbers)


@given(
    st.integers(0, 2 * SHARED), st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=2, max_size=5)
)
def test_all_prompts_go_on_behind_what_they_share(length, rests):
    """Also where one prompt is the beginning of another, or its equal."""
    prompts = [[7] * length + rest for rest in rests]
    alike = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*prompts, strict=False)))
    common = min(alike, min(map(len, prompts)) - 1)
    assert shared_prefix([np.array(prompt, np.int32) for prompt in prompts]) == (common if common >= SHARED else 0)


def test_what_prompts_begin_with_is_read_once():
    begin = np.arange(SHARED, dtype=np.int32)
    asked = [np.concatenate([begin, own]).astype(np.int32) for own in ([7, 8], [9], [9])]
    answers = [Rollout(np.array(ids, np.int32), True) for ids in ([1, 2, 3], [4], [5, 6])]
    tensors = Packed().tokens(StepBatch.from_answers(asked, answers), CPU)
    own = tensors.tokens[0, SHARED:].tolist()
    assert (tensors.tokens[0, :SHARED].tolist(), own) == (begin.tolist(), [7, 8, 1, 2, 9, 5])
    assert (tensors.segments.position[0, SHARED:] - SHARED).tolist() == [0, 1, 2, 3, 0, 1]
    assert (tensors.segments.source.index - SHARED).tolist() == [1, 2, 3, 4, 4, 5]
    assert [bucket.causal for bucket in tensors.segments.buckets] == [True, False]  # it pads none of the others
    fewer = StepBatch.from_answers([prompt[1:] for prompt in asked], answers)
    assert Packed().tokens(fewer, CPU).tokens.shape[1] == 2 * (SHARED - 1) + len(own)


def of_torch(q, k, v, query_ends, key_ends, most_queries, most_keys, *, scale, window_size, enable_gqa=False):
    """What varlen_attn is documented to compute, block by block; its causal mask is aligned at the end."""
    assert window_size[1] == 0
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    results = []
    for i in range(len(query_ends) - 1):
        rows, seen = slice(query_ends[i], query_ends[i + 1]), slice(key_ends[i], key_ends[i + 1])
        queries, keys, values = q[rows], k[seen], v[seen]
        assert len(queries) <= most_queries
        assert len(keys) <= most_keys
        keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (keys, values))
        at = torch.arange(len(queries))[:, None] + len(keys) - len(queries)
        distance = at - torch.arange(len(keys))
        hidden = distance < 0
        if window_size[0] >= 0:
            hidden |= distance > window_size[0]
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
        results.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values))
    return torch.cat(results)


@pytest.mark.parametrize("shared", [0, SHARED])
@pytest.mark.parametrize("window", [None, 3])
def test_attention_of_variable_lengths_gets_the_same_segments(window, shared, monkeypatch):
    model = model_of("mistral")
    slide(model, window)
    batch = rows(np.random.default_rng(0), [4, 1, 9, 2, 13], shared=shared)
    expected = results(model, Packed(), batch, 10**6)
    monkeypatch.setattr(attention, "varlen", of_torch)
    monkeypatch.setattr(attention, "_variable_lengths", lambda *_: True)
    assert_same(results(model, Packed(), batch, 10**6), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_gradient_of_a_lookup_is_a_sum_in_fp32(dtype):
    """That of plain torch to the bit in fp32; in 16 bits one rounding of the sum, to a nearest number."""
    generator = torch.Generator().manual_seed(0)
    index = torch.cat([torch.randint(30, (9, 40), generator=generator), torch.arange(36).view(9, 4)], 1)
    states = torch.randn(40, 24, generator=generator).to(dtype).requires_grad_()
    taken = Lookup(index, 40)(states)
    assert torch.equal(taken, torch.nn.functional.embedding(index, states))
    gradient = torch.randn(taken.shape, generator=generator).to(dtype)
    (found,) = torch.autograd.grad(taken, states, gradient)
    sums = torch.zeros(40, 24).requires_grad_()
    (plain,) = torch.autograd.grad(torch.nn.functional.embedding(index, sums), sums, gradient.float())
    assert torch.equal((found - plain).abs(), (plain.to(dtype) - plain).abs())
    assert not found[36:].any()


@pytest.mark.parametrize("shared", [0, SHARED])
def test_long_answers_have_their_prompt_to_themselves(shared, monkeypatch):
    monkeypatch.setattr(layout, "LONG", 8)
    model = model_of("llama")
    batch = rows(np.random.default_rng(0), [9, 4, 9, 2, 13, 8, 5, 8], shared=shared)
    packed, padded = (results(model, way, batch, 10**6) for way in (Packed(), Padded()))
    assert_same(packed, padded)
    long = batch.take(batch.length >= 8)
    read = sum(len(long.prompt[group]) for group in long.group) + (long.length - 1).sum()
    assert Packed().tokens(long, CPU).tokens.shape == (1, read)
    for budget in range(21 + shared, 60 + 4 * shared):
        for numbers in Packed().plan(batch, budget, 1)[0]:
            assert Packed().tokens(batch.take(np.array(numbers)), CPU).tokens.shape[1] <= budget


def test_what_a_model_asks_of_attention_beyond_that_is_refused():
    """Gemma 2 caps the products; a policy with it pads its rows."""
    model = model_of("gemma2")
    batch = rows(np.random.default_rng(0), [4, 9])
    with pytest.raises(NotImplementedError, match="attention with softcap"):
        results(model, Packed(), batch, 10**6)
    model.set_attn_implementation("eager")  # since transformers 5.21 that of padded rows refuses it, too
    results(model, Padded(), batch, 10**6)
