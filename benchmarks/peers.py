"""Implementations from other packages, each called as documented there; missing ones report a reason.

On GPUs their Triton kernels run; on a CPU only those with a path without Triton. quack-kernels and Liger's
kernels for Hopper need the packages listed as GPU_PEERS in the Makefile.
"""

import importlib
import importlib.machinery
import importlib.util
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from operator import attrgetter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.heads import CLIP, CROSS_ENTROPY, FORWARD, WITHOUT_ENTROPY, Implementation, LossInputs
from exgrpo.kernels.inputs import IGNORED


class Peer(Implementation):
    """An implementation from a package; `function` imports it."""

    package: str
    requirement = ""  # installs it, without its dependencies
    needs_cuda = False  # True if it has no path for CPUs
    source = ("", "")  # module and attribute of `function`

    @cached_property
    def function(self) -> Callable[..., Any]:
        module, attribute = self.source
        return attrgetter(attribute)(importlib.import_module(module))

    def missing(self, device: torch.device) -> str:
        if importlib.util.find_spec(self.package) is None:
            return f"not installed: pip install --no-deps {self.requirement}"
        if self.needs_cuda and device.type != "cuda":
            return "it needs a CUDA device"
        try:
            _ = self.function
        except Exception as error:  # peers fail to import in many ways
            return f"its import fails: {type(error).__name__}: {error}"
        return ""


