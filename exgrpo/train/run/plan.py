"""Plan the GPU memory of a run at its start: choose options that are not set and that memory limits.

These are activation checkpointing, the tokens of a pass, and of vLLM in the process the cache and if it sleeps. The
plan takes the fastest values that fit by the prediction of `exgrpo.train.run.memory`.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from exgrpo.train.common.distributed import World
from exgrpo.train.common.errors import ConfigError, ModelError
from exgrpo.train.common.limits import RESERVED_GIB
from exgrpo.train.config.options import PLANNED, Config
from exgrpo.train.config.recipe import changed
from exgrpo.train.config.section import flat
from exgrpo.train.policy.shape import ModelShape, shape_of
from exgrpo.train.policy.source import ModelSource
from exgrpo.train.policy.tokenizer import DTYPES
from exgrpo.train.rollout.vllm.engine import GIB, MOST_SEQUENCES, sequence_bytes
from exgrpo.train.run.memory import MOMENTS, MemoryItem, answers_of_rank, engine_of, gpu_memory, peak, slots

CHECKPOINTING, PASS, CACHE, SLEEP = PLANNED
GENERATING, TRAINING = MOMENTS[:1], MOMENTS[1:]
"""Moments of the engine, which may sleep, and of the trainer."""
ENOUGH_TOKENS = 8192
"""Tokens of a pass above which keeping activations gains more speed than longer passes: matrix products and the
gathering of weights are at full speed."""
MOST_TOKENS, STEP_TOKENS = 32768, 1024
"""Tokens of a pass above which nothing is gained, and the step size of its candidates."""
ENOUGH_SEQUENCES = 256
"""Maximum of concurrent answers for which an engine that never sleeps takes memory from the trainer."""
STEP_GIB = 0.25
"""Step size of the cache's candidates."""


@dataclass(frozen=True)
class MemoryPlan:
    """Memory plan of a run.

    Attributes:
        config: configuration with values chosen for options that were not set.
        chosen: dotted keys of the chosen options.
        items: predicted allocations of a rank on its GPU, in bytes.
        available: bytes of a GPU that tensors may take.
        rows: concurrent answers of a rank, with prompts of maximum length.
    """

    config: Config
    chosen: tuple[str, ...]
    items: tuple[MemoryItem, ...]
    available: float
    rows: int

    @property
    def moment(self) -> str:
        """The one of `MOMENTS` with the highest peak."""
        return max(MOMENTS, key=lambda moment: peak(self.items, moment))

    @property
    def fits(self) -> bool:
        """True if the prediction fits at every moment."""
        return peak(self.items, self.moment) <= self.available

    def __str__(self) -> str:
        config = self.config
        how = "with" if config.policy.checkpointing else "without"
        cache = ""
        if engine_of(config) == "vllm":
            cache = f", a cache of {config.rollout.kv_cache_gib:g} GiB for {self.rows} answers at once"
            cache += " in an engine that never sleeps" if _awake(config) else ""
        taken, there = peak(self.items, self.moment) / GIB, self.available / GIB
        return (
            f"memory plan: passes of {config.pass_tokens} tokens {how} activation checkpointing"
            f"{cache}. At most {taken:.1f} of {there:.1f} GiB are taken, at the moment "
            f"{self.moment}, as predicted" + ("" if self.fits else ": this does not fit, and may run out of memory")
        )

    def check(self) -> None:
        """Check that chosen values fit; values that the user has set are tried anyway.

        Raises:
            ConfigError: even the smallest values do not fit at a moment that they affect.
        """
        for moment in MOMENTS:
            bounding = PLANNED if _awake(self.config) else (CACHE,) if moment in GENERATING else (CHECKPOINTING, PASS)
            own, taken = [key for key in self.chosen if key in bounding], peak(self.items, moment)
            if own and taken > self.available:
                largest = max(self.items, key=lambda item: float(getattr(item, moment)))
                raise ConfigError(
                    f"this run does not fit into {self.available / GIB:.1f} GiB of a GPU: with the least "
                    f"{', '.join(own)} it takes {taken / GIB:.1f} GiB at the moment {moment}, most of it for "
                    f"{largest.name}. Take more GPUs, distributed.offload_optimizer True or shorter answers; "
                    "`exgrpo train --dry-run` shows the memory by part"
                )


