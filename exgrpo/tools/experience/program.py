"""What a run has stored, shown or exported: `python -m exgrpo.tools.experience [show] RUN | export RUN FOLDER`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import tyro
from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console

from exgrpo.tools.experience.show import Experience, show, show_question
from exgrpo.tools.experience.sources import FileExperience, open_run
from exgrpo.train.checkpoint.listing import FOLDER
from exgrpo.train.common.errors import ConfigError, ExgrpoError, print_error
from exgrpo.train.config.command_line import options_of

PROGRAM = "python -m exgrpo.tools.experience"


class ShowOptions(BaseModel):
    """Show what a run has stored, in its newest sound checkpoint, or what an exported experience holds."""

    model_config = ConfigDict(frozen=True)

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = Field(
        description="Folder of a run or of an exported experience, or a file of traces."
    )
    question: int | None = Field(None, ge=0, description="Show the stored answers to the question of this index.")


class ExportOptions(BaseModel):
    """Write what a run has stored, in its newest sound checkpoint, as a data set in the Hugging Face layout."""

    model_config = ConfigDict(frozen=True)

    run: Annotated[Path, tyro.conf.Positional] = Field(description="Folder of a run.")
    folder: Annotated[Path, tyro.conf.Positional] = Field(description="Folder of the data set, new or empty.")


def main(argv: Sequence[str]) -> int:
    """Run the program; returns its exit status."""
    command, *rest = argv or ("",)
    try:
        if command in ("-h", "--help"):
            for name, (_, options) in COMMANDS.items():
                print(f"{PROGRAM} {name}: {options.__doc__}")
            return 0
        if command not in COMMANDS and command and Path(command).exists():
            command, rest = "show", list(argv)
        if command not in COMMANDS:
            raise ConfigError(f"{command or 'no argument'} is neither a command, {' or '.join(COMMANDS)}, nor a run")
        COMMANDS[command][0](rest)
    except ExgrpoError as error:
        return print_error(error)
    return 0


def open_experience(source: Path) -> Experience:
    """What is stored at a place: a run, an exported folder or a file of traces.

    Raises:
        CheckpointError: a run has no sound checkpoint, or there is no such folder.
        DataError: a file or an exported folder cannot be read.
    """
    exported = source.is_dir() and (source / "data").is_dir() and not (source / FOLDER).is_dir()
    return FileExperience(source) if exported or source.is_file() else open_run(source)


def _show(argv: Sequence[str]) -> None:
    options = options_of(ShowOptions, f"{PROGRAM} show", argv)
    experience, console = open_experience(options.source), Console()
    if options.question is None:
        show(experience.overview(), console)
    else:
        show_question(experience.question(options.question), console)


def _export(argv: Sequence[str]) -> None:
    options = options_of(ExportOptions, f"{PROGRAM} export", argv)
    from exgrpo.tools.experience.export import export

    print(f"{export(options.run, options.folder)} trajectories in {options.folder}")


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], None], type[BaseModel]]] = {
    "show": (_show, ShowOptions),
    "export": (_export, ExportOptions),
}
