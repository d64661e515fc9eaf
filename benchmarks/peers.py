"""Other people's implementations, each called as its documentation says; what cannot run here says why.

On GPUs their Triton kernels run; on a CPU those that have a path without Triton. quack-kernels and Liger's kernels for
Hopper need what the Makefile names GPU_PEERS.
"""

import importlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.heads import CLIP, CROSS_ENTROPY, FORWARD, WITHOUT_ENTROPY, Implementation, Problem
from exgrpo.kernels.inputs import IGNORED


class Peer(Implementation):
    """An implementation from a package; `function` imports it.

    Attributes:
        package: that must be installed.
        requirement: what brings it, without what it needs for other things.
        needs_cuda: whether it has no path for CPUs.
    """

    package: str
    requirement = ""
    needs_cuda = False

    @cached_property
    def function(self) -> Callable[..., Any]:
        """What is called."""
        raise NotImplementedError

    def missing(self, device: torch.device) -> str:
        """See `Implementation`."""
        if importlib.util.find_spec(self.package) is None:
            return f"not installed: pip install --no-deps {self.requirement}"
        if self.needs_cuda and device.type != "cuda":
            return "it needs a CUDA device"
        try:
            _ = self.function
        except Exception as error:  # peers fail to import in many ways; each is a reason
            return f"its import fails: {type(error).__name__}: {error}"
        return ""


