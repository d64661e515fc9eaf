"""How a call is launched, by architecture, dtype and width: launch.toml, under a table of the user's own."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from exgrpo.kernels.tables import Complaint, Table, Where, architecture, dtype_name

ENVIRONMENT = "EXGRPO_LAUNCH_TABLE"
"""Path of a table that is laid over the shipped one."""
SHIPPED = Path(__file__).with_name("launch.toml")
FUSABLE = ("bfloat16", "float16")
CLASSES = ("narrow", "wide")
WIDE = 2560
LEAST_BLOCK = 128
MEMORY_SHARE = 16
"""One part of so many of the device's memory is what a call takes at most where it says nothing."""


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
        memory: bytes that a call may allocate beside its inputs, its outputs and the gradients, where it says nothing.
        rows: of the row kernels.
        tile: of the fused product.
    """

    fused: bool
    memory: int
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
_NUMBERS: dict[str, _Whole] = {"memory": _Whole(1, 1 << 20, power_of_two=False)}
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


@cache
def plan(device: torch.device, operand: torch.dtype, width: int, vocabulary: int) -> Plan:
    """How a call is launched whose operands are [rows, width] and [vocabulary, width] of dtype ``operand``.

    An unknown GPU gets what the table's default says. The block is no larger than the vocabulary needs.

    Raises:
        ValueError: a table is malformed.
    """
    entry = setting(architecture(device), dtype_name(operand), shape_class(width))
    return plan_from(entry, vocabulary, _memory(device))


def plan_from(entry: Mapping[str, Any], vocabulary: int, memory: int) -> Plan:
    """What every ``setting`` of a table says for a head of this vocabulary, on a device of ``memory`` bytes."""
    return Plan(
        fused=entry["logits"] == "fused",
        memory=min(entry["memory"] << 20, memory // MEMORY_SHARE),
        rows=_fitted(entry, vocabulary),
        tile=Tile(**entry["tile"]),
    )


def fitting_block(vocabulary: int) -> int:
    """The smallest block that holds a whole row."""
    return max(LEAST_BLOCK, 1 << (vocabulary - 1).bit_length() if vocabulary > 1 else 1)


def shape_class(width: int) -> str:
    """The class of heads of this width."""
    return "wide" if width >= WIDE else "narrow"


def setting(name: str, dtype: str, width_class: str) -> dict[str, Any]:
    """Every setting of an architecture, dtype and class, each from the most specific section that has it."""
    return TABLE.setting(name, dtype, width_class)


def forget() -> None:
    """Have the tables read again: for tests and for the tuner, which change them."""
    TABLE.forget()
    plan.cache_clear()


def _check(where: Where, key: str, value: object) -> Iterator[Complaint]:
    """What is wrong with a setting."""
    if key == "logits":
        yield from _check_logits(where, value)
    elif key in _NUMBERS:
        yield from _check_number(key, value, _NUMBERS[key])
    elif not isinstance(value, dict):
        yield Complaint(key, f"it is {value!r}", f"a table of {', '.join(_TABLES[key])}")
    else:
        for part, number in value.items():
            if part not in _TABLES[key]:
                yield Complaint(f"{key}.{part}", "unknown key", ", ".join(_TABLES[key]))
            else:
                yield from _check_number(f"{key}.{part}", number, _TABLES[key][part])


def _check_number(name: str, value: object, allowed: _Whole) -> Iterator[Complaint]:
    if not allowed.has(value):
        yield Complaint(name, f"it is {value!r}", str(allowed))


def _check_logits(where: Where, value: object) -> Iterator[Complaint]:
    if value not in _LOGITS:
        yield Complaint("logits", f"it is {value!r}", " or ".join(_LOGITS))
    if value == "fused" and not any(dtype in where for dtype in FUSABLE):
        sections = " or ".join(f"[{where[0]}.{dtype}]" for dtype in FUSABLE)
        yield Complaint("logits", "only 16-bit operands have a fused product", f"it in {sections}, library here")


TABLE = Table("launch table", ENVIRONMENT, SHIPPED, CLASSES, _SETTINGS, _check)


def _fitted(entry: Mapping[str, Any], vocabulary: int) -> Launch:
    rows = entry["rows"]
    return Launch(min(rows["block"], fitting_block(vocabulary)), rows["warps"])


@cache
def _memory(device: torch.device) -> int:
    """Bytes that the device has."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@cache
def multiprocessors(device: torch.device) -> int:
    """How many the device has; the interpreter takes two."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count
