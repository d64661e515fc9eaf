"""Packed sequences give what padded ones do: log-probs, loss, gradients; and every sequence is in one pass."""

import copy
import dataclasses
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exgrpo.train.policy import layout
from exgrpo.train.policy.attention import PACKED, PACKED_FLASH
from exgrpo.train.policy.batch import TokenSequence, TrainingRow
from exgrpo.train.policy.layout import Packed, Padded
from exgrpo.train.policy.loss import LossTerms
from exgrpo.train.policy.model import PolicyModel
from tests.integrations import tiny

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
TERMS = LossTerms((0.2, 0.2), 0.1, False, 0.02, 13.0, 0.8)
PACKABLE = ["llama", "qwen2", "qwen3", "gemma3_text", "cohere", "granite", "mistral", "olmo2", "qwen3_moe"]


def row(rng, prompt, length):
    return TrainingRow(
        prompt,
        rng.integers(3, tiny.VOCABULARY, length).astype(np.int32),
        rng.normal(-4, 0.3, length).astype(np.float32),
        float(rng.normal()),
        bool(rng.integers(2)),
        rng.uniform(0.5, 1, length).astype(np.float32) if rng.integers(2) else None,
    )


def groups(rng, lengths, *, observing=False):
    """Rows of some prompts, in turn with each other."""
    prompts = [rng.integers(3, tiny.VOCABULARY, 1 + rng.integers(9)).astype(np.int32) for _ in range(3)]
    rows = [row(rng, prompts[i % 3], length) for i, length in enumerate(lengths)]
    if not observing:
        return rows
    return [dataclasses.replace(one, written=np.arange(len(one.response)) % 3 != 1) for one in rows]


def results(model, layout, rows, budget):
    """Log-probs and entropies by row, and the loss with its gradients, over all passes."""
    policy = PolicyModel(copy.deepcopy(model))
    scores, loss = {}, 0.0
    for of_rank in layout.plan(rows, budget, 1):
        for indices in of_rank:
            of_pass = [rows[i] for i in indices]
            with torch.no_grad():
                found = policy(layout.tokens(of_pass, CPU), 0.8)
            for i, place in zip(indices, layout.places(of_pass), strict=True):
                scores[i] = torch.stack([found.log_prob[place], found.entropy[place]])
            result = policy(layout.rows(of_pass, CPU), TERMS)
            result.loss.backward()
            loss += result.loss.detach()
    gradients = [parameter.grad for parameter in policy.parameters() if parameter.grad is not None]
    return [scores[i] for i in range(len(rows))], loss, gradients


def assert_same(found, expected):
    """Gradients to float32: transformers' norms compute in that, also those of a float64 model."""
    torch.testing.assert_close(found[:2], expected[:2], rtol=1e-9, atol=1e-10)
    for ours, exact in zip(found[2], expected[2], strict=True):
        assert (ours - exact).norm() <= 1e-6 * exact.norm()


def model_of(name):
    model = tiny.model(name).double()
    model.set_attn_implementation(PACKED)
    return model


@pytest.mark.parametrize("observing", [False, True])
@pytest.mark.parametrize("budget", [24, 10**6])
@pytest.mark.parametrize("name", PACKABLE)
def test_packed_is_padded(name, budget, observing):
    """In float64, up to the order of sums."""
    model = model_of(name)
    rows = groups(np.random.default_rng(0), [4, 1, 9, 2, 13, 1, 5, 8], observing=observing)
    assert_same(*(results(model, layout, rows, budget) for layout in (Packed(), Padded())))


def test_a_sliding_window_bounds_what_packed_tokens_see():
    model = model_of("mistral")
    rows = groups(np.random.default_rng(1), [9, 12, 3])
    whole, _, _ = results(model, Packed(), rows, 10**6)
    model.config.sliding_window = 3
    for layer in model.model.layers:
        layer.self_attn.sliding_window = 3
    packed, padded = (results(model, layout, rows, 10**6) for layout in (Packed(), Padded()))
    assert_same(packed, padded)
    assert (packed[0][0] - whole[0]).abs().max() > 1e-3


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 30)), max_size=40), st.integers(40, 200), st.integers(1, 4))
def test_every_sequence_is_in_one_pass_within_the_budget(shapes, budget, ranks):
    sequences = [TokenSequence(np.full(3 + q, q, np.int32), np.zeros(n, np.int32)) for q, n in shapes]
    plan = Packed().plan(sequences, budget, ranks)
    assert sorted(i for of_rank in plan for batch in of_rank for i in batch) == list(range(len(sequences)))
    assert len({len(of_rank) for of_rank in plan}) == 1
    for batch in (batch for of_rank in plan for batch in of_rank if batch):
        tensors = Packed().tokens([sequences[i] for i in batch], CPU)
        assert tensors.tokens.shape[1] <= budget
        assert len(tensors.target) == sum(len(sequences[i].response) for i in batch)


def test_a_prompt_is_read_once_and_tokens_stand_where_they_belong():
    prompt = np.array([7, 8, 9], np.int32)
    answers = [np.array(ids, np.int32) for ids in ([1, 2, 3], [4], [5, 6])]
    batch = Packed().tokens([TokenSequence(prompt, answer) for answer in answers], CPU)
    assert batch.tokens.tolist() == [[7, 8, 9, 1, 2, 5]]
    assert batch.target.tolist() == [1, 2, 3, 4, 5, 6]
    assert batch.segments.position.tolist() == [[0, 1, 2, 3, 4, 3]]
    assert batch.segments.source.tolist() == [2, 3, 4, 2, 2, 5]


def test_no_rows_weigh_nothing():
    batch = Packed().rows([], CPU)
    assert batch.segments is None
    assert (batch.target < 0).all()


def varlen(q, k, v, query_ends, key_ends, most_queries, most_keys, *, dropout_p, softmax_scale, causal, window_size):
    """What flash_attn_varlen_func is documented to compute, block by block; its causal mask is aligned at the end."""
    assert (causal, dropout_p) == (True, 0.0)
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
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * softmax_scale
        results.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values))
    return torch.cat(results)


@pytest.mark.parametrize("window", [None, 3])
def test_flash_attention_gets_the_same_segments(monkeypatch, window):
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=varlen))
    model = model_of("mistral")
    model.config.sliding_window = window
    for layer in model.model.layers:
        layer.self_attn.sliding_window = window
    rows = groups(np.random.default_rng(0), [4, 1, 9, 2, 13])
    expected = results(model, Packed(), rows, 10**6)
    model.set_attn_implementation(PACKED_FLASH)
    assert_same(results(model, Packed(), rows, 10**6), expected)


def test_long_answers_have_their_prompt_to_themselves(monkeypatch):
    monkeypatch.setattr(layout, "LONG", 8)
    model = model_of("llama")
    rows = groups(np.random.default_rng(0), [4, 9, 9, 2, 13, 8, 5, 8])
    packed, padded = (results(model, way, rows, 10**6) for way in (Packed(), Padded()))
    assert_same(packed, padded)
    read = sum(len(one.prompt) + len(one.response) - 1 for one in rows if len(one.response) >= 8)
    assert Packed().tokens([one for one in rows if len(one.response) >= 8], CPU).tokens.shape == (1, read)


def test_what_a_model_asks_of_attention_beyond_that_is_refused():
    """Gemma 2 caps the products; a policy with it pads its rows."""
    model = model_of("gemma2")
    rows = groups(np.random.default_rng(0), [4, 9])
    with pytest.raises(NotImplementedError, match="attention with softcap"):
        results(model, Packed(), rows, 10**6)
    results(model, Padded(), rows, 10**6)
