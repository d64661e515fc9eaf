"""Which backend is taken: by argument, environment and size, on made-up machines."""

from types import SimpleNamespace

import pytest
import torch

from exgrpo.kernels import backend_choice, dispatch, extension, linear_log_prob
from exgrpo.kernels.dispatch import automatic, requested

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
    with pytest.raises(RuntimeError, match="backend='cpu': it needs a CPU; the tensors are on cuda; expected auto or"):
        requested("cpu", CUDA)
    with pytest.raises(RuntimeError, match="backend='triton': it needs a GPU, or TRITON_INTERPRET=1 .* on cpu"):
        requested("triton", CPU)
    with pytest.raises(RuntimeError, match="backend='cuda': it needs a GPU; the tensors are on cpu"):
        requested("cuda", CPU)
    monkeypatch.setattr(extension, "cuda_unavailable", lambda device: "its library was not built")
    with pytest.raises(RuntimeError, match="backend='cuda': its library was not built; expected auto or torch"):
        requested("cuda", CUDA)
    monkeypatch.setattr(extension, "MISSING", "the compiled extension was not built")
    with pytest.raises(RuntimeError, match="backend='cpu': the compiled extension was not built; expected auto or"):
        requested("cpu", CPU)
    monkeypatch.setattr(dispatch, "TRITON_INSTALLED", False)
    for name in ("triton", "cuda"):
        with pytest.raises(RuntimeError, match=f"backend='{name}': triton is not installed; expected auto or torch"):
            requested(name, CUDA)


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
