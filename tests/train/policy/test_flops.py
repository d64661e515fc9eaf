"""FLOPs by formula against those that PyTorch counts in passes through real models."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen3MoeConfig,
)

from exgrpo.train.policy.flops import forward_flops

LENGTH, WINDOW = 40, 8
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {
    "llama, tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "wide heads": LlamaConfig(**SIZES, head_dim=24),
    "gpt2": GPT2Config(vocab_size=97, n_embd=64, n_layer=3, n_head=4, bos_token_id=1, eos_token_id=2),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, moe_intermediate_size=48, num_experts=8, num_experts_per_tok=2, head_dim=16),
    "deepseek_v3": DeepseekV3Config(
        **SIZES | {"num_key_value_heads": 4},
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
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
        loss = model(torch.randint(0, 97, (1, LENGTH))).logits.sum()
    counted = flops.decoder_flops(LENGTH) + flops.head_flops(LENGTH) + masked(flops, LENGTH)
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
        (MistralConfig(**SIZES, sliding_window=WINDOW), 3),
        (Gemma3TextConfig(**SIZES, head_dim=16, sliding_window=WINDOW, layer_types=KINDS), 2),
        (MistralConfig(**SIZES, sliding_window=None), 0),
    ],
)
def test_windows_bound_what_a_token_attends_to(config, windows):
    with torch.device("meta"):
        flops = forward_flops(built(config))
    assert flops.windows == (WINDOW,) * windows
    # Half of a square is half of its diagonal too; behind a full window there is no diagonal.
    reach = [[min(i, WINDOW if layer < windows else i) for i in range(LENGTH)] for layer in range(3)]
    pairs = sum(map(sum, reach)) + 3 * LENGTH / 2 - windows * (LENGTH - WINDOW) / 2
    expected = 2 * flops.linear * LENGTH + 4 * 4 * 16 * pairs
    assert flops.decoder_flops(LENGTH) == expected


def test_a_configuration_without_attention_counts_its_matrices():
    config = MambaConfig(vocab_size=97, hidden_size=64, num_hidden_layers=2, state_size=4)
    with torch.device("meta"):
        flops = forward_flops(AutoModelForCausalLM.from_config(config))
    assert flops.decoder_flops(LENGTH) == 2 * flops.linear * LENGTH > 0
