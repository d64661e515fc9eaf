"""A tiny random model and a batch of mixed groups, made the same in every process."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from transformers import AutoModelForCausalLM, GraniteConfig, LlamaConfig

from exgrpo.train.common.functions import Needs
from exgrpo.train.common.records import Rollout, TokenIds
from exgrpo.train.common.seeds import derive_seed
from exgrpo.train.common.step_batch import StepBatch
from exgrpo.train.config.objective import SURROGATES
from exgrpo.train.config.options import Config, ObjectiveConfig, RolloutConfig
from exgrpo.train.policy.batch import MiniBatch, build_minibatches
from exgrpo.train.policy.scores import Reference
from exgrpo.train.policy.source import find_model
from exgrpo.train.policy.tokenizer import DTYPES
from exgrpo.train.replay.groups import fill_advantages
from exgrpo.train.rollout.engine import EngineSettings, RolloutEngine, Sampling, collect
from tests.train.asking import requests_for
from tests.train.batches import Row, make_batch
from tests.train.configs import configured

VOCABULARY = 97
STEPS = 3
LEARNING_RATE = 1e-3
OPTIMIZER = {"lr": LEARNING_RATE, "micro_batch_tokens": 70, "weight_decay": 0.01, "minibatches": 1}
SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SHAPE |= {"initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def save_model(
    folder: Path, *, tied: bool, heads: int = 4, head_width: int | None = None, logits_scaling: float | None = None
) -> None:
    """A Llama, or, where the logits are divided by a number, a Granite."""
    torch.manual_seed(0)
    kind, more = (LlamaConfig, {}) if logits_scaling is None else (GraniteConfig, {"logits_scaling": logits_scaling})
    of_heads = {"num_attention_heads": heads, "num_key_value_heads": -(-heads // 2), "head_dim": head_width}
    config = kind(**SHAPE, **of_heads, **more, tie_word_embeddings=tied)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def allow_fp16() -> None:
    """Have DeepSpeed compute in fp16 on any CPU: PyTorch does, by plain loops if it must."""
    get_accelerator().is_fp16_supported = lambda: True


def prompt(question: int) -> TokenIds:
    return np.random.default_rng(question).integers(3, VOCABULARY, 3 + question % 5).astype(np.int32)


def engine_settings(
    folder: Path, dtype: str = "fp32", *, eos: tuple[int, ...] = (2, 5), pad: int = 0, prompt_tokens: int = 8, **rollout
) -> EngineSettings:
    """Return settings of an engine for the model in a folder, with default options of `rollout` for the rest."""
    source = find_model(str(folder))
    return EngineSettings(source, DTYPES[dtype], eos, pad, prompt_tokens, RolloutConfig(**rollout))


def rollouts(
    engine: RolloutEngine, prompts: list[TokenIds], counts: list[int], sampling: Sampling, seed: int
) -> list[list[Rollout]]:
    """All answers of an engine, by prompt."""
    seeds = [derive_seed(seed, "prompt", i) for i in range(len(prompts))]
    asked = requests_for(prompts, counts, sampling, seeds)
    return collect(asked, engine.generate(asked))


def row(
    rng: np.random.Generator,
    reward: float,
    *,
    replayed: bool = False,
    observing: bool = False,
    allowed_tokens: bool = False,
) -> Row:
    length = int(rng.integers(1, 24))
    response = rng.integers(2, VOCABULARY, length)
    # Near enough to the random policy for ratios on both sides of the clip range, far enough to be clipped.
    log_prob = (-4.5 + rng.normal(0, 1.0, length)).astype(np.float32)
    own = np.ones(length, bool)
    if observing:
        own = rng.random(length) < 0.6
        own[rng.integers(length)] = True
    sets = None
    if allowed_tokens:  # of 1 to 20 words, or of all
        sizes = rng.choice([0, 1, 2, 5, 20], length)
        words = [[token, *rng.permutation(np.setdiff1d(np.arange(VOCABULARY), token))] for token in response]
        sets = [of_token[:size] for of_token, size in zip(words, sizes * own, strict=True)]
        log_prob *= np.log1p(np.where(sizes, sizes - 1, VOCABULARY)) / 4.5
    return Row(
        reward, response, np.where(own, log_prob, np.float32(0)), replayed, response_mask=own, allowed_tokens=sets
    )


def step_batch(**of_rows: bool) -> StepBatch:
    """Seven groups of four: on-policy and mixed ones, one all right, one all wrong; or with what `row` can do."""
    rng = np.random.default_rng(1)
    rewards = [(1, 0, 0, 1), (0, 1, 0, 0), (1, 1, 1, 1), (0, 0, 0, 0), (1, 0, 1), (0, 0, 0), (0, 1, 1)]
    groups = []
    for question, of_group in enumerate(rewards):
        fresh = [row(rng, reward, **of_rows) for reward in of_group]
        replayed = [row(rng, 1.0, replayed=True, **of_rows) for _ in range(4 - len(fresh))]
        groups.append((question, fresh + replayed))
    batch = make_batch(groups, loss_mask=np.ones(28, bool))
    batch.fill(prompt=[prompt(question) for question in batch.question])
    return batch


def minibatches(objective: ObjectiveConfig, reference: Reference | None = None, **of_rows: bool) -> list[MiniBatch]:
    batch = step_batch(**of_rows)
    fill_advantages(batch, objective)
    batch.fill(ratio_log_prob=batch.old_log_prob)
    if reference:
        reference.fill(batch)
    all_rows = Needs.of(SURROGATES.find(objective.surrogate)).all_rows
    return build_minibatches(batch, STEPS, np.random.default_rng(2), objective, max_tokens=24, all_rows=all_rows)


def poisoned(minibatch: MiniBatch) -> MiniBatch:
    """The same mini-batch with one advantage that is not a number."""
    batch = minibatch.batch.take(np.arange(len(minibatch.batch)))
    batch.advantage[0] = np.nan
    return dataclasses.replace(minibatch, batch=batch)


def config(
    folder: Path,
    objective: ObjectiveConfig,
    *,
    dtype: str = "fp32",
    checkpointing: bool = False,
    compile: str = "none",
    temperature: float = 1.0,
    optimizer: Mapping[str, object] | None = None,
    lora: Mapping[str, object] | None = None,
) -> Config:
    policy = {"path": str(folder), "dtype": dtype, "gradient_checkpointing": checkpointing, "compile": compile}
    # Nothing is small enough to stay whole: every parameter is partitioned.
    distributed = {"persistence_threshold": 0, "timeout_minutes": 2}
    sections = {"policy": policy, "objective": objective, "lora": lora or {}, "distributed": distributed}
    sections |= {"data": {"max_prompt_tokens": 8}, "rollout": {"max_tokens": 24, "temperature": temperature}}
    return configured(sections, steps=STEPS, optimizer=OPTIMIZER | (optimizer or {}))
