import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import exgrpo
from exgrpo.kernels import backend_choice, dispatch, linear_log_prob, linear_policy_loss, self_test
from exgrpo.kernels.__main__ import main


def test_a_line_for_each_backend():
    """python -m exgrpo.kernels: each is right, or says why it is not there."""
    run = subprocess.run([sys.executable, "-W", "ignore", "-m", "exgrpo.kernels"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.startswith(f"exgrpo {exgrpo.__version__} in {Path(exgrpo.__file__).parents[1]}, torch ")
    _, backends, choices = run.stdout.split("\n\n")
    lines = [line.split(maxsplit=2) for line in backends.splitlines()[1:]]
    assert [name for device, name, _ in lines if device == "cpu"] == list(dispatch.BACKENDS)
    assert all(text.startswith(("right", "not available: ", "plain PyTorch")) for *_, text in lines)
    choice = r"(cpu|cuda) +((?:(?:bfloat|float)\d+ )+) *(\w+) +(\w+) +(\w.+)"
    found = [re.fullmatch(choice, line).groups() for line in choices.splitlines()[1:]]
    taken = {(device, name) for device, _, small, large, _ in found for name in (small, large)}
    assert taken <= {(device, name) for device, name, text in lines if not text.startswith("not")}
    dtypes = [(device, dtype) for device, dtypes, *_ in found for dtype in dtypes.split()]
    assert len(dtypes) == len(set(dtypes)) == 4 * len({device for device, *_ in lines})


def test_the_program_says_what_auto_takes_on_hopper_and_why(monkeypatch, capsys):
    """On a made-up machine whose driver is too old for the library."""
    refused = "_cuda.so needs a driver of CUDA 12 or newer"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(backend_choice, "architecture", lambda device: "sm_90" if device.type == "cuda" else "cpu")
    monkeypatch.setattr(self_test, "fault", lambda *_: "")
    monkeypatch.setattr(dispatch, "unavailable", lambda name, device: refused if name == "cuda" else "")
    assert main([]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "GPU: NVIDIA H100 80GB HBM3, sm_90" in printed
    assert f"cuda  cuda    not available: {refused}" in printed
    assert printed[-2:] == [
        "cuda  bfloat16                          triton  triton  cuda cannot be used, see above",
        "cuda  float16 float32 float64           triton  triton  cuda multiplies bfloat16 alone",
    ]
    monkeypatch.setattr(dispatch, "unavailable", lambda name, device: "")
    monkeypatch.setenv("EXGRPO_BACKEND", "torch")
    assert main([]) == 0
    *_, choice, _, setting = capsys.readouterr().out.splitlines()
    assert (
        choice
        == "cuda  bfloat16                          triton  cuda    cuda is the fastest for large calls on Hopper"
    )
    assert setting == "EXGRPO_BACKEND=torch is set, and decides instead of auto"


def test_reference_has_no_vocab_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        group = torch.distributed.group.WORLD
        arguments = torch.zeros(2, 4), torch.zeros(5, 4), torch.zeros(2, dtype=torch.int64)
        with pytest.raises(
            ValueError, match="backend='reference': it has no vocab_group; expected auto, torch, triton, cpu or cuda"
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
