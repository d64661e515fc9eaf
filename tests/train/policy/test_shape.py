"""What is counted against what is really there: parameters, FLOPs, saved tensors, caches."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import AutoConfig, DynamicCache

from exgrpo.train.common.errors import ModelError
from exgrpo.train.policy.segments import Block, segments
from exgrpo.train.policy.shape import shape_of
from tests.train.shapes import LENGTH, PUBLISHED, ROWS, SMALL, TOKENS, VOCABULARY, llama, shape_like


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_the_built_model(tied):
    model = llama(tied=tied)
    shape = shape_like(model)
    assert shape.total == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "parameters"), [("1.5B", 1_543_714_304), ("7B", 7_615_616_512), ("8B", 8_030_261_248)]
)
def test_parameters_of_published_models_are_the_published_ones(name, parameters):
    assert PUBLISHED[name]().total == parameters


@pytest.mark.parametrize(
    ("values", "named"),
    [({"model_type": "gpt2"}, "'gpt2' has no intermediate_size"), ({"model_type": "mixtral"}, "a mixture of experts")],
)
def test_a_configuration_that_cannot_be_counted_is_refused(values, named):
    with pytest.raises(ModelError, match=named):
        shape_of(AutoConfig.for_model(**values))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cache_takes_what_a_real_one_does(dtype):
    model = llama(dtype=dtype).eval()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.randint(0, VOCABULARY, (ROWS, LENGTH)), past_key_values=cache, use_cache=True)
    real = sum(t.numel() * t.itemsize for layer in cache.layers for t in (layer.keys, layer.values))
    assert TOKENS * shape_like(model).kv_bytes(dtype.itemsize) == real


@pytest.mark.parametrize(("prompt", "answer", "answers"), [(1024, 2047, 8), (64, 80, 8), (512, 1024, 8)])
@pytest.mark.parametrize("law", ["longest", "uniform", "exponential"])
def test_packed_attention_holds_no_more_than_is_counted(law, prompt, answer, answers):
    """The rows that a pass of 16 groups really gathers; one of fewer groups and very unequal lengths may take more."""
    rng = np.random.default_rng(0)

    def drawn(most):
        uniform, exponential = int(rng.integers(1, most + 1)), int(np.clip(rng.exponential(most / 4), 1, most))
        return {"longest": most, "uniform": uniform, "exponential": exponential}[law]

    blocks, tokens = [], 0
    for _ in range(16):
        before = Block(tokens, drawn(prompt))
        blocks.append(before)
        tokens += before.length
        for _ in range(answers):
            blocks.append(Block(tokens, drawn(answer), before))
            tokens += blocks[-1].length
    held, of_heads = 0, 12 * 128
    for bucket in segments(blocks, np.zeros(1, np.int64), torch.device("cpu")).buckets:
        queries, keys = bucket.query.index.numel(), bucket.key.index.numel()
        held += 2 * of_heads * (queries + keys) + (0 if bucket.causal else queries * bucket.key.index.shape[1])
    shape = dataclasses.replace(SMALL, heads=12, kv_heads=2, head_width=128)
    seen = (prompt + answers * (prompt + answer)) / (prompt + answers * answer)
    counted = shape.packed_bytes(1, seen, prompt + answer) + 128 * (12 + 2 * 2)
    assert held <= tokens * counted <= 2.5 * held


def saved_for_backward(model) -> int:
    """Bytes of the storages that a forward pass of the decoder saves, weights aside."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = (storage.nbytes(), tensor)  # alive, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = model.get_decoder()(torch.randint(0, VOCABULARY, (ROWS, LENGTH)), use_cache=False).last_hidden_state
    assert result.requires_grad
    return sum(size for size, _ in saved.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_activations_are_the_tensors_saved_for_the_backward_pass(dtype, kv_heads):
    """To the byte, but for cosines and sines, which all layers and rows share.

    With checkpointing these are each layer's input, and what the last norm saves. Eager attention saves its
    probabilities, within 5 %: small tensors of a layer beside them are not listed one by one.
    """
    model = llama(dtype=dtype, num_key_value_heads=kv_heads)
    shape = shape_like(model)
    rotary = 2 * LENGTH * shape.head_width * dtype.itemsize
    assert saved_for_backward(model) == TOKENS * shape.saved_bytes(dtype.itemsize, checkpointing=False) + rotary
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert saved_for_backward(model) == TOKENS * shape.saved_bytes(dtype.itemsize, checkpointing=True)
    eager = llama(dtype=dtype, num_key_value_heads=kv_heads, attention="eager")
    counted = TOKENS * shape.saved_bytes(dtype.itemsize, checkpointing=False, eager_length=LENGTH)
    assert saved_for_backward(eager) == pytest.approx(counted, rel=0.05)
