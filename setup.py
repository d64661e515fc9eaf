"""Compiled parts: `exgrpo/kernels/_C.abi3.so` for CPUs and, with nvcc, `exgrpo/kernels/cuda_chunks/_cuda.so`.

Two environment variables, each auto, force or skip, select them:

- EXGRPO_BUILD: the extension for CPUs. auto builds it if a C++17 compiler and torch are installed, and otherwise prints
  one message: the package is pure Python then.
- EXGRPO_CUDA: the kernels for Hopper GPUs. auto builds them if nvcc is on PATH or in CUDA_HOME and supports these, and
  otherwise prints one message.

The extension uses LibTorch's stable ABI: one file for every torch from 2.10 on and every Python from 3.11 on. It is
built with the headers of the installed torch, so without isolation: `pip install --no-build-isolation .` That torch
must satisfy pyproject.toml, or pip would replace it.

`exgrpo/kernels/build.json` records what was not built, and why, since pip does not show the output of a build.
"""

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError

# setuptools makes its vendored `packaging` importable.
from packaging.requirements import Requirement  # isort: skip

ROOT = Path(__file__).parent
CHOICES = ("auto", "force", "skip")
AGAIN = "then use pip install --no-build-isolation"
RECORD = "exgrpo/kernels/build.json"
"""Why a compiled file is not there, by its name; empty where it is."""

CPU_FLAGS = [
    "-std=c++17",
    "-O3",
    "-DNDEBUG",
    "-fPIC",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
    "-DTORCH_TARGET_VERSION=0x020a000000000000",
]

AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma"]
VARIANTS = {
    "baseline": [],
    "avx2": ["-mavx2", "-mfma"],
    "avx512": AVX512,
    "avx512bf16": [*AVX512, "-mavx512bf16"],
    "amx": [*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"],
}
"""Flags of each instruction set. Where the compiler knows them, HAVE_<NAME> is defined for all sources."""

SOURCES = {
    "csrc/cpu/kept.cpp": ("baseline", "avx2", "avx512"),
    "csrc/cpu/product.cpp": ("avx512bf16", "amx"),
    "csrc/cpu/rows.cpp": ("baseline", "avx2", "avx512"),
    "csrc/cpu/tokens.cpp": ("baseline", "avx2", "avx512"),
}
"""The variants of a source: it is compiled once for each, with EXGRPO_VARIANT defined as its name. Others: baseline."""

CUDA_FLAGS = ["-std=c++17", "-O3", "-DNDEBUG", "-Xcompiler", "-fPIC"]
CUDA_SOURCE, CUDA_TARGET = "csrc/cuda/product.cu", "arch=compute_90a,code=sm_90a"
CUDA_PROBE = "#include <cudaTypedefs.h>\n#include <cuda_runtime.h>\n__global__ void probe() {}\n"


def refuse(reason: str) -> NoReturn:
    """Ends with one line; an error of setuptools would come with a traceback."""
    sys.exit(f"error: {reason}")


def switch(name: str) -> str:
    """Return the value of an environment variable."""
    value = os.environ.get(name, "auto")
    if value not in CHOICES:
        refuse(f"{name}={value}: expected {', '.join(CHOICES[:-1])} or {CHOICES[-1]}")
    return value


def wanted(name: str, missing: str) -> bool:
    """True if the part that ``name`` switches is to be built; ``missing`` names the obstacle, empty for none."""
    value = switch(name)
    if value == "force" and missing:
        refuse(f"{name}=force: {missing}")
    return value != "skip" and not missing


def reason(name: str, missing: str) -> str:
    """Why what ``name`` switches is not built; empty where it is."""
    return f"{name}=skip was set; unset it" if switch(name) == "skip" else missing


def compiler() -> list[str]:
    """The C++ compiler and its arguments; empty where there is none."""
    named = shlex.split(os.environ.get("CXX", ""))
    candidates = [named] if named else [["c++"], ["g++"], ["clang++"]]
    return next((command for command in candidates if shutil.which(command[0])), [])


def compiles(flags: list[str]) -> bool:
    """True if the compiler takes these flags and can test a processor for them: clang 17 cannot for amx-tile."""
    asked = "".join(f' && __builtin_cpu_supports("{flag[2:]}")' for flag in flags if flag.startswith("-m"))
    source = f"bool probe() {{ return true{asked}; }}"
    command = [*compiler(), *flags, "-x", "c++", "-c", "-", "-o", os.devnull]
    return subprocess.run(command, input=source.encode(), capture_output=True).returncode == 0


def torch_folder() -> Path | None:
    """Return the folder of the installed torch."""
    spec = find_spec("torch")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def cpu_missing() -> str:
    """Return the missing requirement of the extension for CPUs; empty if there is none."""
    if not compiler():
        return "there is no C++ compiler; install g++ or clang++, or name one by CXX"
    if not compiles(["-std=c++17"]):
        return f"{shlex.join(compiler())} does not compile C++17; name another compiler by CXX"
    if torch_folder() is None:
        return "torch is not here at build time; install it first"
    return ""


def check_torch() -> None:
    """Refuses a torch that pip would replace once the extension is built with it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = next(text for text in project["dependencies"] if Requirement(text).name == "torch")
    installed = next((one.version for one in distributions(name="torch")), None)
    if installed and not Requirement(needed).specifier.contains(installed, prereleases=True):
        refuse(f"torch {installed} is installed, and exgrpo needs {needed}: pip install '{needed}', {AGAIN}")


def nvcc() -> str | None:
    """The CUDA compiler."""
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc", path=str(Path(home, "bin"))) if home else shutil.which("nvcc")


def cuda_command(source: Path, made: Path) -> list[str]:
    """Return the command that compiles a source for the target."""
    return [str(nvcc()), *CUDA_FLAGS, "-gencode", CUDA_TARGET, "-c", str(source), "-o", str(made)]


@cache
def cuda_failure() -> str:
    """Return nvcc's error for a probe of the target; empty if it compiles."""
    with TemporaryDirectory() as folder:
        probe = Path(folder, "probe.cu")
        probe.write_text(CUDA_PROBE, encoding="utf-8")
        command = cuda_command(probe, probe.with_suffix(".o"))
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if not done.returncode:
        return ""
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()] or [f"exit status {done.returncode}"]
    return next((line for line in lines if "error" in line or "fatal" in line), lines[-1])


def cuda_missing() -> str:
    """Return the missing requirement of the kernels for GPUs; empty if there is none."""
    if not nvcc():
        return "there is no nvcc; install CUDA, and put nvcc on PATH or set CUDA_HOME"
    failure = cuda_failure()
    return failure and f"{nvcc()} cannot compile {CUDA_SOURCE}, set CUDA_HOME to another CUDA: {failure}"


