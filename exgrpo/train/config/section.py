"""Sections of a configuration: shared types, dotted keys, and messages about wrong values.

Dotted keys: "experience.ratio" is the value `ratio` of the section `experience`.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from exgrpo.train.common.errors import SHOWN, cut, nearest, shown

SHOWN_PROBLEMS = 10
_AS_IN_YAML = {"tuple_type": "list", "dict_type": "mapping", "model_type": "mapping"}


class Section(BaseModel):
    """Group of fields: immutable, rejects unknown keys and numbers that are not finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)


def _several(sources: Any) -> Any:
    return (sources,) if isinstance(sources, str) else sources


Sources = Annotated[tuple[str, ...], BeforeValidator(_several), Field(min_length=1)]
"""Sources of questions; in a recipe, a single source needs no list."""
Temperature = Annotated[float, Field(ge=0.01, le=100)]
"""vLLM treats lower ones as 0.01; at higher ones every token is about equally likely."""
TopP = Annotated[float, Field(gt=0, le=1)]


def _with_line_breaks(text: str) -> str:
    r"""Reject a literal \n where a line break was meant. LaTeX commands continue with a small letter: \neq."""
    if "\n" not in text and re.search(r"\\n(?![a-z])", text):
        raise ValueError(
            "it has a backslash and an n in the place of a line break: write $'...\\n' in a shell, double quotes in a "
            "recipe"
        )
    return text


Text = Annotated[str, AfterValidator(_with_line_breaks)]
StopString = Annotated[str, Field(min_length=1), AfterValidator(_with_line_breaks)]
Folder = Annotated[Path, AfterValidator(lambda folder: Path(os.path.expanduser(folder)))]
"""Folder of results. Expand `~`: the shell does not do it in recipes and in --output.folder=~/runs."""


def flat(section: Mapping[str, Any] | BaseModel) -> dict[str, Any]:
    """Return the values of a nested section by dotted key.

    In a model, nested models are sections and mappings are values; in a mapping, nested mappings are sections.
    """
    kind = BaseModel if isinstance(section, BaseModel) else dict
    values: dict[str, Any] = {}
    for name, value in dict(section).items():
        if isinstance(value, kind):
            values |= {f"{name}.{key}": inner for key, inner in flat(value).items()}
        else:
            values[str(name)] = value
    return values


def known_keys(model: type[BaseModel]) -> list[str]:
    """Return the dotted keys of all sections and values of a model."""
    keys = []
    for name, field in model.model_fields.items():
        keys.append(name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += [f"{name}.{key}" for key in known_keys(field.annotation)]
    return keys


def explain(error: ValidationError, model: type[BaseModel], origin: str, section: str = "") -> str:
    """Describe validation errors of a model, or of values that are all in one section of it, suggesting near keys.

    `origin` opens the message: the file of the values, or "command line".
    """
    lines = []
    for problem in error.errors()[:SHOWN_PROBLEMS]:
        key = cut(".".join(str(part) for part in (section, *problem["loc"]) if part != ""), SHOWN)
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