class CrossEntropy(Peer):
    """A function that returns cross-entropies, each or their sum, 0 for IGNORED targets."""

    takes_ignored = True

    def log_prob(self, hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
        return -self.function(hidden, weight, target, reduction="none"), None

    def cross_entropy(self, problem: LossInputs) -> Tensor:
        return self.function(problem.hidden, problem.weight, problem.target, reduction="sum")


class TorchCrossEntropy(CrossEntropy):
    """torch.nn.functional.linear_cross_entropy (torch 2.13 and later), chunked.

    It is made for sums: the gradients of single log-probs would take it ten times as long.
    """

    name, package, operations = "torch linear_cross_entropy", "torch", (FORWARD, CROSS_ENTROPY)
    quick = False

    @cached_property
    def function(self) -> Callable[..., Any]:
        if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
            raise ImportError(f"torch 2.13 or later has it, and this is {torch.__version__}")
        options = torch.nn.LinearCrossEntropyOptions()  # without options it computes full logits
        return partial(torch.nn.functional.linear_cross_entropy, options=options)


class CutCrossEntropy(CrossEntropy):
    """Apple's Cut Cross-Entropy; on a CPU its compiled variant, which holds the logits."""

    name, package, operations = "Cut Cross-Entropy", "cut_cross_entropy", WITHOUT_ENTROPY
    requirement = "cut-cross-entropy==25.1.1"

    @cached_property
    def function(self) -> Callable[..., Any]:
        if torch.cuda.is_available():
            function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
            return partial(function, impl="cce")
        # The package imports Triton, but its compiled variant does not need it.
        package = _package_at("cut_cross_entropy", _folder("cut_cross_entropy"))
        with _in_place_of({package.__name__: package}):
            return importlib.import_module("cut_cross_entropy.torch_compile").torch_compile_linear_cross_entropy


class LigerPolicyLoss(Peer):
    """Liger's fused linear GRPO loss."""

    name, package, operations = "Liger fused linear GRPO", "liger_kernel", WITHOUT_ENTROPY
    requirement = "liger-kernel==0.8.5"
    source = ("liger_kernel.chunked_loss", "LigerFusedLinearGRPOLoss")

    def log_prob(self, hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
        base = importlib.import_module("liger_kernel.chunked_loss.fused_linear_ppo").LigerFusedLinearPPOBase
        return base.chunk_forward(hidden[None], weight, target[None])[0], None

    def policy_loss(self, problem: LossInputs, entropy_coef: float) -> Tensor:
        hidden, weight, target, old, advantage = problem
        # It takes advantages per row only: make a row of each token, all in one chunk.
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
    source = ("liger_kernel.ops", "LigerFusedLinearScaledCrossEntropyFunction.apply")

    @cached_property
    def function(self) -> Callable[..., Any]:
        if torch.cuda.get_device_capability() == (9, 0):  # fail here instead of in the first call
            importlib.import_module("liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90")
        return super().function

    def log_prob(self, hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
        loss, entropy = self.function(hidden, weight, target, 1.0, IGNORED, 1, True)
        return -loss, entropy


class VerlTorch(Peer):
    """verl's FusedLinearForPPO, in plain torch."""

    name, package, requirement = "verl FusedLinearForPPO", "verl", "verl==0.9.1"

    @cached_property
    def function(self) -> Callable[..., Any]:
        # The file imports Liger's function if Liger is installed, which fails without Triton.
        stub = SimpleNamespace(LigerFusedLinearScaledCrossEntropyFunction=None)
        with _in_place_of({"liger_kernel": _package_at("liger_kernel", Path()), "liger_kernel.ops": stub}):
            file = _folder("verl") / "utils" / "experimental" / "torch_functional.py"
            return runpy.run_path(str(file))["FusedLinearForPPO"]()

    def log_prob(self, hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.function(hidden, weight, target)


class VerlTriton(Peer):
    """verl's Triton linear_cross_entropy, the call that other RL codebases copied."""

    name, package, requirement, needs_cuda = "verl Triton", "verl", "verl==0.9.1", True

    @cached_property
    def function(self) -> Callable[..., Any]:
        device: Any = SimpleNamespace(
            is_cuda_available=True,
            get_device_name=lambda: "cuda",
            get_torch_device=lambda: torch.cuda,
            get_device_capability=torch.cuda.get_device_capability,
        )
        root = _folder("verl")
        # `import verl` needs ray. The stand-ins stay: verl's functions import their kernels when called.
        for name in ("verl", "verl.utils", "verl.utils.kernel"):
            sys.modules[name] = _package_at(name, root.joinpath(*name.split(".")[1:]))
        sys.modules["verl.utils.device"] = device
        return importlib.import_module("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy

    def log_prob(self, hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.function(hidden, weight, target, 1.0, "none", None)


class TrlChunked(Peer):
    """TRL's chunked log-probs; as in its trainer, ignored tokens are dropped only on GPUs."""

    name, package, requirement, takes_ignored = "TRL chunked log-prob", "trl", "trl==1.16.0", True
    vocabulary_chunk = 32768  # as in its trainer
    source = ("trl.kernels.chunked_logprob", "ChunkedLogProbFunction.apply")

    def log_prob(self, hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
        options = (1.0, self.vocabulary_chunk, None, 1.0, ("entropy",))
        if not hidden.is_cuda:
            return self.function(hidden, weight, None, target.clamp(min=0), *options)[:2]
        kept = target != IGNORED
        log_prob, entropy = self.function(hidden[kept], weight, None, target[kept], *options)[:2]
        return tuple(x.new_zeros(target.shape).masked_scatter(kept, x) for x in (log_prob, entropy))


class Quack(CrossEntropy):
    """Dao-AILab's quack: the sum or mean of cross-entropies."""

    name, package, requirement, needs_cuda = "quack", "quack", "quack-kernels==0.6.5", True
    quick, operations = False, (CROSS_ENTROPY,)
    source = ("quack.linear_cross_entropy", "chunked_linear_cross_entropy")


@contextmanager
def _in_place_of(modules: dict[str, Any]) -> Iterator[None]:
    """Replace modules by these within a context."""
    kept = {name: sys.modules.pop(name) for name in modules if name in sys.modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
        sys.modules.update(kept)


def _package_at(name: str, folder: Path) -> ModuleType:
    """Return a package of the modules in a folder, without running its own code."""
    spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    return importlib.util.module_from_spec(spec)


def _folder(package: str) -> Path:
    """Return the folder of an installed package without importing it."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


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
