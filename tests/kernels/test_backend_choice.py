"""Which backend is taken: by argument, environment and table, on made-up machines; and the program that times them."""

import re
import subprocess
import sys

import pytest
import torch

from exgrpo.kernels import backend_choice, dispatch, extension, measure
from exgrpo.kernels.dispatch import automatic, requested
from exgrpo.kernels.timing import Shape
from exgrpo.kernels.timing import make_workload as make

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LARGE = backend_choice.LARGE + 1


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Everything is installed and built, nothing is interpreted, no variable of ours is set."""
    for name in ("EXGRPO_BACKEND", "EXGRPO_DEBUG", "TRITON_INTERPRET", backend_choice.TABLE.environment):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(dispatch, "TRITON_INSTALLED", True)
    monkeypatch.setattr(extension, "MISSING", "")
    monkeypatch.setattr(backend_choice, "architecture", lambda device: "cpu" if device.type == "cpu" else "sm_90")
    backend_choice.TABLE.forget()
    yield
    backend_choice.TABLE.forget()


@pytest.fixture
def table(monkeypatch, tmp_path):
    """Lays a table over the shipped one."""

    def lay(text):
        path = tmp_path / "own.toml"
        path.write_text(text, encoding="utf-8")
        monkeypatch.setenv(backend_choice.TABLE.environment, str(path))
        backend_choice.TABLE.forget()

    return lay


@pytest.mark.parametrize("logits", [0, LARGE])
def test_auto_is_the_extension_on_cpus_and_triton_on_gpus(logits, monkeypatch):
    assert automatic(CPU, torch.float32, logits) == "cpu"
    assert automatic(CUDA, torch.float16, logits) == "triton"
    monkeypatch.setattr(dispatch, "TRITON_INSTALLED", False)
    monkeypatch.setattr(extension, "MISSING", "the compiled extension was not built")
    assert automatic(CPU, torch.float32, logits) == automatic(CUDA, torch.bfloat16, logits) == "torch"


def test_auto_is_the_product_in_cuda_for_large_calls_on_hopper_where_it_is_built(monkeypatch):
    binding = pytest.importorskip("exgrpo.kernels.cuda_chunks.binding", reason="triton is not installed")
    for reason, taken in (("", "cuda"), ("its library was not built", "triton")):
        monkeypatch.setattr(binding, "unavailable", lambda device, reason=reason: reason)
        assert automatic(CUDA, torch.bfloat16, LARGE) == taken
        assert automatic(CUDA, torch.bfloat16, 1) == "triton"
    monkeypatch.setattr(binding, "unavailable", lambda device: "")
    monkeypatch.setattr(backend_choice, "architecture", lambda device: "sm_100")
    assert automatic(CUDA, torch.bfloat16, LARGE) == "triton"


def test_a_table_of_ones_own_chooses_by_architecture_dtype_and_size(table):
    table("""
[cpu.bfloat16]
backends = ["torch"]
[cpu.bfloat16.large]
backends = ["cuda", "cpu", "torch"]
[sm_90.float16]
backends = ["cpu"]
""")
    assert automatic(CPU, torch.bfloat16, 1) == "torch"
    assert automatic(CPU, torch.bfloat16, LARGE) == "cpu"  # there is no cuda on a CPU
    assert automatic(CPU, torch.float32, 1) == "cpu"
    assert automatic(CUDA, torch.float16, 1) == "torch"  # none of the list can compute there
    assert automatic(CUDA, torch.bfloat16, 1) == "triton"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[cpu]\nbackends = []", "cpu.backends: it is []; expected a list of torch, triton, cpu, cuda"),
        ('[cpu]\nbackends = "torch"', "cpu.backends: it is 'torch'; expected a list of"),
        ('[cpu.float32.huge]\nbackends = ["cpu"]', "cpu.float32.huge: unknown key; expected backends, small, large"),
        ('[gpu]\nbackends = ["cpu"]', "gpu: unknown architecture; expected default, cpu, sm_NN or gfxNNN"),
    ],
)
def test_malformed_tables_are_refused(text, problem, table):
    table(text)
    with pytest.raises(ValueError, match="backend table .*" + re.escape(problem)):
        automatic(CPU, torch.float32, 1)


def test_a_backend_that_cannot_run_says_why(monkeypatch):
    with pytest.raises(RuntimeError, match="backend='cpu': it needs a CPU; the tensors are on cuda; expected auto or"):
        requested("cpu", CUDA)
    with pytest.raises(RuntimeError, match="backend='triton': it needs a GPU, or TRITON_INTERPRET=1 .* on cpu"):
        requested("triton", CPU)
    with pytest.raises(RuntimeError, match="backend='cuda': it needs a GPU; the tensors are on cpu"):
        requested("cuda", CPU)
    binding = pytest.importorskip("exgrpo.kernels.cuda_chunks.binding", reason="triton is not installed")
    monkeypatch.setattr(binding, "unavailable", lambda device: "its library was not built")
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


def test_measured_tables_put_the_fastest_first(tmp_path, monkeypatch):
    """With a made-up clock, by which the later calls of a round are the faster ones, and torch under two names."""
    ticks = iter(range(10_000, 0, -1))
    output = tmp_path / "choice.toml"
    monkeypatch.setattr(dispatch, "unavailable", lambda name, _: "" if name in ("torch", "triton") else "not here")
    monkeypatch.setattr(
        measure, "make_workload", lambda shape, dtype, device, name: make(shape, dtype, device, "torch")
    )
    shapes = [Shape(4, 3, 5), Shape(1025, 2, 1024)]
    measure.tabulate(["float32"], shapes, CPU, lambda call: float(next(ticks)), output)
    written = output.read_text(encoding="utf-8")
    sections = backend_choice.TABLE.read(output)["cpu"]["float32"]
    assert sections["small"]["backends"] == sections["large"]["backends"] == ["triton", "torch"]
    assert "(4, 3, 5): torch " in written
    monkeypatch.setenv(backend_choice.TABLE.environment, str(output))
    backend_choice.TABLE.forget()
    assert dispatch.automatic(CPU, torch.float32, 1) == "triton"


def test_the_program_writes_a_table(tmp_path):
    output = tmp_path / "folder" / "choice.toml"
    command = [sys.executable, "-W", "ignore", "-m", "exgrpo.kernels.measure", "--output", str(output)]
    options = ["--dtype", "float32", "--shapes", "4,16,128"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"{output}\n")
    (of_machine,) = backend_choice.TABLE.read(output).values()
    assert "torch" in of_machine["float32"]["small"]["backends"]
