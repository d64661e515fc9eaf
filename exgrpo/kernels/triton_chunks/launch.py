"""How a call is launched, by architecture, dtype and width: launch.toml, under a table of the user's own."""

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

ENVIRONMENT = "EXGRPO_LAUNCH_TABLE"
"""Path of a table that is laid over the shipped one."""
SHIPPED = Path(__file__).with_name("launch.toml")
DEFAULT = "default"
DTYPES = ("bfloat16", "float16", "float32", "float64")
FUSABLE = ("bfloat16", "float16")
CLASSES = ("narrow", "wide")
WIDE = 2560
LEAST_BLOCK = 128
MEMORY_SHARE = 16
"""One part of so many of the device's memory is what a chunk's buffers may take."""


@dataclass(frozen=True)
class Launch:
    """Of a kernel with one program per row.

    Attributes:
        block: columns that are worked on at once.
        warps: of a program.
    """

    block: int
    warps: int


@dataclass(frozen=True)
class Tile:
    """Of the product whose epilogue is the softmax.

    Attributes:
        rows: tokens of a tile.
        columns: vocabulary entries of a tile.
        depth: of a step along D.
        warps: of a program.
        stages: steps whose loads are in flight.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Plan:
    """Of a call.

    Attributes:
        fused: whether logits are formed by the product whose epilogue is the softmax, else by the library's.
        chunk_rows: tokens of a chunk.
        rows: of the row kernels.
        tile: of the fused product.
    """

    fused: bool
    chunk_rows: int
    rows: Launch
    tile: Tile


class _Whole(NamedTuple):
    """The whole numbers that a setting may have."""

    least: int
    most: int
    power_of_two: bool = True

    def has(self, value: object) -> bool:
        if type(value) is not int or not self.least <= value <= self.most:
            return False
        return not self.power_of_two or value.bit_count() == 1

    def __str__(self) -> str:
        return f"{'a power of two' if self.power_of_two else 'a whole number'} from {self.least} to {self.most}"


_LOGITS = ("library", "fused")
_WARPS = _Whole(1, 32)
_NUMBERS: dict[str, _Whole] = {"chunk_rows": _Whole(1, 1 << 20, power_of_two=False)}
_TABLES: dict[str, dict[str, _Whole]] = {
    "rows": {"block": _Whole(LEAST_BLOCK, 1 << 16), "warps": _WARPS},
    "tile": {
        "rows": _Whole(16, 512),
        "columns": _Whole(16, 512),
        "depth": _Whole(16, 512),
        "warps": _WARPS,
        "stages": _Whole(1, 8, power_of_two=False),
    },
}
_SETTINGS = ("logits", *_NUMBERS, *_TABLES)
_ARCHITECTURE = re.compile(r"cpu|sm_\d{2,3}|gfx\w{3,4}")


@cache
def plan(device: torch.device, operand: torch.dtype, width: int, vocabulary: int) -> Plan:
    """How a call is launched whose operands are [rows, width] and [vocabulary, width] of dtype ``operand``.

    An unknown GPU gets what the table's default says. The block is no larger than the vocabulary needs.

    Raises:
        ValueError: a table is malformed.
    """
    entry = setting(architecture(device), _dtype_name(operand), shape_class(width))
    fused = entry["logits"] == "fused"
    row_bytes = max(1, vocabulary) * _bytes_per_logit(operand, fused)
    return Plan(
        fused=fused,
        chunk_rows=max(1, min(entry["chunk_rows"], _memory(device) // MEMORY_SHARE // row_bytes)),
        rows=_fitted(entry, vocabulary),
        tile=Tile(**entry["tile"]),
    )


def fitting_block(vocabulary: int) -> int:
    """The smallest block that holds a whole row."""
    return max(LEAST_BLOCK, 1 << (vocabulary - 1).bit_length() if vocabulary > 1 else 1)


def shape_class(width: int) -> str:
    """The class of heads of this width."""
    return "wide" if width >= WIDE else "narrow"


def architecture(device: torch.device) -> str:
    """The name of a GPU's architecture; "cpu" for the interpreter."""
    if device.type != "cuda":
        return device.type
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def setting(name: str, dtype: str, width_class: str) -> dict[str, Any]:
    """Every setting of an architecture, dtype and class, each from the most specific section that has it."""
    of_architecture = table().get(name, {})
    of_dtype = of_architecture.get(dtype, {})
    found: dict[str, Any] = {}
    for section in (table()[DEFAULT], of_architecture, of_dtype, of_dtype.get(width_class, {})):
        found = _laid_over(found, {key: value for key, value in section.items() if key in _SETTINGS})
    return found


