import subprocess
import sys

import pytest
import torch

from exgrpo.kernels import dispatch, linear_log_prob, linear_policy_loss, ops, sequence_entropy
from exgrpo.kernels.dispatch import backend_name

from .support import error, make_case, make_tokens

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_auto_is_torch_on_cpus_and_triton_on_gpus(monkeypatch):
    monkeypatch.delenv("EXGRPO_BACKEND", raising=False)
    monkeypatch.setattr(dispatch, "TRITON_INSTALLED", True)
    assert backend_name("auto", CPU) == "torch"
    assert backend_name("auto", CUDA) == "triton"
    monkeypatch.setattr(dispatch, "TRITON_INSTALLED", False)
    assert backend_name("auto", CUDA) == "torch"


def test_a_backend_that_cannot_run_says_why(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(dispatch, "TRITON_INSTALLED", False)
    with pytest.raises(RuntimeError, match="backend='triton': triton is not installed; expected auto or torch"):
        backend_name("triton", CUDA)
    monkeypatch.setattr(dispatch, "TRITON_INSTALLED", True)
    with pytest.raises(RuntimeError, match="backend='triton': it needs a GPU, or TRITON_INTERPRET=1 .* on cpu"):
        backend_name("triton", CPU)


def test_environment_decides_where_the_caller_does_not(monkeypatch):
    monkeypatch.setenv("EXGRPO_BACKEND", "reference")
    assert backend_name("auto", CPU) == "reference"
    assert backend_name("torch", CPU) == "torch"
    monkeypatch.setenv("EXGRPO_BACKEND", "auto")
    assert backend_name("auto", CPU) == "torch"
    monkeypatch.setenv("EXGRPO_BACKEND", "fast")
    with pytest.raises(ValueError, match="EXGRPO_BACKEND=fast: expected auto, torch, triton or reference"):
        backend_name("auto", CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference_keeps_the_contract(dtype, monkeypatch):
    """On request the oracle answers the public functions, in the dtypes of the contract, without the chunked code."""
    case = make_case((3, 8), 16, 30, dtype, "cpu", bias=True)
    old, advantage, replayed = make_tokens(case)
    arguments = {"replayed": replayed[:, 0], "mask": old < -1.0, "normalizer": 5.0, "entropy_coef": 0.1}
    ours = case.log_prob(), case.policy_loss(old, advantage, **arguments)
    monkeypatch.delattr(ops, "linear_log_prob")
    monkeypatch.delattr(ops, "linear_policy_loss")
    oracle = case.log_prob(backend="reference"), case.policy_loss(old, advantage, backend="reference", **arguments)
    for mine, true in zip(ours, oracle, strict=True):
        assert type(mine) is type(true)
        for a, b in zip(mine, true, strict=True):
            assert a.dtype == b.dtype == torch.float32
            assert a.shape == b.shape
            assert dtype != torch.float32 or error(a, b) < 1e-4
    bounds = torch.tensor([0, 8])
    mean = sequence_entropy(case.hidden[0], case.weight, case.target[0], bounds, bias=case.bias, backend="reference")
    assert mean.dtype == torch.float32


def test_reference_has_no_vocab_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        group = torch.distributed.group.WORLD
        arguments = torch.zeros(2, 4), torch.zeros(5, 4), torch.zeros(2, dtype=torch.int64)
        with pytest.raises(
            ValueError, match="backend='reference': it has no vocab_group; expected auto, torch or triton"
        ):
            linear_log_prob(*arguments, vocab_group=group, backend="reference")
        one = linear_policy_loss(*arguments, torch.zeros(2), torch.ones(2), vocab_group=group)
        assert one.loss == linear_policy_loss(*arguments, torch.zeros(2), torch.ones(2)).loss
    finally:
        torch.distributed.destroy_process_group()


def test_torch_is_the_only_dependency():
    """Imports and runs with everything else out of reach, and without loading the compiler or the trainer."""
    program = """
import sys
for name in ("numpy", "triton", "transformers", "deepspeed", "datasets", "scipy"):
    sys.modules[name] = None
import torch
from exgrpo.kernels import linear_policy_loss
assert "torch._dynamo" not in sys.modules
assert not any(name.startswith("exgrpo.train") for name in sys.modules)
w = torch.randn(5, 4, requires_grad=True)
t = torch.zeros(3, dtype=torch.int64)
linear_policy_loss(torch.randn(3, 4), w, t, torch.zeros(3), torch.ones(3)).loss.backward()
assert w.grad.isfinite().all()
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)
