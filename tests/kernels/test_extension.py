"""How the extension is built, switched off, forced and loaded; in a copy of the sources."""

import json
import os
import shutil
import sys
import tomllib
from pathlib import Path

import pytest

from exgrpo.kernels import extension
from tests.programs import ran

pytest.importorskip("setuptools", reason="setuptools is not installed")

ROOT = Path(__file__).parents[2]
NO_COMPILER = {"CXX": "no-such-compiler"}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("csrc", "exgrpo"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return folder


@pytest.fixture
def build(sources, tmp_path):
    """Builds with some of the environment changed, which fails or does not."""

    def run(fails=False, **environment):
        chosen = {"EXGRPO_CUDA": "skip", **environment}
        command = (sys.executable, "setup.py", "build", "--build-base", tmp_path)
        done = ran(*command, cwd=sources, env={**os.environ, **chosen})
        assert bool(done.returncode) == fails, done.stderr
        return done

    return run


def compiled(folder):
    return [path.name for path in folder.rglob("*.so")]


@pytest.mark.parametrize("name", ["EXGRPO_BUILD", "EXGRPO_CUDA"])
def test_a_wrong_switch_names_the_choices(name, build):
    result = build(fails=True, **{name: "yes"})
    assert f"{name}=yes: expected auto, force or skip" in result.stderr


def test_without_a_compiler_it_is_pure_python_and_says_so_once(build, tmp_path, monkeypatch):
    result = build(**NO_COMPILER)
    assert (result.stdout + result.stderr).count("exgrpo will be pure Python") == 1
    assert "there is no C++ compiler; install g++ or clang++" in result.stdout + result.stderr
    assert list(tmp_path.rglob("extension.py"))
    assert not compiled(tmp_path)
    (package,) = tmp_path.glob("lib*")
    file = package / "exgrpo" / "kernels" / "_C.abi3.so"
    monkeypatch.setattr(sys, "path", [str(package)])  # the package under test may be installed, and whole
    message = "_C.abi3.so was not built when exgrpo was installed: there is no C++ compiler; install g++ or clang++"
    assert extension.why_missing(file, "a compiler", package).startswith(message)


def test_skipped_without_a_word(build, tmp_path):
    result = build(EXGRPO_BUILD="skip")
    assert "exgrpo will be" not in result.stdout + result.stderr
    assert not compiled(tmp_path)
    (record,) = tmp_path.rglob("build.json")
    assert json.loads(record.read_text()) == {
        "_C.abi3.so": "EXGRPO_BUILD=skip was set; unset it",
        "_cuda.so": "EXGRPO_CUDA=skip was set; unset it",
    }


def test_forced_without_a_compiler_is_an_error(build, tmp_path):
    result = build(fails=True, EXGRPO_BUILD="force", **NO_COMPILER)
    assert result.stderr.startswith("error: EXGRPO_BUILD=force: there is no C++ compiler")
    assert len(result.stderr.splitlines()) == 1
    result = build(fails=True, EXGRPO_BUILD="skip", EXGRPO_CUDA="force", CUDA_HOME=str(tmp_path))
    assert "EXGRPO_CUDA=force: there is no nvcc" in result.stderr


CXX = r"""#!/bin/sh
case "$*" in
    *" -c - "*) if grep -q amx-tile; then exit 1; fi;;
    *-DHAVE_AMX*) exit 1;;
esac
while [ $# -gt 0 ]; do [ "$1" = -o ] && : > "$2"; shift; done
exit 0
"""
"""Takes the flags of amx, and cannot ask a processor for it: as clang 17."""


def test_what_the_compiler_cannot_ask_a_processor_for_is_left_out(build, tmp_path):
    compiler = tmp_path / "c++"
    compiler.write_text(CXX)
    compiler.chmod(0o755)
    build(CXX=str(compiler))
    assert compiled(tmp_path) == ["_C.abi3.so"]


NVCC = r"""#!/bin/sh
for refused in {refused}; do
    case "$*" in *$refused*) echo "nvcc fatal   : Unsupported gpu architecture '$refused'" >&2; exit 1;; esac
done
while [ $# -gt 0 ]; do [ "$1" = -o ] && : > "$2"; shift; done
"""


@pytest.fixture
def cuda_home(tmp_path):
    """Where an nvcc is that writes empty objects, but refuses an argument in the words of a real one."""

    def make(refused):
        program = tmp_path / "cuda" / "bin" / "nvcc"
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(NVCC.format(refused=refused))
        program.chmod(0o755)
        return {"EXGRPO_BUILD": "skip", "EXGRPO_CUDA": "auto", "CUDA_HOME": str(tmp_path / "cuda")}

    return make


def test_the_kernels_for_gpus_are_built_where_nvcc_knows_hopper(build, cuda_home, tmp_path):
    old = cuda_home("compute_90a")  # as CUDA 11.8
    result = build(**old)
    assert not compiled(tmp_path)
    said = result.stdout + result.stderr
    assert said.count("Unsupported gpu architecture 'compute_90a'") == 1
    assert "exgrpo will be without its CUDA C++ kernels: " in said
    forced = build(fails=True, **old | {"EXGRPO_CUDA": "force"})
    assert f"EXGRPO_CUDA=force: {old['CUDA_HOME']}/bin/nvcc cannot compile csrc/cuda/" in forced.stderr
    result = build(**cuda_home("compute_100"))
    assert compiled(tmp_path) == ["_cuda.so"]


def test_a_torch_that_pip_would_replace_is_refused_before_anything_is_compiled(build, tmp_path):
    version = "2.10.1"
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    metadata = tmp_path / f"torch-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    result = build(fails=True, PYTHONPATH=str(tmp_path), EXGRPO_BUILD="force")
    assert result.stderr == (
        f"error: torch {version} is installed, and exgrpo needs {needed[0]}: pip install '{needed[0]}', "
        "then use pip install --no-build-isolation\n"
    )
    assert " -c " not in result.stdout
    build(PYTHONPATH=str(tmp_path), EXGRPO_BUILD="skip")


def test_without_torch_it_says_how_to_build(build, tmp_path):
    """As in an isolated build, which would fetch a torch of its own."""
    # Python's site has torch in it, and setuptools: a finder in front hides the one.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, importlib.machinery as m\n"
        "class Hidden(m.PathFinder):\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        return None if name == 'torch' else m.PathFinder.find_spec(name, path, target)\n"
        "sys.meta_path[:] = [Hidden if f is m.PathFinder else f for f in sys.meta_path]\n"
    )
    result = build(PYTHONPATH=str(tmp_path))
    remedy = "torch is not here at build time; install it first, then use pip install --no-build-isolation"
    assert remedy in result.stdout + result.stderr


