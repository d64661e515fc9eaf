"""What is counted against what is really there: parameters, FLOPs, saved tensors, caches."""

import dataclasses

import numpy as np
import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, LlamaConfig

from exgrpo.train.common.errors import ModelError
from exgrpo.train.policy.flops import forward_flops
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


LONG, WINDOW = 40, 8
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
SIZES = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_routed_experts": 8, "n_group": 2, "topk_group": 1}
MODELS = {
    "llama, tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "wide heads": LlamaConfig(**SIZES, head_dim=24),
    "gpt2": transformers.GPT2Config(vocab_size=97, n_embd=64, n_layer=3, n_head=4, bos_token_id=1, eos_token_id=2),
    "mixtral": transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **SIZES, moe_intermediate_size=48, num_experts=8, num_experts_per_tok=2, head_dim=16
    ),
    "deepseek_v3": transformers.DeepseekV3Config(
        **SIZES | LATENT | EXPERTS | {"num_key_value_heads": 4, "first_k_dense_replace": 1}
    ),
}


def built(config):
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).train()


def masked(flops, tokens):
    """What eager attention of these tokens to one another computes and then masks."""
    return 2 * flops.heads * flops.head_width * flops.layers * tokens**2


@pytest.mark.parametrize("name", MODELS)
def test_a_forward_pass_and_its_backward_pass(name):
    model = built(MODELS[name])
    flops = forward_flops(model)
    with FlopCounterMode(display=False) as forward:
        loss = model(torch.randint(0, 97, (1, LONG))).logits.sum()
    counted = flops.decoder_flops(LONG) + flops.head_flops(LONG) + masked(flops, LONG)
    assert forward.get_total_flops() == counted
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert backward.get_total_flops() == 2 * counted


@torch.no_grad()
def test_tokens_behind_a_prompt_take_the_difference():
    model = built(MODELS["llama, tied"])
    flops = forward_flops(model)
    prompt = model(torch.randint(0, 97, (1, 30)), use_cache=True)
    with FlopCounterMode(display=False) as counter:
        model(torch.randint(0, 97, (1, 10)), past_key_values=prompt.past_key_values)
    needed = flops.decoder_flops(40) - flops.decoder_flops(30) + flops.head_flops(10)
    assert counter.get_total_flops() == needed + masked(flops, 10)


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (transformers.MistralConfig(**SIZES, sliding_window=WINDOW), 3),
        (transformers.Gemma3TextConfig(**SIZES, head_dim=16, sliding_window=WINDOW, layer_types=KINDS), 2),
        (transformers.MistralConfig(**SIZES, sliding_window=None), 0),
    ],
)
def test_windows_bound_what_a_token_attends_to(config, windows):
    with torch.device("meta"):
        flops = forward_flops(built(config))
    assert flops.windows == (WINDOW,) * windows
    # Half of a square is half of its diagonal too; behind a full window there is no diagonal.
    reach = [[min(i, WINDOW if layer < windows else i) for i in range(LONG)] for layer in range(3)]
    pairs = sum(map(sum, reach)) + 3 * LONG / 2 - windows * (LONG - WINDOW) / 2
    expected = 2 * flops.linear * LONG + 4 * 4 * 16 * pairs
    assert flops.decoder_flops(LONG) == expected


def test_a_configuration_without_attention_counts_its_matrices():
    config = transformers.MambaConfig(vocab_size=97, hidden_size=64, num_hidden_layers=2, state_size=4)
    with torch.device("meta"):
        flops = forward_flops(AutoModelForCausalLM.from_config(config))
    assert flops.decoder_flops(LONG) == 2 * flops.linear * LONG > 0
