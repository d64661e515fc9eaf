"""The options of the doctor."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from exgrpo.train.command_line import options_of
from exgrpo.train.config import Config
from exgrpo.train.doctor.check import Check
from exgrpo.train.errors import ConfigError
from exgrpo.train.mistakes import nearest
from exgrpo.train.recipe import DEFAULT_RUN, merged, read_recipe, recipe_path, unfinished
from exgrpo.train.section import Section

PROGRAM = "python -m exgrpo.train.doctor"


class Options(Section):
    """Check every part that a run needs on this machine; the exit status is 0 if none of them fails."""

    recipe: Path | None = Field(
        None, description="YAML recipe, or builtin:NAME, of the run to come; None: the default run, in bf16."
    )
    only: tuple[str, ...] = Field((), description="Names of the checks to do; none: all.")
    skip: tuple[str, ...] = Field((), description="Names of checks to leave out.")
    timeout: float = Field(300.0, gt=0, le=86400, description="Seconds for each check; then it is ended and failed.")
    output: Path | None = Field(
        None, description="File for the text to paste into a report; None: it is printed below the table."
    )


def parse_options(argv: Sequence[str]) -> Options:
    """The options of a command line.

    Raises:
        ConfigError: an option is unknown or impossible.
    """
    return options_of(Options, PROGRAM, argv)


def chosen(checks: Sequence[Check], options: Options) -> list[Check]:
    """The checks that the options leave.

    Raises:
        ConfigError: a name is unknown, or no check is left.
    """
    known = [check.name for check in checks]
    for option, names in (("only", options.only), ("skip", options.skip)):
        for name in names:
            if name not in known:
                near = nearest(name, known)
                hint = f"did you mean {near!r}? " if near else ""
                raise ConfigError(f"--{option}: there is no check {name!r}; {hint}There are {', '.join(known)}")
    left = [check for check in checks if check.name in (options.only or known) and check.name not in options.skip]
    if not left:
        raise ConfigError("--only and --skip leave no check: name fewer in --skip")
    return left


def recipe_of(options: Options) -> Config:
    """The configuration of the run that the machine is meant for.

    The default run computes in bf16 here: in fp32, one process trains without ZeRO-3.

    Raises:
        ConfigError: the recipe is wrong.
    """
    if options.recipe is None:
        return unfinished(merged(read_recipe(DEFAULT_RUN), {"policy.dtype": "bf16"}), str(DEFAULT_RUN))
    path = recipe_path(options.recipe)
    return unfinished(read_recipe(path), str(path))
