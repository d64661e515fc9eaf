"""Signatures of public names and defaults of options: `python -m tests.signatures` writes them to a file.

Parameters have kinds and defaults, but no types, whose text differs between versions of Python. For a class that
inherits from another package, only this package's additions are listed.
"""

import dataclasses
import inspect
import json
import os
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from pydantic import BaseModel

FILE = Path(__file__).with_suffix(".json")
EMPTY = inspect.Parameter.empty


def entries(value):
    """A line for each thing that a caller may use of a function, a class, a module or a section of options."""
    if inspect.ismodule(value):
        return [f"{name}{line}" for name, one in attributes(value) for line in entries(one)]
    if not inspect.isclass(value):
        return [signature(value)] if callable(value) else []
    if issubclass(value, BaseModel):
        return [f".{name} = {default(field)}" for name, field in value.model_fields.items() if not is_section(field)]
    return [constructor(value), *(line for name, one in attributes(value) for line in member(name, one))]


def is_section(field):
    """True if an option is a section, which is listed separately."""
    return inspect.isclass(field.annotation) and issubclass(field.annotation, BaseModel)


def default(field):
    """Return the default of an option."""
    return "(required)" if field.is_required() else repr(field.get_default(call_default_factory=True))


def is_own(value):
    """True if this package defines it."""
    return (getattr(value, "__module__", None) or "").partition(".")[0] == "exgrpo"


def attributes(owner):
    """The public names of a module or a class that are functions or methods of this package."""
    names = {}
    for one in reversed(owner.__mro__) if inspect.isclass(owner) else [owner]:
        if inspect.ismodule(one) or is_own(one):
            names |= vars(one)
    public = [(name, value) for name, value in sorted(names.items()) if name[0] != "_" and not inspect.isclass(value)]
    return [(name, value) for name, value in public if is_own(function(value))]


def function(value):
    """Return the function of a method or a property."""
    return getattr(value, "fget", None) or getattr(value, "__func__", value)


def member(name, value):
    """The line of a method or a property."""
    return [f".{name}" if isinstance(value, property) else f".{name}{signature(function(value))}"]


def constructor(owner):
    """Return the constructor, without fields inherited from another package."""
    fields = {field.name for field in dataclasses.fields(owner)} if dataclasses.is_dataclass(owner) else set()
    own = {name for one in owner.__mro__ if is_own(one) for name in inspect.get_annotations(one)}
    makers = [one for one in owner.__mro__ if {"__init__", "__new__"} & vars(one).keys()]
    return signature(owner, fields - own) if is_own(makers[0]) else ""


def signature(value, left_out=frozenset()):
    """Parameters with their kinds and defaults."""
    found = inspect.signature(value)
    kept = [one.replace(annotation=EMPTY) for name, one in found.parameters.items() if name not in left_out]
    return str(found.replace(parameters=kept, return_annotation=EMPTY))


if __name__ == "__main__":
    from tests.test_public_names import NAMES, SECTIONS, found

    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    listed = {name: known.get(name) if (value := found(name)) is None else entries(value) for name in NAMES}
    listed |= {f"options: {name}": entries(section) for name, section in SECTIONS.items()}
    FILE.write_text(json.dumps({name: lines for name, lines in listed.items() if lines}, indent=1) + "\n")
