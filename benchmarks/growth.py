"""How the cost of a training step grows: models and questions of any size, and the fit.

The models are random ones that never end an answer, so every response has as many tokens as are asked for.
"""

import json
import math
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 4096
LAYERS = 4
PROMPT = 32
END = 0
"""The token that ends an answer; its logit is hopeless."""
STEADY = 8.0
"""A value that every hidden state has in its first place, whatever the token."""
STEADY_TIED = 4.0
"""That of models whose head is the embedding: it is a part of every logit, and large ones are coarse in bf16."""


@dataclass(frozen=True)
class Sizes:
    """What a training step is made of.

    Attributes:
        questions: per step.
        samples: answers to each.
        max_tokens: of every answer.
        width: of the model.
    """

    questions: int = 8
    samples: int = 4
    max_tokens: int = 64
    width: int = 128

    def asked(self) -> dict[str, int]:
        """What a turn of `benchmarks.training_step` takes; the width is that of its model."""
        return {name: value for name, value in vars(self).items() if name != "width"}


BASE = Sizes()
AXES = {
    "questions": (4, 8, 16, 32),
    "samples": (2, 4, 8, 16),
    "max_tokens": (32, 64, 128, 256),
    "width": (64, 128, 256, 512),
}
TITLES = {
    "questions": "number of questions",
    "samples": "group size",
    "max_tokens": "response length",
    "width": "model size",
}
LONGEST = max(AXES["max_tokens"])


def points(axis: str) -> dict[int, Sizes]:
    """The sizes along an axis, the others as in BASE, by what the axis counts (parameters for the width)."""
    sizes = (Sizes(**{**vars(BASE), axis: value}) for value in AXES[axis])
    return {parameters(one.width) if axis == "width" else getattr(one, axis): one for one in sizes}


def config_of(width: int) -> LlamaConfig:
    """A Llama of this width."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=LAYERS,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 32,
        max_position_embeddings=PROMPT + LONGEST,
        tie_word_embeddings=False,
        bos_token_id=END,
        eos_token_id=END,
        pad_token_id=END,
    )


def parameters(width: int) -> int:
    """How many the model has."""
    with torch.device("meta"):
        return LlamaForCausalLM(config_of(width)).num_parameters()


@torch.no_grad()
def write_model(config: LlamaConfig, folder: Path) -> None:
    """A random model with a tokenizer of whole words, one for each of its vocabulary.

    The first place of its hidden states is the same positive number for every token, since no layer writes there; the
    head reads it with a large negative weight for END alone. Where the head is the embedding, the other words have that
    number there, too, which moves all of their logits alike.

    Args:
        config: of a Llama; END has to end an answer.
        folder: for the files.
    """
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    tied = config.tie_word_embeddings
    model.model.embed_tokens.weight[:, 0] = STEADY_TIED if tied else STEADY
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0
        layer.mlp.down_proj.weight[0] = 0
    if tied:
        model.lm_head.weight[END, 0] = -STEADY_TIED
    else:
        model.lm_head.weight[:, 0] = 0
        model.lm_head.weight[END] = 0
        model.lm_head.weight[END, 0] = -100
    model.save_pretrained(folder)
    words = {"<end>": END, **{f"w{i}": i for i in range(1, config.vocab_size)}}
    tokens = Tokenizer(WordLevel(words, unk_token="w1"))
    tokens.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, eos_token="<end>", pad_token="<end>", bos_token="<end>"
    )
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(folder)


def questions_of(vocabulary: int, count: int = 4000) -> Iterator[dict[str, str]]:
    """Questions of PROMPT words of a vocabulary."""
    rng = random.Random(0)
    for _ in range(count):
        words = " ".join(f"w{rng.randrange(1, vocabulary)}" for _ in range(PROMPT))
        yield {"question": words, "answer": "w1"}


def write_questions(path: Path) -> None:
    """Questions for models of VOCABULARY, one object per line."""
    path.write_text("".join(json.dumps(one) + "\n" for one in questions_of(VOCABULARY)), encoding="utf-8")


def options(model: Path, questions: Path, output: Path) -> list[str]:
    """The options of training; the sizes come with each turn."""
    values = {
        "policy.path": model,
        "policy.dtype": "fp32",
        "policy.gradient_checkpointing": False,
        "data.train": questions,
        "data.chat": False,
        "data.prompt_format": "{question}",
        "data.max_prompt_tokens": PROMPT,
        "questions": BASE.questions,
        "reward.function": "benchmarks.coin:score",
        "rollout.engine": "transformers",
        "rollout.samples": BASE.samples,
        "rollout.max_tokens": LONGEST,
        "rollout.batch_tokens": 32768,
        "experience.ratio": 0.0,
        "optimizer.micro_batch_tokens": 4096,
        "output.folder": output,
        "output.name": "run",
    }
    return [str(part) for name, value in values.items() for part in (f"--{name}", value)]


def exponent(seconds: Mapping[int, float]) -> float:
    """The slope of log seconds against log size, by least squares: 1 where the cost grows as the size does."""
    sizes = [math.log(size) for size in seconds]
    return statistics.linear_regression(sizes, [math.log(value) for value in seconds.values()]).slope


def medians(seconds: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """The median of each size, in the order of sizes."""
    return {size: statistics.median(seconds[size]) for size in sorted(seconds)}
