"""Which backend is taken: by argument, environment and size, on made-up machines."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import exgrpo
from exgrpo.kernels import backend_choice, dispatch, extension, linear_log_prob, linear_policy_loss, self_test
from exgrpo.kernels.__main__ import main
from exgrpo.kernels.dispatch import automatic, requested
from tests.programs import python

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LARGE = backend_choice.LARGE + 1


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Everything is installed and built, nothing is interpreted, no variable of ours is set."""
    for name in ("EXGRPO_BACKEND", "EXGRPO_DEBUG", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(dispatch, "TRITON_INSTALLED", True)
    monkeypatch.setattr(extension, "MISSING", "")
    monkeypatch.setattr(backend_choice, "architecture", lambda device: "cpu" if device.type == "cpu" else "sm_90")


@pytest.mark.parametrize("logits", [0, LARGE])
def test_auto_is_the_extension_on_cpus_and_triton_on_gpus(logits, monkeypatch):
    assert automatic(CPU, torch.float32, logits) == "cpu"
    assert automatic(CUDA, torch.float16, logits) == "triton"
    monkeypatch.setattr(dispatch, "TRITON_INSTALLED", False)
    monkeypatch.setattr(extension, "MISSING", "the compiled extension was not built")
    assert automatic(CPU, torch.float32, logits) == automatic(CUDA, torch.bfloat16, logits) == "torch"


# CUDA of the library, the newest one of the driver, the GPU, and why the library is refused.
REFUSED = [
    (12090, 12000, (9, 0), ""),
    (12090, 13010, (9, 0), ""),
    (12090, 0, (9, 0), "there is no NVIDIA driver"),
    (
        *(12090, 11080, (9, 0)),
        "_cuda.so needs a driver of CUDA 12 or newer, and this one supports CUDA 11.8 at most: update it",
    ),
    (
        *(13000, 12080, (9, 0)),
        "_cuda.so needs a driver of CUDA 13 or newer, and this one supports CUDA 12.8 at most: update it, or install "
        "exgrpo anew with nvcc of CUDA 12 and EXGRPO_CUDA=force",
    ),
    (12090, 12080, (10, 0), "it is written for compute capability 9.0 (Hopper); the device has 10.0"),
]


@pytest.mark.parametrize(("runtime", "driver", "capability", "reason"), REFUSED)
def test_auto_is_the_library_in_cuda_for_large_calls_where_driver_and_gpu_take_it(
    runtime, driver, capability, reason, monkeypatch
):
    library = SimpleNamespace(exgrpo_build=lambda: extension.CudaBuild(runtime, driver))
    monkeypatch.setattr(extension, "cuda_missing", lambda: "")
    monkeypatch.setattr(extension, "cuda_library", lambda: library)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert dispatch.unavailable("cuda", CUDA) == reason
    assert automatic(CUDA, torch.bfloat16, LARGE) == ("triton" if reason else "cuda")
    assert automatic(CUDA, torch.bfloat16, 1) == automatic(CUDA, torch.float16, LARGE) == "triton"
    monkeypatch.setattr(backend_choice, "architecture", lambda device: "sm_100")
    assert automatic(CUDA, torch.bfloat16, LARGE) == "triton"


def test_a_backend_that_cannot_run_says_why(monkeypatch):
    def refused(name, device, reason):
        with pytest.raises(RuntimeError, match=f"backend='{name}': {reason}"):
            requested(name, device)

    refused("cpu", CUDA, "it needs a CPU; the tensors are on cuda; expected auto or")
    refused("triton", CPU, "it needs a GPU, or TRITON_INTERPRET=1 .* on cpu")
    refused("cuda", CPU, "it needs a GPU; the tensors are on cpu")
    monkeypatch.setattr(extension, "cuda_unavailable", lambda device: "its library was not built")
    refused("cuda", CUDA, "its library was not built; expected auto or torch")
    monkeypatch.setattr(extension, "MISSING", "the compiled extension was not built")
    refused("cpu", CPU, "the compiled extension was not built; expected auto or")
    monkeypatch.setattr(dispatch, "TRITON_INSTALLED", False)
    for name in ("triton", "cuda"):
        refused(name, CUDA, "triton is not installed; expected auto or torch")


def test_environment_decides_where_the_caller_does_not(monkeypatch):
    monkeypatch.setenv("EXGRPO_BACKEND", "reference")
    assert requested("auto", CPU) == "reference"
    assert dispatch.requested_for_tokens(CPU) == "torch"
    assert requested("torch", CPU) == "torch"
    monkeypatch.setenv("EXGRPO_BACKEND", "auto")
    assert requested("auto", CPU) == "auto"
    monkeypatch.setenv("EXGRPO_BACKEND", "fast")
    with pytest.raises(ValueError, match="EXGRPO_BACKEND=fast: expected auto, torch, triton, cpu, cuda or reference"):
        requested("auto", CPU)
    for name, elsewhere in (("triton", CPU), ("cuda", CPU), ("cpu", CUDA)):  # rewards are on a CPU, whatever trains
        monkeypatch.setenv("EXGRPO_BACKEND", name)
        assert dispatch.requested_for_tokens(elsewhere) == "auto"
    assert dispatch.requested_for_tokens(CPU) == "cpu"


def test_a_choice_is_printed_once(monkeypatch, capfd):
    """Each kind of call under the debug switch; and why a preferred backend is not there."""
    monkeypatch.setattr(extension, "MISSING", "it was not built")
    backend_choice.say.cache_clear()
    head = torch.zeros(4, 8), torch.zeros(20, 8), torch.zeros(4, dtype=torch.int64)
    linear_log_prob(*head, backend="torch")
    assert not capfd.readouterr().err
    for _ in range(2):
        linear_log_prob(*head)
    line = "exgrpo: the torch backend computes on cpu, as cpu is not available: it was not built"
    assert capfd.readouterr().err.splitlines() == [line]
    monkeypatch.setenv("EXGRPO_DEBUG", "1")
    for _ in range(2):
        linear_log_prob(*head, backend="torch")
    line = "exgrpo: linear_log_prob, small, torch.float32 on cpu: torch (torch requested)"
    assert capfd.readouterr().err.splitlines() == [line]
    backend_choice.say.cache_clear()


def test_a_line_for_each_backend():
    """python -m exgrpo.kernels: each is right, or says why it is not there."""
    said = python("-W", "ignore", "-m", "exgrpo.kernels")
    assert said.startswith(f"exgrpo {exgrpo.__version__} in {Path(exgrpo.__file__).parents[1]}, torch ")
    _, backends, choices = said.split("\n\n")
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
    assert choice.endswith("  triton  cuda    cuda is the fastest for large calls on Hopper")
    assert setting == "EXGRPO_BACKEND=torch is set, and decides instead of auto"


def test_reference_has_no_vocab_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        group = torch.distributed.group.WORLD
        arguments = torch.zeros(2, 4), torch.zeros(5, 4), torch.zeros(2, dtype=torch.int64)
        with pytest.raises(ValueError, match="backend='reference': it has no vocab_group; expected auto, torch"):
            linear_log_prob(*arguments, vocab_group=group, backend="reference")
        one = linear_policy_loss(*arguments, torch.zeros(2), torch.ones(2), vocab_group=group)
        assert one.loss == linear_policy_loss(*arguments, torch.zeros(2), torch.ones(2)).loss
    finally:
        torch.distributed.destroy_process_group()


def test_neither_the_compiler_nor_the_trainer_is_loaded():
    names = "[name for name in sys.modules if name.startswith(('torch._dynamo', 'exgrpo.train'))]"
    assert python("-W", "ignore", "-c", f"import sys, exgrpo.kernels; print({names})") == "[]\n"
