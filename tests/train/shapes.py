"""Shapes of small and of published models, and small recipes, for tests of memory and FLOPs."""

import dataclasses

import torch
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from exgrpo.train.config.options import Config
from exgrpo.train.policy.shape import ModelShape, shape_of
from tests.train.configs import configured

ROWS, LENGTH = 2, 40
TOKENS = ROWS * LENGTH
VOCABULARY = 97

SIDES = dict.fromkeys(("q_proj", "o_proj"), 3 * 128) | dict.fromkeys(("k_proj", "v_proj"), 3 * 96)
SIDES |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), 3 * 224)
NUMBERS = {"layers": 3, "width": 64, "mlp": 160, "heads": 4, "kv_heads": 2, "head_width": 16, "vocabulary": 97}
SMALL = ModelShape(
    parameters=(97 * 64, *[64 * 64, 64 * 32, 64 * 32, 64 * 64, *[64 * 160] * 3, 64, 64] * 3, 64, 97 * 64),
    linear=3 * (64 * 64 * 2 + 64 * 32 * 2 + 64 * 160 * 3),
    sides=SIDES,
    **NUMBERS,
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


def published(family, width, mlp, layers, heads, vocabulary, **changes) -> ModelShape:
    """Return the shape of a published model from its config.json; `heads` of queries, and of keys and values."""
    sizes = {"hidden_size": width, "intermediate_size": mlp, "num_hidden_layers": layers, "vocab_size": vocabulary}
    sizes |= {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "tie_word_embeddings": False}
    return shape_of(AutoConfig.for_model(family, **sizes | changes))


PUBLISHED = {
    "1.5B": lambda: published("qwen2", 1536, 8960, 28, (12, 2), 151936, tie_word_embeddings=True),
    "3B": lambda: published("qwen2", 2048, 11008, 36, (16, 2), 151936, tie_word_embeddings=True),
    "7B": lambda: published("qwen2", 3584, 18944, 28, (28, 4), 152064),
    "8B": lambda: published("llama", 4096, 14336, 32, (32, 8), 128256),
}
"""Qwen2.5, and Llama 3.1."""
