"""The table of backends that is measured, by a made-up clock; and the program that writes it."""

import subprocess
import sys

import pytest
import torch

from exgrpo.kernels import backend_choice, dispatch, measure
from exgrpo.kernels.timing import Shape
from exgrpo.kernels.timing import make_workload as make

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """No table of one's own is in the environment."""
    monkeypatch.delenv(backend_choice.TABLE.environment, raising=False)
    backend_choice.TABLE.forget()
    yield
    backend_choice.TABLE.forget()


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