def variants() -> dict[str, list[str]]:
    """Return the instruction sets of this architecture that the compiler supports."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return {"baseline": []}
    return {name: flags for name, flags in VARIANTS.items() if compiles(flags)}


def cpu_objects(folder: Path) -> Iterator[tuple[list[str], Path]]:
    """The command for each object of the extension, and the object."""
    torch = torch_folder()
    assert torch is not None
    known = variants()
    common = [*compiler(), *CPU_FLAGS, *(f"-DHAVE_{name.upper()}" for name in known)]
    common += ["-isystem", str(torch / "include"), *shlex.split(os.environ.get("CXXFLAGS", ""))]
    for source in sorted([*ROOT.glob("csrc/*.cpp"), *ROOT.glob("csrc/cpu/*.cpp")]):
        for variant in SOURCES.get(source.relative_to(ROOT).as_posix(), ("baseline",)):
            if variant in known:
                made = folder / f"{source.stem}.{variant}.o"
                own = [*known[variant], f"-DEXGRPO_VARIANT={variant}"]
                yield [*common, *own, "-c", str(source), "-o", str(made)], made


def cuda_objects(folder: Path) -> Iterator[tuple[list[str], Path]]:
    """The command for each object of the kernels for GPUs, and the object."""
    made = folder / f"{Path(CUDA_SOURCE).stem}.cuda.o"
    yield cuda_command(ROOT / CUDA_SOURCE, made), made


def execute(command: list[str]) -> None:
    """Run a compiler."""
    sys.stdout.write(f"{shlex.join(command)}\n")  # in one write: parallel compilations print, too
    sys.stdout.flush()
    if subprocess.run(command).returncode:
        remedy = "EXGRPO_BUILD=skip and EXGRPO_CUDA=skip build without it"
        raise CompileError(f"this failed, see above ({remedy}): {shlex.join(command)}")


class BuildExtensions(build_ext):
    """Compiles each object by a command of its own, several at once."""

    def get_ext_filename(self, fullname: str) -> str:
        """Without the name of an architecture: the loaders look for this one."""
        suffix = ".so" if CUDA.name.endswith(fullname) else ".abi3.so"
        return fullname.replace(".", "/") + suffix

    def build_extension(self, extension: Extension) -> None:
        """Compiles and links."""
        folder = Path(self.build_temp)
        folder.mkdir(parents=True, exist_ok=True)
        objects = list((cuda_objects if extension is CUDA else cpu_objects)(folder))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(execute, (command for command, _ in objects)))
        target = Path(self.get_ext_fullpath(extension.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        inputs = [str(made) for _, made in objects]
        if extension is CUDA:
            # nvcc links code of a default GPU in, too, unless it is given the target.
            options = ["-shared", "-cudart", "static", "-gencode", CUDA_TARGET, "-Xlinker", "-s"]
            execute([str(nvcc()), *options, *inputs, "-o", str(target)])
        else:
            # No rpath to torch's libraries: they are loaded before the extension.
            libraries = [f"-L{torch_folder()}/lib", "-ltorch_cpu"]
            execute([*compiler(), "-shared", *inputs, *libraries, "-o", str(target)])


class BuildPython(build_py):
    """Says and records what was not built, and why."""

    def run(self) -> None:
        """Copies the Python files."""
        if MISSING and switch("EXGRPO_BUILD") == "auto":
            self.warn(f"exgrpo will be pure Python, with slower kernels on CPUs: {MISSING}, {AGAIN}")
        if CUDA_MISSING:
            self.warn(f"exgrpo will be without its CUDA C++ kernels: {CUDA_MISSING}")
        super().run()
        record = Path(ROOT if self.editable_mode else self.build_lib, RECORD)
        missing = {
            "_C.abi3.so": reason("EXGRPO_BUILD", MISSING),
            "_cuda.so": reason("EXGRPO_CUDA", CUDA_MISSING),
        }
        record.write_text(json.dumps(missing, indent=1) + "\n", encoding="utf-8")


CPU = Extension("exgrpo.kernels._C", [], py_limited_api=True)
CUDA = Extension("exgrpo.kernels.cuda_chunks._cuda", [], py_limited_api=True)
MISSING = cpu_missing()
CUDA_MISSING = "" if switch("EXGRPO_CUDA") == "skip" else cuda_missing()
EXTENSIONS = [CPU] if wanted("EXGRPO_BUILD", MISSING) else []
if EXTENSIONS:
    check_torch()
if wanted("EXGRPO_CUDA", CUDA_MISSING) and (ROOT / CUDA_SOURCE).exists():
    EXTENSIONS.append(CUDA)

# Hide setuptools' advice about other folders named exgrpo, which pip since 26 shows in a box like an error.
warnings.filterwarnings("ignore", "Editable installation")
setup(
    ext_modules=EXTENSIONS,
    cmdclass={"build_ext": BuildExtensions, "build_py": BuildPython},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if EXTENSIONS else {},
)
