"""Sections of a configuration: what they have in common, the dotted keys of their values, and what is wrong with these.

Dotted keys: "experience.ratio" is the value `ratio` of the section `experience`.
"""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from exgrpo.train.common.errors import SHOWN, cut, nearest, shown

SHOWN_PROBLEMS = 10
_AS_IN_YAML = {"tuple_type": "list", "dict_type": "mapping", "model_type": "mapping"}


class Section(BaseModel):
    """A group of fields: immutable, closed to unknown keys, and to numbers that are not finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)


def _several(sources: Any) -> Any:
    return (sources,) if isinstance(sources, str) else sources


Sources = Annotated[tuple[str, ...], BeforeValidator(_several), Field(min_length=1)]
"""One or several sources of questions; in a recipe, one may stand without a list."""
Temperature = Annotated[float, Field(ge=0.01, le=100)]
"""vLLM takes lower ones for 0.01; at higher ones every token is about equally likely."""
TopP = Annotated[float, Field(gt=0, le=1)]


def _with_line_breaks(text: str) -> str:
    """The text; not where line breaks have stayed what was typed for them. LaTeX goes on with a small letter: \\neq."""
    if "\n" not in text and re.search(r"\\n(?![a-z])", text):
        raise ValueError(
            "it has a backslash and an n in the place of a line break: write $'...\\n' in a shell, double quotes in a "
            "recipe"
        )
    return text


Text = Annotated[str, AfterValidator(_with_line_breaks)]
StopString = Annotated[str, Field(min_length=1), AfterValidator(_with_line_breaks)]
Folder = Annotated[Path, AfterValidator(lambda folder: Path(os.path.expanduser(folder)))]
"""Of results; no shell has opened the ~ of a recipe and of --output.folder=~/runs."""


def joined(names: Iterable[object]) -> str:
    """The key of a value, from the names of its sections and its own name."""
    return ".".join(map(str, names))


def flat(section: Mapping[str, Any] | BaseModel) -> dict[str, Any]:
    """The values of a nested section by dotted key.

    The sections of a model are models: its mappings are values. The sections of a mapping are mappings.
    """
    kind = BaseModel if isinstance(section, BaseModel) else dict
    values: dict[str, Any] = {}
    for name, value in dict(section).items():
        if isinstance(value, kind):
            values |= {joined((name, key)): inner for key, inner in flat(value).items()}
        else:
            values[str(name)] = value
    return values


def known_keys(model: type[BaseModel]) -> list[str]:
    """The dotted keys of all sections and values that a model may have."""
    keys = []
    for name, field in model.model_fields.items():
        keys.append(name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += [joined((name, key)) for key in known_keys(field.annotation)]
    return keys


def explain(error: ValidationError, model: type[BaseModel], origin: str, section: str = "") -> str:
    """What is wrong with the values of a model, or of one of its sections; of an unknown key the near one.

    Args:
        error: what checking them gave.
        model: has the keys.
        origin: of the values: a file, or "command line".
        section: of all values; empty: they are the whole model's.
    """
    lines = []
    for problem in error.errors()[:SHOWN_PROBLEMS]:
        key = cut(joined(part for part in (section, *problem["loc"]) if part != ""), SHOWN)
        if problem["type"] == "extra_forbidden":
            near = nearest(key, known_keys(model))
            lines.append(f"unknown key {key!r}" + (f"; did you mean {near!r}?" if near else ""))
        elif problem["type"] == "missing":
            lines.append(f"{key} is missing")
        else:
            kind = _AS_IN_YAML.get(problem["type"])
            message = f"Input should be a valid {kind}" if kind else problem["msg"].removeprefix("Value error, ")
            lines.append(f"{key}: {message} (got {shown(problem['input'])})" if key else message)
    more = error.error_count() - len(lines)
    return f"{origin}: " + "; ".join(lines) + (f"; and {more} more" if more else "")
