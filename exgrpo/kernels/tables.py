"""Tables of settings by architecture, dtype and class of shapes: a shipped one under a table of the user's own.

A program that times something writes such a table, with comments that say where the numbers come from.
"""

import datetime
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

DEFAULT = "default"
DTYPES = ("bfloat16", "float16", "float32", "float64")
_ARCHITECTURE = re.compile(r"cpu|sm_\d{2,3}|gfx\w{3,4}")

Where = tuple[str, ...]
"""Names of a section, from the architecture inwards."""
Sections = dict[tuple[str, str, str], tuple[dict[str, Any], list[str]]]
"""What is written: entries by architecture, dtype and class, with notes about them."""


class Complaint(NamedTuple):
    """What is wrong with a setting."""

    name: str
    """Of the setting, within its section."""
    problem: str
    expected: str


Check = Callable[[Where, str, object], Iterator[Complaint]]
"""The complaints about a key and its value in a section."""


@dataclass(frozen=True)
class Table:
    """A kind of table.

    Attributes:
        kind: as errors call it.
        environment: variable with the path of a table that is laid over the shipped one.
        shipped: path of the shipped one.
        classes: of shapes.
        settings: the keys that a section may have.
        check: of their values.
    """

    kind: str
    environment: str
    shipped: Path
    classes: tuple[str, ...]
    settings: tuple[str, ...]
    check: Check

    @cache  # noqa: B019  tables live as long as the process
    def sections(self) -> dict[str, Any]:
        """The sections by name: the shipped ones under those of the user's table.

        Raises:
            ValueError: a table cannot be read, or has an unknown key or an impossible value.
        """
        shipped = self.read(self.shipped)
        own = os.environ.get(self.environment)
        return _laid_over(shipped, self.read(Path(own))) if own else shipped

    def forget(self) -> None:
        """Have the tables read again: for tests and for tuners, which change them."""
        Table.sections.cache_clear()

    def setting(self, name: str, dtype: str, shape_class: str) -> dict[str, Any]:
        """Every setting of an architecture, dtype and class, each from the most specific section that has it.

        What an architecture's own sections do not say, those of older ones of its generation do: sm_80 for sm_86.
        """
        found: dict[str, Any] = {}
        for architecture in (DEFAULT, *self._generation(name)):
            of_architecture = self.sections()[architecture]
            of_dtype = of_architecture.get(dtype, {})
            for section in (of_architecture, of_dtype, of_dtype.get(shape_class, {})):
                found = _laid_over(found, {key: value for key, value in section.items() if key in self.settings})
        return found

    def _generation(self, name: str) -> list[str]:
        """The architectures of the table that differ from one in their last digit at most, up to it, oldest first."""
        alike = (known for known in self.sections() if known[:-1] == name[:-1] and known <= name)
        return sorted(alike) if name.startswith("sm_") else [known for known in (name,) if known in self.sections()]

    def read(self, path: Path) -> dict[str, Any]:
        """A table as it is written, checked.

        Raises:
            ValueError: it cannot be read, or has an unknown key or an impossible value.
        """
        try:
            sections = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.kind} {path}: {error}; expected a TOML file like {self.shipped}") from error
        for name, section in sections.items():
            if name != DEFAULT and not _ARCHITECTURE.fullmatch(name):
                self._refuse(path, Complaint(name, "unknown architecture", f"{DEFAULT}, cpu, sm_NN or gfxNNN"))
            self._check(path, (name,), section)
        return sections

    def _check(self, path: Path, where: Where, section: object) -> None:
        """Raises ValueError unless a section has known keys with possible values; looks into those within."""
        inner = {1: DTYPES, 2: self.classes}.get(len(where), ()) if where[0] != DEFAULT else ()
        if not isinstance(section, dict):
            self._refuse(path, Complaint(".".join(where), f"it is {section!r}", "a section of settings"))
        for key, value in section.items():
            if key in inner:
                self._check(path, (*where, key), value)
            elif key not in self.settings:
                expected = ", ".join((*self.settings, *inner))
                self._refuse(path, Complaint(".".join((*where, key)), "unknown key", expected))
            else:
                for complaint in self.check(where, key, value):
                    self._refuse(path, complaint._replace(name=".".join((*where, complaint.name))))

    def _refuse(self, path: Path, complaint: Complaint) -> NoReturn:
        name, problem, expected = complaint
        raise ValueError(f"{self.kind} {path}: {name}: {problem}; expected {expected}")


def architecture(device: torch.device) -> str:
    """The name of a GPU's architecture; "cpu" for any CPU."""
    if device.type != "cuda":
        return device.type
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def dtype_name(dtype: torch.dtype) -> str:
    """As tables name it."""
    return str(dtype).removeprefix("torch.")


def text(sections: Sections, header: Sequence[str]) -> str:
    """A table: the settings of each section, and what was noted about it as comments."""
    lines = [f"# {line}" for line in header]
    for name, (entry, notes) in sections.items():
        lines += ["", *(f"# {note}" for note in notes), f"[{'.'.join(name)}]"]
        lines += [f"{key} = {toml(value)}" for key, value in entry.items()]
    return "\n".join(lines) + "\n"


def toml(value: Any) -> str:
    """A value as TOML has it."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {toml(part)}' for key, part in value.items())} }}"
    return json.dumps(value)


def origin(device: torch.device, architecture: str) -> list[str]:
    """Where and when something was timed."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    runtime = torch.version.hip or torch.version.cuda or "none"
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    versions = f"torch {torch.__version__}, triton {triton}, CUDA or HIP {runtime}"
    return [f"Timed on {name} ({architecture}), {datetime.date.today()}.", f"{versions}."]


def _laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both, tables within them too; where both say something, what is above."""
    merged = dict(below)
    for key, value in above.items():
        merged[key] = _laid_over(merged.get(key, {}), value) if isinstance(value, Mapping) else value
    return merged
