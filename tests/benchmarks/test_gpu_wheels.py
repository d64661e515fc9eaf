"""Wheels for a machine without a network: the list, the commands, the pieces."""

import io
import re
import subprocess
import zipfile

import pytest
from packaging.requirements import Requirement

from benchmarks.gpu_day import wheels
from benchmarks.gpu_day.needs import groups, pins
from benchmarks.gpu_day.runner import Log


def write_wheel(folder, name, requires=(), size=0):
    """A wheel that pip installs, with a module of so many bytes."""
    module = name.replace("-", "_")
    info = f"{module}-1.0.dist-info"
    metadata = "".join(f"Requires-Dist: {one}\n" for one in requires)
    path = folder / f"{module}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as files:
        files.writestr(f"{module}.py", f"x = '{'a' * size}'\n")
        files.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{metadata}")
        files.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        files.writestr(f"{info}/RECORD", f"{module}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return path


@pytest.fixture
def wanted(monkeypatch):
    """Sets what the parts want; nothing is installed, and no version was tried."""

    def of(**requirements):
        found = {name: [Requirement(line) for line in lines] for name, lines in requirements.items()}
        monkeypatch.setattr(wheels, "groups", lambda: {name: found.get(name, []) for name in wheels.GROUPS})

    monkeypatch.setattr(wheels, "installed", dict)
    monkeypatch.setattr(wheels, "pins", lambda: {"deepspeed": "0.19.8", "torch": "2.13.0"})
    return of


def test_the_list_has_sizes_versions_and_what_wheels_need(tmp_path, wanted):
    wanted(train=["deepspeed>=0.19.8,<0.20", "numpy>=2.3"], peers=["verl==0.9.1"], gpu_peers=["quack-kernels==0.6.5"])
    write_wheel(tmp_path, "deepspeed", ["hjson", "torch", 'nothing; extra == "dev"'], 3 << 20)
    write_wheel(tmp_path, "verl", ["ray"])  # peers are used without what they depend on
    there = tmp_path / "there.txt"
    there.write_text("numpy==2.5.2\nrich==15.0.0\n")
    said = wheels.plan(tmp_path, there)
    lines = {line.split()[0]: line for line in said.splitlines()}
    assert {"deepspeed==0.19.8", "hjson", "quack-kernels==0.6.5", "verl==0.9.1"} <= lines.keys()
    assert not {"torch", "numpy", "ray", "nothing"} & {re.split("[=<>]", name)[0] for name in lines} - {"torch"}
    assert "3.00 MiB   for train" in lines["deepspeed==0.19.8"]
    assert "not fetched   for deepspeed" in lines["hjson"]
    script = (tmp_path / "fetch.sh").read_text()
    assert all(name in script for name in ("deepspeed==0.19.8", "hjson", "quack-kernels==0.6.5"))
    assert subprocess.run(["sh", "-n", tmp_path / "fetch.sh"], check=False).returncode == 0
    assert "do not fit" not in said
    write_wheel(tmp_path, "hjson", ["deepspeed>=2"])
    assert "They do not fit together: hjson 1.0 needs deepspeed>=2, and 1.0 is there." in wheels.plan(tmp_path, there)


def test_pieces_put_together_are_the_same_bytes(tmp_path, wanted):
    small = write_wheel(tmp_path, "small")
    large = write_wheel(tmp_path, "large", ["hjson"], size=(2 << 20) + 12345)
    before = {path.name: path.read_bytes() for path in (small, large)}
    subprocess.run(["sh", "-c", wheels.CUT.replace(f"{wheels.PIECE}M", "1M")], cwd=tmp_path, check=True)
    assert [path.name for path in sorted(tmp_path.glob("large*"))] == [f"{large.name}.piece.00{i}" for i in range(3)]
    assert small.exists()
    assert wheels.sizes(tmp_path) == {name.split("-")[0]: len(content) for name, content in before.items()}
    into = tmp_path / "into"
    into.mkdir()
    assert {path.name: path.read_bytes() for path in wheels.joined(tmp_path, into)} == before
    wanted(train=["large"])
    (tmp_path / "there.txt").touch()
    assert "hjson " in wheels.plan(tmp_path, tmp_path / "there.txt")  # what a wheel in pieces needs is read, too
    (tmp_path / f"{large.name}.piece.002").unlink()
    with pytest.raises(ValueError, match=f"{large.name} is not whole: 2 pieces"):
        wheels.joined(tmp_path, into)


def test_wheels_are_installed_for_the_parts_alone(tmp_path):
    write_wheel(tmp_path, "peer-of-nobody")
    wheels.install(tmp_path, tmp_path / "packages", Log(io.StringIO()))
    assert (tmp_path / "packages" / "peer_of_nobody.py").exists()
    with pytest.raises(ValueError, match="there is no wheel in"):
        wheels.install(tmp_path / "packages", tmp_path / "more", Log(io.StringIO()))


def test_what_parts_want_comes_from_the_project():
    found = groups()
    assert {"deepspeed", "math-verify", "transformers"} <= {one.name for one in found["train"]}
    assert {"trl", "liger-kernel", "cut-cross-entropy", "verl"} <= {one.name for one in found["peers"]}
    assert [one.name for one in found["vllm"]] == ["vllm"]
    assert set(wheels.GROUPS) <= found.keys()
    assert pins()["deepspeed"]