def make_plan(config: Config, shape: ModelShape, gpus: int, available: float) -> MemoryPlan:
    """Choose the options that the configuration leaves open.

    Candidates are sorted by speed and by memory, and the last that fits is taken. So more memory never gives a smaller
    value. If even the first does not fit, it is taken anyway.

    Args:
        gpus: number of GPUs, with one rank each.
        available: bytes of a GPU that tensors may take.
    """
    bounded = PLANNED if engine_of(config) == "vllm" else (CHECKPOINTING, PASS)
    chosen = tuple(key for key in bounded if flat(config)[key] is None)
    passes, caches = _passes(config), _caches(config, shape, gpus, available)

    def best(rungs: Sequence[dict[str, Any]], moments: Sequence[str]) -> dict[str, Any]:
        """Return the last of the candidates that fits, else the first; memory must not decrease along them."""

        def exceeds(values: dict[str, Any]) -> bool:
            items = gpu_memory(changed(config, values), shape, gpus)
            return any(peak(items, moment) > available for moment in moments)

        return rungs[max(0, bisect_left(rungs, True, key=exceeds) - 1)]

    if _awake(config):  # passes and cache are allocated at the same time
        first = [passes[0] | cache for cache in caches]
        config = changed(config, best([*first, *(one | caches[-1] for one in passes)], MOMENTS))
    else:
        config = changed(config, best(passes, TRAINING) | best(caches, GENERATING))
        if SLEEP in chosen:
            awake = changed(config, best([{SLEEP: 0} | one for one in _shorter(passes, config)], MOMENTS))
            fits = all(peak(gpu_memory(awake, shape, gpus), moment) <= available for moment in MOMENTS)
            config = awake if fits else changed(config, {SLEEP: 2})
    rows = slots(config, shape, gpus, config.data.max_prompt_tokens)
    return MemoryPlan(config, chosen, gpu_memory(config, shape, gpus), available, rows)


def _awake(config: Config) -> bool:
    """True if the engine keeps its cache while the trainer updates."""
    return engine_of(config) == "vllm" and config.rollout.sleep_level == 0


def _passes(config: Config) -> list[dict[str, Any]]:
    """Return the candidates for the trainer's passes, by dotted key.

    If both options are open: passes up to `ENOUGH_TOKENS` with checkpointing, then longer ones without.
    """
    enough, most = (max(tokens, config.longest) for tokens in (ENOUGH_TOKENS, MOST_TOKENS))
    own, kept = config.optimizer.micro_batch_tokens, config.policy.gradient_checkpointing
    grown = [config.longest, *range(config.longest // STEP_TOKENS * STEP_TOKENS + STEP_TOKENS, most + 1, STEP_TOKENS)]
    sizes = [own] if own else grown
    if kept is not None:
        return [{CHECKPOINTING: kept, PASS: size} for size in sizes]
    return [
        *({CHECKPOINTING: True, PASS: size} for size in sizes if own or size <= enough),
        *({CHECKPOINTING: False, PASS: size} for size in sizes if own or size >= enough),
    ]


def _shorter(passes: list[dict[str, Any]], config: Config) -> list[dict[str, Any]]:
    """Return the candidates that may replace planned passes if the engine then need not sleep.

    Passes above `ENOUGH_TOKENS` gain less than an engine that never sleeps; without checkpointing more is gained.
    """
    enough = min(config.pass_tokens, max(ENOUGH_TOKENS, config.longest))
    sizes = range(enough, config.pass_tokens + 1)
    return [one for one in passes if one[CHECKPOINTING] == config.policy.checkpointing and one[PASS] in sizes]


def _caches(config: Config, shape: ModelShape, gpus: int, available: float) -> list[dict[str, Any]]:
    """Return the candidates for vLLM's cache, by dotted key: from the longest sequence to all answers of a step."""
    if engine_of(config) != "vllm":
        return [{}]
    if config.rollout.kv_cache_gib is not None:
        return [{CACHE: config.rollout.kv_cache_gib}]
    per_token = shape.kv_bytes(DTYPES[config.policy.dtype].itemsize)
    most = ENOUGH_SEQUENCES if _awake(config) else MOST_SEQUENCES
    answers = min(answers_of_rank(config, gpus), most)
    longest = config.longest * per_token / min(config.rollout.tensor_parallel, shape.kv_heads)
    all_of_them = answers * sequence_bytes(config.rollout, config.data.max_prompt_tokens, per_token)
    least, largest = (math.ceil(size / GIB / STEP_GIB) for size in (longest, min(all_of_them, available)))
    return [{CACHE: STEP_GIB * steps} for steps in range(least, max(least, largest) + 1)]


def plan_run(config: Config, source: ModelSource, world: World) -> tuple[Config, str | None]:
    """Return the planned configuration, the same on all ranks, and a line about the plan (None on CPUs).

    Args:
        config: configuration with the chosen engine; a resumed run has all values already, and keeps them.
        world: the ranks; a collective call.

    Raises:
        ConfigError: nothing fits into the GPU with the least free memory.
    """
    settled = changed(config, {CHECKPOINTING: config.policy.checkpointing, PASS: config.pass_tokens})
    if world.device.type != "cuda":
        return settled, None
    free = min(world.gather(torch.cuda.mem_get_info(world.device)[0]))
    try:
        plan = make_plan(config, shape_of(source.config), world.size, max(0.0, free - RESERVED_GIB * GIB))
    except ModelError as error:
        return settled, f"no memory plan, since {error}: take less where memory runs out"
    plan.check()
    return world.gather((plan.config, str(plan)))[0]
