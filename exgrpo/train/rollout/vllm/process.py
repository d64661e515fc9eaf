"""Isolate vLLM inside the trainer's process: import, random state, threads, environment and process group.

vLLM is imported only when an engine is made: the import reads the environment and changes the process.
"""

import logging
import os
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

# One process, threads as the trainer sets them, no usage statistics. Requests with own seeds never use FlashInfer's
# sampler, and without it nothing has to be compiled by nvcc.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
KEPT = ("LD_PRELOAD", "LOCAL_WORLD_SIZE")
"""Environment variables of the launcher and other programs that vLLM overwrites."""


def import_vllm(device: torch.device) -> Any:
    """Import and return `vllm` with the environment for an engine inside the trainer's process.

    Raises:
        ImportError: it cannot be imported, or its build is for another type of device.
    """
    os.environ.update(ENVIRONMENT)
    level = os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR").upper()
    logging.getLogger("vllm").setLevel(level)  # vLLM logs before it reads its environment
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # would override the size given to the engine
    request_tiles()
    with Guest(device):
        import vllm
        from vllm.platforms import current_platform

        if current_platform.device_type != device.type:
            raise ImportError(f"this build of vLLM is not for {device.type}")
        # The module imports lazily: force it here.
        from vllm import LLM, EngineArgs  # noqa: F401
    return vllm


def request_tiles() -> None:
    """Request the processor's matrix tiles (AMX) from Linux, if it has any.

    Linux enables them per process on request. vLLM's attention in bf16 does not request them, and then crashes with an
    illegal instruction.
    """
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def _random_state(device: torch.device) -> tuple[Any, ...]:
    gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), gpu  # noqa: NPY002


def _restore(state: tuple[Any, ...], device: torch.device) -> None:
    python, legacy_numpy, cpu, gpu = state
    random.setstate(python)
    np.random.set_state(legacy_numpy)  # noqa: NPY002
    torch.set_rng_state(cpu)
    if gpu is not None:
        torch.cuda.set_rng_state(gpu, device)


class Guest:
    """Gives vLLM its own random state: active inside `with guest:`, and the trainer's is restored afterwards.

    The number of threads is restored, too. Inside, torch.compile is off on CPUs, where it costs every process seconds
    and needs a compiler for a single comparison.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._own = _random_state(device)
        self._leave = ExitStack()

    def seed(self, seed: int) -> None:
        """Seed the guest's random state."""
        with self:
            random.seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002
            torch.default_generator.manual_seed(seed)
            if self.device.type == "cuda":
                torch.cuda.manual_seed(seed)

    def __enter__(self) -> None:
        host = _random_state(self.device)
        with ExitStack() as leave:
            leave.callback(_restore, host, self.device)
            leave.callback(_restore_threads, torch.get_num_threads(), torch.set_num_threads)
            leave.callback(self._keep)
            if self.device.type == "cpu":
                leave.enter_context(torch.compiler.set_stance("force_eager"))
            _restore(self._own, self.device)
            self._leave = leave.pop_all()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave.close()

    def _keep(self) -> None:
        self._own = _random_state(self.device)


def _restore_threads(threads: int, set_threads: Any) -> None:
    torch.set_num_threads = set_threads  # vLLM replaces it by a function that does nothing
    torch.set_num_threads(threads)


@contextmanager
def kept_environment() -> Iterator[None]:
    """Restore the `KEPT` environment variables afterwards: processes that this one starts inherit them."""
    before = {name: os.environ.get(name) for name in KEPT}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def kept_process_group() -> Iterator[None]:
    """Keep vLLM from destroying the trainer's default process group; it may destroy its own groups."""
    destroy = dist.destroy_process_group
    dist.destroy_process_group = lambda group=None: group and destroy(group)
    try:
        yield
    finally:
        dist.destroy_process_group = destroy