class CrossEntropy(Peer):
    """One whose function gives cross-entropies, each or their sum, 0 where a target is IGNORED."""

    takes_ignored = True

    def log_prob(self, hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
        """See `Implementation`."""
        return -self.function(hidden, weight, target, reduction="none"), None

    def cross_entropy(self, problem: Problem) -> Tensor:
        """See `Implementation`."""
        return self.function(problem.hidden, problem.weight, problem.target, reduction="sum")


class TorchCrossEntropy(CrossEntropy):
    """torch.nn.functional.linear_cross_entropy (torch 2.13 and later): chunked, cross-entropy only."""

    # Gradients of single log-probs cost it ten times those of their sum, which is what it is made for.
    name, package, operations = "torch linear_cross_entropy", "torch", (FORWARD, CROSS_ENTROPY)

    @cached_property
    def function(self) -> Callable[..., Any]:
        """See `Peer`."""
        if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
            raise ImportError(f"torch 2.13 or later has it, and this is {torch.__version__}")
        options = torch.nn.LinearCrossEntropyOptions()  # without them it is full logits
        return partial(torch.nn.functional.linear_cross_entropy, options=options)


class CutCrossEntropy(CrossEntropy):
    """Apple's Cut Cross-Entropy; on a CPU its compiled variant, which holds the logits."""

    name, package, operations = "Cut Cross-Entropy", "cut_cross_entropy", WITHOUT_ENTROPY
    requirement = "cut-cross-entropy==25.1.1"

    @cached_property
    def function(self) -> Callable[..., Any]:
        """See `Peer`."""
        if torch.cuda.is_available():
            function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
            return partial(function, impl="cce")
        # The package imports Triton, which its compiled variant does without.
        with _StandIns({"cut_cross_entropy": _folder("cut_cross_entropy")}):
            return importlib.import_module("cut_cross_entropy.torch_compile").torch_compile_linear_cross_entropy


class LigerPolicyLoss(Peer):
    """Liger's fused linear GRPO loss."""

    name, package, operations = "Liger fused linear GRPO", "liger_kernel", WITHOUT_ENTROPY
    requirement = "liger-kernel==0.8.5"

    @cached_property
    def function(self) -> Callable[..., Any]:
        """See `Peer`."""
        return importlib.import_module("liger_kernel.chunked_loss").LigerFusedLinearGRPOLoss

    def log_prob(self, hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
        """See `Implementation`."""
        base = importlib.import_module("liger_kernel.chunked_loss.fused_linear_ppo").LigerFusedLinearPPOBase
        return base.chunk_forward(hidden[None], weight, target[None])[0], None

    def policy_loss(self, problem: Problem, entropy_coef: float) -> Tensor:
        """See `Implementation`."""
        hidden, weight, target, old, advantage, *_ = problem
        # It knows advantages per row only: a row for each token, all of them in one chunk.
        loss = self.function(
            beta=0.0,
            use_ref_model=False,
            compiled=hidden.is_cuda,
            chunk_size=len(target),
            epsilon_low=CLIP,
            epsilon_high=CLIP,
            loss_type="dapo",
        )
        rows = (hidden[:, None], weight, target[:, None], torch.ones_like(old)[:, None], advantage)
        return loss(*rows, old_per_token_logps=old[:, None], num_items_in_batch=len(target))[0]


class LigerScaledCrossEntropy(Peer):
    """Liger's fused linear scaled cross-entropy: on Hopper its CuTe DSL kernels, else its own fallback."""

    name, package, needs_cuda, takes_ignored = "Liger FLSCE", "liger_kernel", True, True
    requirement = "liger-kernel==0.8.5"

    @cached_property
    def function(self) -> Callable[..., Any]:
        """See `Peer`."""
        if torch.cuda.get_device_capability() == (9, 0):  # says what is missing, which it would say in the first call
            importlib.import_module("liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90")
        return importlib.import_module("liger_kernel.ops").LigerFusedLinearScaledCrossEntropyFunction.apply

    def log_prob(self, hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
        """See `Implementation`."""
        loss, entropy = self.function(hidden, weight, target, 1.0, IGNORED, 1, True)
        return -loss, entropy


class VerlTorch(Peer):
    """verl's FusedLinearForPPO, in plain torch."""

    name, package = "verl FusedLinearForPPO", "verl"
    requirement = "verl==0.9.1"

    @cached_property
    def function(self) -> Callable[..., Any]:
        """See `Peer`."""
        # The file takes Liger's function where it finds one, and fails where Liger is there without Triton.
        stub = types.ModuleType("liger_kernel.ops")
        stub.LigerFusedLinearScaledCrossEntropyFunction = None  # type: ignore[attr-defined]
        with _StandIns({"liger_kernel": Path(), "liger_kernel.ops": stub}):
            path = _folder("verl") / "utils" / "experimental" / "torch_functional.py"
            return _module_at("verl_torch_functional", path).FusedLinearForPPO()

    def log_prob(self, hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
        """See `Implementation`."""
        return self.function(hidden, weight, target)


class VerlTriton(Peer):
    """verl's Triton linear_cross_entropy, the call that other RL codebases copied."""

    name, package, needs_cuda = "verl Triton", "verl", True
    requirement = "verl==0.9.1"

    @cached_property
    def function(self) -> Callable[..., Any]:
        """See `Peer`."""
        device = types.ModuleType("verl.utils.device")
        device.is_cuda_available = True  # type: ignore[attr-defined]
        device.get_device_name = lambda: "cuda"  # type: ignore[attr-defined]
        device.get_torch_device = lambda: torch.cuda  # type: ignore[attr-defined]
        device.get_device_capability = torch.cuda.get_device_capability  # type: ignore[attr-defined]
        root = _folder("verl")
        parents = {"verl": root, "verl.utils": root / "utils", "verl.utils.kernel": root / "utils" / "kernel"}
        # `import verl` wants ray. The stand-ins stay: its functions import their kernels when they are called.
        sys.modules.update({name: _package_at(name, folder) for name, folder in parents.items()})
        sys.modules["verl.utils.device"] = device
        return importlib.import_module("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy

    def log_prob(self, hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
        """See `Implementation`."""
        return self.function(hidden, weight, target, 1.0, "none", None)


class TrlChunked(Peer):
    """TRL's chunked log-probs; as in its trainer, tokens that do not count are left out on GPUs alone."""

    name, package, takes_ignored = "TRL chunked log-prob", "trl", True
    requirement = "trl==1.16.0"
    vocabulary_chunk = 32768
    """The value of its trainer."""

    @cached_property
    def function(self) -> Callable[..., Any]:
        """See `Peer`."""
        return importlib.import_module("trl.kernels.chunked_logprob").ChunkedLogProbFunction.apply

    def log_prob(self, hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
        """See `Implementation`."""
        options = (1.0, self.vocabulary_chunk, None, 1.0, ("entropy",))
        if not hidden.is_cuda:
            return self.function(hidden, weight, None, target.clamp(min=0), *options)[:2]
        kept = target != IGNORED
        log_prob, entropy = self.function(hidden[kept], weight, None, target[kept], *options)[:2]
        return tuple(x.new_zeros(target.shape).masked_scatter(kept, x) for x in (log_prob, entropy))


class Quack(CrossEntropy):
    """Dao-AILab's quack: the sum or mean of cross-entropies."""

    name, package, needs_cuda, operations = "quack", "quack", True, (CROSS_ENTROPY,)
    requirement = "quack-kernels==0.6.5"

    @cached_property
    def function(self) -> Callable[..., Any]:
        """See `Peer`."""
        return importlib.import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy


class _StandIns:
    """While entered, modules are replaced: by a package whose submodules lie in a folder, or by a module."""

    def __init__(self, modules: dict[str, Path | types.ModuleType]) -> None:
        self.modules = modules

    def __enter__(self) -> None:
        self.kept = {name: sys.modules.pop(name) for name in self.modules if name in sys.modules}
        for name, module in self.modules.items():
            sys.modules[name] = _package_at(name, module) if isinstance(module, Path) else module

    def __exit__(self, *_: object) -> None:
        for name in self.modules:
            del sys.modules[name]
        sys.modules.update(self.kept)


def _package_at(name: str, folder: Path) -> types.ModuleType:
    """A package of the modules in a folder, whose own code is not run."""
    spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    return importlib.util.module_from_spec(spec)


def _folder(package: str) -> Path:
    """Of an installed package, without importing it."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def _module_at(name: str, path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PEERS: tuple[type[Peer], ...] = (
    TorchCrossEntropy,
    LigerPolicyLoss,
    LigerScaledCrossEntropy,
    VerlTorch,
    VerlTriton,
    TrlChunked,
    Quack,
    CutCrossEntropy,
)