@cache
def table() -> dict[str, Any]:
    """The sections by name: the shipped ones under those of EXGRPO_LAUNCH_TABLE.

    Raises:
        ValueError: a table cannot be read, or has an unknown key or an impossible value.
    """
    shipped = read(SHIPPED)
    own = os.environ.get(ENVIRONMENT)
    return _laid_over(shipped, read(Path(own))) if own else shipped


def forget() -> None:
    """Have the tables read again: for tests and for the tuner, which change them."""
    table.cache_clear()
    plan.cache_clear()


def read(path: Path) -> dict[str, Any]:
    """A table as it is written, checked.

    Raises:
        ValueError: it cannot be read, or has an unknown key or an impossible value.
    """
    try:
        sections = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"launch table {path}: {error}; expected a TOML file like {SHIPPED}") from error
    for name, section in sections.items():
        if name != DEFAULT and not _ARCHITECTURE.fullmatch(name):
            _refuse(path, name, "unknown architecture", f"{DEFAULT}, cpu, sm_NN or gfxNNN")
        _check(path, (name,), section)
    return sections


def _check(path: Path, where: tuple[str, ...], section: object) -> None:
    """Raises ValueError unless a section has known keys with possible values; looks into those within."""
    inner = {1: DTYPES, 2: CLASSES}.get(len(where), ()) if where[0] != DEFAULT else ()
    if not isinstance(section, dict):
        _refuse(path, ".".join(where), f"it is {section!r}", "a section of settings")
    for key, value in section.items():
        if key in inner:
            _check(path, (*where, key), value)
            continue
        if key not in _SETTINGS:
            _refuse(path, ".".join((*where, key)), "unknown key", ", ".join((*_SETTINGS, *inner)))
        if key == "logits":
            _check_logits(path, where, value)
        for name, number, allowed in _numbers(path, where, key, value):
            if not allowed.has(number):
                _refuse(path, name, f"it is {number!r}", str(allowed))


def _check_logits(path: Path, where: tuple[str, ...], value: object) -> None:
    name = ".".join((*where, "logits"))
    if value not in _LOGITS:
        _refuse(path, name, f"it is {value!r}", " or ".join(_LOGITS))
    if value == "fused" and not any(dtype in where for dtype in FUSABLE):
        sections = " or ".join(f"[{where[0]}.{dtype}]" for dtype in FUSABLE)
        _refuse(path, name, "only 16-bit operands have a fused product", f"it in {sections}, library here")


def _numbers(path: Path, where: tuple[str, ...], key: str, value: object) -> Iterator[tuple[str, object, _Whole]]:
    """The numbers of a setting: their names, values and bounds."""
    name = ".".join((*where, key))
    if key in _NUMBERS:
        yield name, value, _NUMBERS[key]
    if key not in _TABLES:
        return
    known = _TABLES[key]
    if not isinstance(value, dict):
        _refuse(path, name, f"it is {value!r}", f"a table of {', '.join(known)}")
    for part, number in value.items():
        if part not in known:
            _refuse(path, f"{name}.{part}", "unknown key", ", ".join(known))
        yield f"{name}.{part}", number, known[part]


def _refuse(path: Path, name: str, problem: str, expected: str) -> NoReturn:
    raise ValueError(f"launch table {path}: {name}: {problem}; expected {expected}")


def _laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both, tables within them too; where both say something, what is above."""
    merged = dict(below)
    for key, value in above.items():
        merged[key] = _laid_over(merged.get(key, {}), value) if isinstance(value, Mapping) else value
    return merged


def _fitted(entry: Mapping[str, Any], vocabulary: int) -> Launch:
    rows = entry["rows"]
    return Launch(min(rows["block"], fitting_block(vocabulary)), rows["warps"])


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bytes_per_logit(operand: torch.dtype, fused: bool) -> int:
    """Of a chunk's buffers: the logits in the compute dtype, and the exponentials of bfloat16 in their own."""
    narrow = operand.itemsize if operand == torch.bfloat16 else 0
    return narrow if fused and narrow else max(4, operand.itemsize) + narrow


@cache
def _memory(device: torch.device) -> int:
    """Bytes that the device has."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
