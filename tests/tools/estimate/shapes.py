"""Model shapes, hardware and small recipes for the tests of the estimate."""

import dataclasses

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from exgrpo.tools.estimate.parts import Assumptions, Hardware
from exgrpo.train.config.options import Config
from exgrpo.train.policy.shape import ModelShape, shape_of
from tests.train.configs import configured

ROWS, LENGTH = 2, 40
TOKENS = ROWS * LENGTH
VOCABULARY = 97

ASSUMED = Assumptions(
    prompt_tokens=16,
    response_tokens=20,
    success_rate=0.5,
    candidates=4,
    mfu=0.4,
    bandwidth_use=0.5,
    layer_launch=1e-4,
    engine_step=0.0,
    host_bandwidth=1e10,
)


HARDWARE = Hardware(gpus=2, memory=1e9, flops=1e12, bandwidth=1e12)
HARDWARE_OF_ONE = dataclasses.replace(HARDWARE, gpus=1)
SMALL = ModelShape(
    parameters=(97 * 64, *[64 * 64, 64 * 32, 64 * 32, 64 * 64, *[64 * 160] * 3, 64, 64] * 3, 64, 97 * 64),
    linear=3 * (64 * 64 * 2 + 64 * 32 * 2 + 64 * 160 * 3),
    layers=3,
    width=64,
    mlp=160,
    heads=4,
    kv_heads=2,
    head_width=16,
    vocabulary=97,
    tied=False,
    sides={
        **dict.fromkeys(("q_proj", "o_proj"), 3 * 128),
        **dict.fromkeys(("k_proj", "v_proj"), 3 * 96),
        **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), 3 * 224),
    },
)


def llama(*, tied=False, dtype=torch.float32, attention="sdpa", **changes):
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 160}
    sizes |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = LlamaConfig(**{**sizes, **changes}, tie_word_embeddings=tied, attn_implementation=attention)
    return LlamaForCausalLM(config).to(dtype).train()


def shape_like(model) -> ModelShape:
    return shape_of(model.config)


def recipe(**sections) -> Config:
    """A valid small recipe with some sections changed."""
    rollout = {"engine": "transformers", "max_tokens": 24, "batch_tokens": 400}
    return configured({"data": {"max_prompt_tokens": 16}, "rollout": rollout}, sections)


def sizes(items) -> dict[str, dict[str, float]]:
    return {item.name: dataclasses.asdict(item) for item in items}
