"""Parse the programs' command lines with one-line errors. Dashes in a name are read as underscores."""

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import dropwhile, takewhile
from typing import TypeVar

import tyro
from pydantic import BaseModel, ValidationError

from exgrpo.train.common.errors import ConfigError, nearest
from exgrpo.train.config.section import explain, known_keys

UNREAD = 141
"""Exit status of a program whose standard output was closed by its reader."""


M = TypeVar("M", bound=BaseModel)


def options_of(model: type[M], program: str, argv: Sequence[str]) -> M:
    """Parse a command line of options alone; raise ConfigError if one is unknown, impossible or missing."""
    check_names(argv, model)
    with one_line(model, program):
        return tyro.cli(model, args=list(argv), prog=program, use_underscores=True)


def names(argv: Sequence[str]) -> list[str]:
    """Return the names of the options of a command line."""
    options = (argument.partition("=")[0] for argument in argv if argument.startswith("--"))
    return [option.removeprefix("--").replace("-", "_") for option in options]


def check_names(argv: Sequence[str], *models: type[BaseModel]) -> None:
    """Raise ConfigError for an option that none of the models has; the message suggests others."""
    known = ["help", *(key for model in models for key in _options(model))]
    for name in names(argv):
        if of_section := [f"--{key}" for key in known if key.startswith(f"{name}.")]:
            raise ConfigError(f"--{name} is a section: give one of its options, {', '.join(of_section)}")
        if name not in known:
            near = nearest(name, known)
            raise ConfigError(f"unknown option --{name}" + (f"; did you mean --{near}?" if near else ""))


def _options(model: type[BaseModel]) -> Iterator[str]:
    """Return the keys of a model that have a value, without its sections."""
    keys = known_keys(model)
    return (key for key in keys if not any(other.startswith(f"{key}.") for other in keys))


@contextlib.contextmanager
def one_line(model: type[BaseModel], program: str) -> Iterator[None]:
    """Turn the message and exit of a parser in this block, which reads options of this model, into an error.

    Raises:
        ConfigError: a value is impossible, or an option is missing.
    """
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            yield
    except SystemExit as ended:
        if not ended.code:  # after --help
            raise
        problem = _problem(ended, model) or _unframed(stderr.getvalue())
        if not problem:  # `--help | head`, noticed by rich
            raise SystemExit(UNREAD) from None
        raise ConfigError(f"{problem} (see {program} --help)") from None
    except BrokenPipeError:  # `--help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(UNREAD) from None
    sys.stderr.write(stderr.getvalue())


def _problem(ended: SystemExit, model: type[BaseModel]) -> str:
    """Return the validation errors of the values; empty if parsing failed before validation."""
    error: BaseException | None = ended
    while error is not None and not isinstance(error, ValidationError):
        error = error.__context__
    if error is None:
        return ""
    sections = {getattr(field.annotation, "__name__", ""): name for name, field in model.model_fields.items()}
    return explain(error, model, "command line", sections.get(error.title, ""))


def _unframed(message: str) -> str:
    """Return the first paragraph of a parser's framed message, or the names of missing options.

    If the output is not Unicode, the frame consists of dashes, with a line of them below the title.
    """
    title, *rest = message.splitlines() or [""]
    inside = dropwhile(_is_rule, (line.strip("│").rstrip() for line in rest))
    lines = list(takewhile(lambda line: not _is_rule(line), inside))
    if "Required options" in title:
        # Names are indented, and explanations further.
        return f"missing: {', '.join(found[1] for line in lines if (found := re.match(' {5,6}([^ ]+)', line)))}"
    return " ".join(line.strip() for line in lines)


def _is_rule(line: str) -> bool:
    return not line.strip("╰╯─- ")
