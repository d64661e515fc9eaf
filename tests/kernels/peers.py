"""Other people's implementations, each with a loader that gives a function of a case.

What cannot run in this process skips the test; an import that fails for another reason fails it. A loader gets
the test's monkeypatch for what has to stay in place while the function and its backward run.
"""

import importlib
import os
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks.peers import CutCrossEntropy, LigerPolicyLoss, TorchCrossEntropy, TrlChunked, VerlTorch

INTERPRETED = bool(os.environ.get("TRITON_INTERPRET"))
VOCABULARY_CHUNK = 512


def require(*packages):
    for package in packages:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


def require_interpreter():
    require("triton")
    if not INTERPRETED:
        pytest.skip("its Triton kernels are compared in the interpreter, with TRITON_INTERPRET=1 in the environment")


def verl_torch(monkeypatch):
    """verl's FusedLinearForPPO: log-probs and entropies."""
    require("verl")
    function = VerlTorch().function
    return lambda case: function(case.hidden, case.weight, case.target, case.options["temperature"])


def verl_triton(monkeypatch):
    """verl's Triton linear_cross_entropy: log-probs and entropies; hidden states of a multiple of 128 channels."""
    require("verl")
    require_interpreter()
    # `import verl` wants ray, so its packages are replaced by empty ones, and so is the module that looks for a GPU.
    root = Path(find_spec("verl").submodule_search_locations[0])
    for name in ("verl", "verl.utils", "verl.utils.kernel"):
        package = ModuleType(name)
        package.__path__ = [str(root.parent.joinpath(*name.split(".")))]
        monkeypatch.setitem(sys.modules, name, package)
    device = ModuleType("verl.utils.device")
    device.is_cuda_available = False  # no tensor memory accelerator in the interpreter
    device.get_device_name = device.get_device_capability = device.get_torch_device = None
    monkeypatch.setitem(sys.modules, "verl.utils.device", device)
    # It asserts that tensors are on a GPU, and marks ranges for a profiler of GPUs.
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda.nvtx, "range", lambda name: nullcontext())
    function = importlib.import_module("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy
    return lambda case: function(case.hidden, case.weight, case.target, case.options["temperature"], "none", None)


def trl_chunked(monkeypatch):
    """TRL's chunked log-probs and entropies."""
    require("trl")
    function = TrlChunked().function

    def log_prob(case):
        temperature, softcap = case.options["temperature"], case.options["softcap"]
        tensors = (case.hidden, case.weight, case.bias, case.target)
        return function(*tensors, temperature, VOCABULARY_CHUNK, softcap, 1.0, ("entropy",))[:2]

    return log_prob


def torch_cross_entropy(monkeypatch):
    """torch.nn.functional.linear_cross_entropy: the sum of cross-entropies."""
    if not hasattr(torch.nn.functional, "linear_cross_entropy"):
        pytest.skip("torch before 2.13 has no linear_cross_entropy")
    function = TorchCrossEntropy().function
    return lambda case: function(case.hidden, case.weight, case.target, reduction="sum")


def cut_cross_entropy(monkeypatch):
    """The compiled variant of Apple's Cut Cross-Entropy, without bias: the sum of cross-entropies."""
    require("cut_cross_entropy")
    if INTERPRETED:
        pytest.skip("torch.compile and Triton's interpreter do not belong in one process")
    if torch.cuda.is_available():
        pytest.skip("on a GPU its backward takes 16-bit inputs alone, and fp32 is compared here")
    function = CutCrossEntropy().function
    return lambda case: function(
        case.hidden, case.weight, case.target, softcap=case.options["softcap"], reduction="sum"
    )


def liger_cross_entropy(monkeypatch):
    """Liger's Triton fused linear cross-entropy: their sum. The interpreter cannot run its softcap."""
    require("liger_kernel")
    require_interpreter()
    operator = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")
    function = operator.LigerFusedLinearCrossEntropyFunction.apply
    class_weight, ignore_index, square_scale, label_smoothing = None, -100, 0.0, 0.0
    options = (class_weight, ignore_index, square_scale, label_smoothing, "sum")
    return lambda case: function(case.hidden, case.weight, case.target, case.bias, *options)[0]


def liger_fused_policy_loss(monkeypatch):
    """Liger's fused linear GRPO loss in plain torch: the loss of [B, L] tokens, and the share of those clipped."""
    require("liger_kernel", "triton")
    module = LigerPolicyLoss().function

    def policy_loss(case, old_log_prob, advantage, mask, clip, loss_type):
        loss = module(
            beta=0.0,
            use_ref_model=False,
            compiled=False,
            temperature=case.options["temperature"],
            epsilon_low=clip[0],
            epsilon_high=clip[1],
            loss_type=loss_type,
            max_completion_length=mask.shape[1],
        )
        tokens = (case.target, mask.float(), advantage, case.bias)
        value, (clipped,) = loss(case.hidden, case.weight, *tokens, old_per_token_logps=old_log_prob)
        return value, clipped

    return policy_loss


def liger_triton_policy_loss(monkeypatch):
    """Liger's Triton GRPO loss, which starts from the logits."""
    require("liger_kernel")
    require_interpreter()
    function = importlib.import_module("liger_kernel.ops.grpo_loss").GrpoLossFunction.apply

    def policy_loss(case, old_log_prob, advantage, mask, clip, loss_type):
        logits = torch.nn.functional.linear(case.hidden, case.weight, case.bias)
        logits = torch.nn.functional.pad(logits, (0, 0, 0, 1))  # those after the last token, which it leaves out
        tokens = (logits, old_log_prob, None, case.target, advantage, mask)
        value, _, clipped = function(*tokens, case.options["temperature"], 0.0, *clip, False, loss_type, mask.shape[1])
        return value, clipped

    return policy_loss
