"""What to change in a recipe: so that it fits, generates faster, and takes less disk space and CPU memory."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from exgrpo.train.config import Config
from exgrpo.train.estimate.budget import cpu_memory, disk, gpu_memory
from exgrpo.train.estimate.parts import GIB, MOMENTS, Amount, Assumptions, Hardware, peak
from exgrpo.train.estimate.rollout import engine_of, longest_sequence, rollout_seconds
from exgrpo.train.estimate.shape import ModelShape
from exgrpo.train.recipe import merged, validate

MOST_GPUS = 1024
SMALLEST_CACHE_GIB = 0.25
"""Advice goes no further than these."""
LARGE_DISK_GIB, LARGE_CPU_GIB = 100, 32
"""What is above these is pointed out: a home folder has a quota, and a container a limit, of about that size."""


def advise(config: Config, shape: ModelShape, hardware: Hardware) -> str:
    """One sentence: the first change that makes a recipe fit which does not.

    Each change is tried alone, cheap ones first; then all of them together; then, with them, more GPUs.
    """
    on_gpus = hardware.kind == "GPU"
    changes = [values for values in _changes(config) if on_gpus or "distributed.offload_optimizer" not in values]
    for values in changes:
        found = _peak_with(config, values, shape, hardware)
        if found <= hardware.memory:
            return f"It fits with {as_options(values)}: {found / GIB:.1f} GiB."
    together = {key: value for values in changes for key, value in values.items()}
    gpus = hardware.gpus
    while gpus <= (MOST_GPUS if on_gpus else hardware.gpus):
        found = _peak_with(config, together, shape, replace(hardware, gpus=gpus))
        if found <= hardware.memory:
            options = f" with {as_options(together)}" if together else ""
            return f"It fits{options}{f' on {gpus} GPUs' if on_gpus else ''}: {found / GIB:.1f} GiB."
        gpus *= 2
    if not on_gpus:
        return "No option makes it fit: take a smaller model, fewer processes or a machine with more memory."
    return f"No option makes it fit, nor do {MOST_GPUS} GPUs: a rank's rollout engine needs GPUs with more memory."


def _changes(config: Config) -> Iterator[dict[str, Any]]:
    """Changes that lower the peak, by dotted key; those of a size end with the smallest that is valid."""
    longest = longest_sequence(config)
    if engine_of(config) == "vllm" and config.rollout.sleep_level == 0:
        yield {"rollout.sleep_level": 2}
    if not config.policy.gradient_checkpointing:
        yield {"policy.gradient_checkpointing": True}
    for key, size in (
        ("optimizer.micro_batch_tokens", config.optimizer.micro_batch_tokens),
        ("rollout.batch_tokens", config.rollout.batch_tokens),
    ):
        while size > longest:
            size = max(longest, size // 2)
            yield {key: size}
    cache = config.rollout.kv_cache_gib
    while engine_of(config) == "vllm" and cache > SMALLEST_CACHE_GIB:
        cache = max(SMALLEST_CACHE_GIB, cache / 2)
        yield {"rollout.kv_cache_gib": cache}
    if not config.distributed.offload_optimizer:
        yield {"distributed.offload_optimizer": True}


def as_options(values: dict[str, Any]) -> str:
    """Changes as options of the command line."""
    return " ".join(f"--{key} {value}" for key, value in values.items())


def changed(config: Config, values: dict[str, Any]) -> Config:
    """The configuration with other values, by dotted key."""
    return validate(merged(config.model_dump(), values), "advice")


def _peak_with(config: Config, values: dict[str, Any], shape: ModelShape, hardware: Hardware) -> float:
    memory = gpu_memory(changed(config, values), shape, hardware)
    return max(peak(memory, moment) for moment in MOMENTS)


def fastest_generation(
    config: Config, shape: ModelShape, hardware: Hardware, assumptions: Assumptions
) -> dict[str, Any]:
    """What to change for the fastest generation there is room for, by dotted key: more answers at once.

    They share the reading of the weights, until the traffic of their keys and values outweighs it.
    """
    best: dict[str, Any] = {}
    best_seconds, values = rollout_seconds(config, shape, hardware, assumptions), _room(config)
    # Once all answers of a step are generated at once, no more tokens change anything.
    while values["rollout.batch_tokens"] < config.questions * config.rollout.samples * longest_sequence(config):
        values = {key: 2 * value for key, value in values.items()}
        wider = changed(config, values)
        if peak(gpu_memory(wider, shape, hardware), "rollout") > hardware.memory:
            break
        seconds = rollout_seconds(wider, shape, hardware, assumptions)
        if seconds < best_seconds:
            best, best_seconds = values, seconds
    return best


def _room(config: Config) -> dict[str, Any]:
    """What limits the answers that are generated at once."""
    room: dict[str, Any] = {"rollout.batch_tokens": config.rollout.batch_tokens}
    return room | ({"rollout.kv_cache_gib": config.rollout.kv_cache_gib} if engine_of(config) == "vllm" else {})


def beside_gpus(config: Config, shape: ModelShape, gpus: int, assumptions: Assumptions) -> Iterator[str]:
    """A sentence each, if a run takes much of it, about disk space and CPU memory: how much, and what lowers it."""

    def on_disk(of: Config) -> float:
        return _gib(disk(of, shape, assumptions))

    def in_memory(of: Config) -> float:
        return _gib(cpu_memory(of, shape, gpus, assumptions))

    for what, size, large, changes in (
        ("on disk", on_disk, LARGE_DISK_GIB, _less_disk(config)),
        ("of CPU memory for all ranks together", in_memory, LARGE_CPU_GIB, _less_memory(config)),
    ):
        needed = size(config)
        if needed > large:
            less = [f"{size(changed(config, values)):.1f} GiB with {as_options(values)}" for values in changes]
            remedy = f" It takes {', '.join(less)}." if less else ""
            yield f"The run takes {needed:.1f} GiB {what}: see that so much is free.{remedy}"


def _gib(amounts: Sequence[Amount]) -> float:
    return sum(amount.bytes for amount in amounts) / GIB


def _less_disk(config: Config) -> Iterator[dict[str, Any]]:
    if config.checkpoint.every is not None:
        if config.checkpoint.keep > 1:
            yield {"checkpoint.keep": 1}
        yield {"checkpoint.every": None}


def _less_memory(config: Config) -> Iterator[dict[str, Any]]:
    if engine_of(config) == "vllm" and config.rollout.sleep_level == 1:
        yield {"rollout.sleep_level": 2}
    replayed_for = min(config.steps, config.experience.max_age or config.steps)
    if config.experience.ratio and replayed_for > 1:
        yield {"experience.max_age": replayed_for // 2}
