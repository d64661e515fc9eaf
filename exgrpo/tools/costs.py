"""Memory by part and FLOPs of a step, computed from a configuration and a model's shape, without its weights."""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from rich.table import Table

from exgrpo.tools.checks import gpus
from exgrpo.train.common.limits import RESERVED_GIB
from exgrpo.train.config.options import Config
from exgrpo.train.config.recipe import changed
from exgrpo.train.metrics.utilisation import BACKWARD, FROZEN_BACKWARD
from exgrpo.train.policy.flops import Reading
from exgrpo.train.policy.shape import FP32, ModelShape
from exgrpo.train.policy.tokenizer import DTYPES
from exgrpo.train.rollout.transformers.engine import shares_policy
from exgrpo.train.run.memory import MOMENTS, MemoryItem, engine_of, gpu_memory, peak
from exgrpo.train.run.plan import make_plan

GIB = 1 << 30
STORED_ANSWERS = 1000
ANSWER_OVERHEAD = 700
"""Bytes of a stored answer beyond 8 per token: the object, two arrays, its entry in a checkpoint."""
ASLEEP, OFFLOADED = "rollout engines asleep", "offloaded optimizer states"


def costs(config: Config, shape: ModelShape, processes: int, gpu_gib: float | None) -> Iterator[str | Table]:
    """Yield memory plan, memory by part, disk space and FLOPs of a step, for printing.

    `gpu_gib` is the memory of each GPU in GiB; None: this machine's GPUs, or its CPU if it has none.
    """
    on_gpu = gpu_gib is not None or gpus() > 0
    if on_gpu:
        plan = make_plan(config, shape, processes, _usable(gpu_gib, processes))
        config = plan.config
        yield str(plan)
    elif config.rollout.engine == "auto" and not config.rollout.servers:
        config = changed(config, {"rollout.engine": "transformers"})  # what `auto` chooses on CPUs
    unit = "GPU" if on_gpu else "process"
    yield f"{config.policy.path}: {shape.total:,} parameters in {config.policy.dtype} on {processes} x {unit}"
    items = gpu_memory(config, shape, processes, "cuda" if on_gpu else "cpu")
    yield _memory_table(items, unit)
    on_cpu = cpu_memory(config, shape, processes)
    if not on_gpu:
        taken = processes * max(peak(items, moment) for moment in MOMENTS) + on_cpu[ASLEEP] + on_cpu[OFFLOADED]
        yield f"At most {taken / GIB:.1f} GiB in all, without libraries; {free_memory() / GIB:.1f} GiB are free."
    found = {f"CPU memory: {name}": size / GIB for name, size in on_cpu.items()}
    found |= {f"disk: {name}": size / GIB for name, size in disk(config, shape).items()}
    yield _table("of all processes together", "GiB", found)
    yield _table("FLOPs of a step, all lengths at their limits", "TFLOP", step_tflops(config, shape))


def _usable(gpu_gib: float | None, processes: int) -> float:
    """Return the bytes per GPU available to tensors."""
    if gpu_gib is None:
        gpu_gib = min(torch.cuda.mem_get_info(gpu)[0] for gpu in range(min(processes, gpus()))) / GIB
    return max(0.0, (gpu_gib - RESERVED_GIB) * GIB)


def free_memory() -> float:
    """Return the bytes of free CPU memory, or those of its container if that has less."""
    free = [float(re.search(r"MemAvailable:\s*(\d+)", Path("/proc/meminfo").read_text())[1]) * 1024]  # type: ignore[index]
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # no container, or one without a limit, which is the word "max"
        free.append(float((group / "memory.max").read_text()) - float((group / "memory.current").read_text()))
    return min(free)


def cpu_memory(config: Config, shape: ModelShape, processes: int) -> dict[str, float]:
    """Return the bytes that all processes together hold in CPU memory, by part, without programs and libraries."""
    if engine_of(config) == "vllm":
        sleeps = config.rollout.sleep_level == 1
    else:
        sleeps = engine_of(config) == "transformers" and not shares_policy(config, processes)
    # Master weights, two moments and gradients; under ZeRO-3 gradients both as they arrive and as AdamW takes them.
    states = (4 if processes == 1 else 5) * FP32 * shape.trained(config.lora, processes)
    answer = 8 * config.rollout.max_tokens + ANSWER_OVERHEAD  # token id and log-prob, 4 bytes each
    return {
        ASLEEP: processes * shape.total * DTYPES[config.policy.dtype].itemsize * sleeps,
        OFFLOADED: processes * states * config.distributed.offload_optimizer,
        f"experience, for {STORED_ANSWERS:,} answers of full length": processes * STORED_ANSWERS * answer,
    }


def disk(config: Config, shape: ModelShape) -> dict[str, float]:
    """Return the bytes on disk at the end of a run by part, including one checkpoint being written."""
    trained, kept = shape.trained(config.lora, 1), config.checkpoint.keep
    saved = trained if config.lora.result == "adapters" else shape.total
    exports = config.steps // config.output.export_every if config.output.export_every else 0
    models = config.output.save_model + exports + 2 * bool(config.checkpoint.best)  # written beside the one before
    checkpoint = 3 * FP32 * trained * bool(config.checkpoint.every)
    return {
        f"checkpoints, {kept} kept and one being written": (kept + 1) * checkpoint,
        f"models, {models}": models * saved * DTYPES[config.policy.dtype].itemsize,
    }


def step_tflops(config: Config, shape: ModelShape) -> dict[str, float]:
    """Return the TFLOPs of a step without replay by phase, counted as by the metric `mfu`, at full lengths.

    A replayed answer costs its part of the update but no generation.
    """
    group = Reading(config.data.max_prompt_tokens, (config.rollout.max_tokens,) * config.rollout.samples)
    forward = config.questions * group.flops(shape) / 1e12
    backward = FROZEN_BACKWARD if config.lora.rank else BACKWARD
    return {
        "generate": forward,
        "score, at most": forward * (1 + bool(config.objective.compared)),
        "update": forward * config.optimizer.passes * (1 + backward),
    }


def _memory_table(items: tuple[MemoryItem, ...], unit: str) -> Table:
    table = Table(f"GiB per {unit}", *MOMENTS)
    for column in table.columns[1:]:
        column.justify = "right"
    for item in items:
        sizes = [getattr(item, moment) for moment in MOMENTS]
        table.add_row(item.name, *(f"{size / GIB:.2f}" if size else "-" for size in sizes))
    table.add_section()
    table.add_row("together", *(f"{peak(items, moment) / GIB:.2f}" for moment in MOMENTS))
    return table


def _table(title: str, unit: str, rows: Mapping[str, float]) -> Table:
    table = Table(title, unit)
    table.columns[1].justify = "right"
    for name, value in rows.items():
        table.add_row(name, f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value else "-")
    return table
