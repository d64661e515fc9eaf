"""vLLM as a guest in the trainer's process: its import, its random state, and what it must not change.

Nothing here imports vLLM before an engine is wanted: the import reads its environment and changes the process.
"""

import logging
import os
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import TracebackType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

# In one process, threads and cache size as the trainer sets them, and nothing told to anyone. FlashInfer's sampler is
# never used where requests have seeds of their own, and without it nothing has to be compiled by nvcc.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
KEPT = ("LD_PRELOAD", "LOCAL_WORLD_SIZE")
"""What vLLM overwrites in the environment though it belongs to the launcher and to other programs."""


def import_vllm(device: torch.device) -> Any:
    """The module `vllm`, imported with the environment that an engine inside the trainer's process needs.

    Raises:
        ImportError: it cannot be imported, or this build of it is not one for the kind of device.
    """
    os.environ.update(ENVIRONMENT)
    level = os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR").upper()
    logging.getLogger("vllm").setLevel(level)  # vLLM reads its environment after it has spoken for the first time
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would overrule the size that the engine is given
    request_tiles()
    with Guest(device):
        import vllm
        from vllm.platforms import current_platform

        if current_platform.device_type != device.type:
            raise ImportError(f"this build of vLLM is not one for {device.type}")
        # The module imports nearly everything only as it is asked for.
        from vllm import LLM, EngineArgs  # noqa: F401
    return vllm


def request_tiles() -> None:
    """Ask Linux for the processor's matrix tiles (AMX), if it has any.

    A process has them on request only. vLLM's attention in bf16 takes them as given, and ends by an illegal instruction
    where nothing else has asked before.
    """
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def _random_state(device: torch.device) -> tuple[Any, ...]:
    """That of all global generators of a process, of its GPU too."""
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
    """Gives vLLM a random state of its own: `with guest:` it goes on with that, and outside nothing has happened.

    Threads, too, are outside what they were, and inside nothing is compiled on CPUs, where that costs every process
    seconds and a compiler for one comparison.

    Args:
        device: where vLLM computes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._own = _random_state(device)
        self._leave = ExitStack()

    def seed(self, seed: int) -> None:
        """Start the guest's random state anew."""
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
            leave.enter_context(_eager(self.device))
            _restore(self._own, self.device)
            self._leave = leave.pop_all()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave.close()

    def _keep(self) -> None:
        self._own = _random_state(self.device)


def _restore_threads(threads: int, set_threads: Any) -> None:
    torch.set_num_threads = set_threads  # vLLM makes it do nothing
    torch.set_num_threads(threads)


def _eager(device: torch.device) -> AbstractContextManager[Any]:
    return torch.compiler.set_stance("force_eager") if device.type == "cpu" else nullcontext()


@contextmanager
def kept_environment() -> Iterator[None]:
    """What vLLM sets for processes of its own is not for those that this one starts."""
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
    """vLLM may leave its own groups, but not end the trainer's world with them."""
    destroy = dist.destroy_process_group
    dist.destroy_process_group = lambda group=None: group and destroy(group)
    try:
        yield
    finally:
        dist.destroy_process_group = destroy