def test_a_missing_or_broken_file_gives_a_reason(tmp_path):
    missing, broken = extension.FILE.with_name("missing.abi3.so"), tmp_path / "broken.abi3.so"
    told = f"missing.abi3.so is not in {missing.parent}; install exgrpo again by pip install --no-build-isolation"
    assert extension.load(missing).startswith(told)
    broken.write_bytes(b"not a library")
    assert extension.load(broken).startswith("broken.abi3.so cannot be loaded, install again: ")


def test_the_source_folder_knows_of_an_installed_package_that_is_whole(tmp_path, monkeypatch):
    """As in `python -m exgrpo.kernels` in the project's folder, where pip has left metadata of its own."""
    source, site = tmp_path / "source", tmp_path / "site"
    inside = Path("exgrpo", "kernels", "_C.abi3.so")
    for folder, metadata in ((source, "exgrpo.egg-info"), (site, "exgrpo-0.1.0.dist-info")):
        (folder / metadata).mkdir(parents=True)
        name = "PKG-INFO" if metadata.endswith("egg-info") else "METADATA"
        (folder / metadata / name).write_text("Metadata-Version: 2.1\nName: exgrpo\nVersion: 0.1.0\n")
        (folder / inside).parent.mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(source), str(site)])
    assert extension.why_missing(source / inside, "a compiler", source).startswith("_C.abi3.so is not in ")
    (site / inside).touch()
    assert extension.why_missing(source / inside, "a compiler", source) == (
        f"exgrpo is imported from {source}, which has no _C.abi3.so, and the installed package in {site} has it; start "
        "Python in another folder, or use pip install --no-build-isolation --editable ."
    )
