"""What a run would do, without doing it: its configuration, its plan and an estimate for a machine."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from exgrpo.tools.estimate.parts import GIB, Hardware
from exgrpo.tools.estimate.program import Options, assumptions_of, hardware_of, read_shape
from exgrpo.train.checkpoint.resume import AUTO, begun_anew
from exgrpo.train.config.options import Config
from exgrpo.train.config.recipe import changed, to_yaml
from exgrpo.train.run.startup_checks import Early

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from exgrpo.train.policy.shape import ModelShape

CPU_PROGRAM_GIB = 1.0
"""Of a process without its tensors: the libraries, and its share of the processes that grade."""
CPU_MFU = 0.1
"""Between that of a model whose products are small and that of one whose products are large."""
COPIED = 1 << 28
"""Bytes. More than the caches of a processor hold."""


def lines(
    config: Config, early: Early, resumed: Path | None, processes: int, gpu: str | None
) -> "Iterator[str | Table]":
    """It all, to be printed.

    Args:
        config: the resolved configuration.
        early: the questions that were read.
        resumed: the folder of the run that would go on; None: a new one.
        processes: of the run.
        gpu: what they run on, by its name in the data sheets; None: this machine.

    Raises:
        ExgrpoError: the model is not there, or cannot be estimated.
    """
    yield "\n".join((to_yaml(config), *plan(config, early, resumed, processes), ""))
    from exgrpo.tools.doctor.machine import device
    from exgrpo.tools.estimate import tables
    from exgrpo.train.run.plan import make_plan

    shape = read_shape(config.policy.path, config.policy.overrides)
    if known := gpu or _known_gpu():
        options = Options(gpus=processes, gpu=known)
        hardware = hardware_of(options, config.policy.dtype)
    elif device().type == "cuda":
        options = Options(gpus=processes)
        hardware = _measured_gpu(config, options)
    else:
        if config.rollout.engine == "auto" and not config.rollout.servers:
            config = changed(config, {"rollout.engine": "transformers"})  # as it is chosen on CPUs
        options = Options(mfu=CPU_MFU, reserve_gib=CPU_PROGRAM_GIB)
        hardware = _measured_cpu(config, shape, processes, options)
    if hardware.kind == "GPU":
        planned = make_plan(config, shape, processes, hardware.memory)
        config = planned.config
        yield str(planned)
    yield from tables.lines(config, shape, hardware, assumptions_of(options, config), options.reserve_gib)


def plan(config: Config, early: Early, resumed: Path | None, processes: int) -> list[str]:
    """The plan of a run in sentences."""
    rows = sum(map(len, early.questions))
    held_out = {name: sum(map(len, sources)) for name, sources in early.held_out.items()}
    sets = ", ".join(f"{name} ({count})" for name, count in held_out.items()) or "none"
    samples, every = config.rollout.samples, config.evaluation.every
    folder = resumed or config.output.folder / (config.output.name or "DATE_TIME")
    saves = f"every {config.checkpoint.every} steps" if config.checkpoint.every else "never"
    between = f", every {every} steps" if every else ""
    anew = [begun_anew(config, folder)] if config.resume == AUTO and resumed is None else []
    train = "processes train" if processes > 1 else "process trains"
    return [
        f"{processes} {train} {config.policy.path} in {config.policy.dtype} for {config.steps} steps.",
        f"A step has {config.questions} questions with {samples} answers each, {config.questions * samples} in all; "
        f"there are {early.counted}{rows} questions, before over-long ones are left out.",
        f"Up to {config.experience.ratio:.0%} of a step's questions are replayed ones, once "
        f"{config.experience.start_pass_rate:.0%} of the answers of a step were right."
        if config.experience.ratio
        else "Nothing is replayed.",
        f"Held-out questions: {sets}; asked before the first step, after the last one{between}.",
        f"Checkpoints: {saves}, {config.checkpoint.keep} stay. Results: {folder}.",
        *early.notes,
        *anew,
        "Nothing was started: this is a dry run.",
    ]


def _known_gpu() -> str | None:
    """The name of this machine's GPU, if there is one and its data sheet is known."""
    import torch

    from exgrpo.tools.doctor.machine import device
    from exgrpo.tools.estimate.parts import data_sheet_of

    if device().type != "cuda":
        return None
    gpu = torch.cuda.get_device_properties(0)
    return data_sheet_of(gpu.name, gpu.multi_processor_count, gpu.total_memory)


def _measured_gpu(config: Config, options: Options) -> Hardware:
    """This machine's GPU, of which there is no data sheet."""
    import torch

    flops, bandwidth = _rates(config, torch.device("cuda"))
    memory = torch.cuda.get_device_properties(0).total_memory
    words = (
        f"{options.gpus} x {torch.cuda.get_device_name()}, as this machine has. Its data sheet is not known; as "
        f"measured now: {_told(memory, flops, bandwidth)}. Utilisations are stated ones."
    )
    return Hardware(options.gpus, memory - options.reserve_gib * GIB, flops, bandwidth, words=words)


def _measured_cpu(config: Config, shape: "ModelShape", processes: int, options: Options) -> Hardware:
    """The CPU of this machine, which its processes share; so are its memory and what else is held there."""
    import torch

    from exgrpo.tools.doctor.machine import free_memory
    from exgrpo.tools.estimate.budget import cpu_memory

    memory, (flops, bandwidth) = free_memory(), _rates(config, torch.device("cpu"))
    beside = sum(amount.bytes for amount in cpu_memory(config, shape, processes, assumptions_of(options, config)))
    usable = (memory - beside) / processes - options.reserve_gib * GIB
    words = (
        f"this machine, which has no GPU to use: {len(os.sched_getaffinity(0))} cores of a CPU for {processes} "
        f"process{'es' * (processes > 1)}. Free or measured now: {_told(memory, flops, bandwidth)}. The times are "
        "rough, perhaps wrong by a factor of ten: small models use less of a CPU than is assumed, large ones more. A "
        "run of a few steps (--steps 3) measures them."
    )
    return Hardware(processes, usable, flops / processes, bandwidth / processes, kind="process", words=words)


def _told(memory: float, flops: float, bandwidth: float) -> str:
    return (
        f"{memory / GIB:.0f} GiB of memory, {flops / 1e12:.2g} TFLOP/s in products of matrices, "
        f"{bandwidth / 1e9:.2g} GB/s of memory traffic"
    )


def _rates(config: Config, device: "torch.device") -> tuple[float, float]:
    """FLOP/s in products of matrices, and bytes per second that a copy reads and writes, in half a second each."""
    import torch

    from exgrpo.train.common.distributed import World
    from exgrpo.train.metrics.utilisation import matrix_rate
    from exgrpo.train.policy.tokenizer import DTYPES

    flops = matrix_rate(World(0, 1, device, control=None), DTYPES[config.policy.dtype])
    source, target = (torch.zeros(COPIED, dtype=torch.uint8, device=device) for _ in range(2))
    best, end = 0.0, time.perf_counter() + 0.5
    while time.perf_counter() < end:
        start = time.perf_counter()
        target.copy_(source)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        best = max(best, 2 * COPIED / (time.perf_counter() - start))
    return flops, best
