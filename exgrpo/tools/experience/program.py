"""What a run has stored, shown or exported, and what others have: `python -m exgrpo.tools.experience [show] RUN |
export RUN FOLDER | import FILES FOLDER`.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal

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
    form: Literal["exgrpo", "verl", "trl"] = Field(
        "exgrpo", description="Whose loaders read it; a run can begin with each of them."
    )


class ImportOptions(BaseModel):
    """Write answers of other projects as a data set that a run begins with, as its experience.start."""

    model_config = ConfigDict(frozen=True)

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILES")] = Field(
        description="A parquet, JSONL or JSON file, or a pattern in quotes that matches several."
    )
    folder: Annotated[Path, tyro.conf.Positional] = Field(description="Folder of the data set, new or empty.")
    form: Literal["verl", "trl", "prime_rl", "oapl", "luffy", "open_r1"] | None = Field(
        None, description="What the files are; None: the columns of the first row say it."
    )
    skip_bad: bool = Field(False, description="Leave out rows that cannot be right, and say how many they are.")
    rewards: tuple[str, ...] | None = Field(
        None,
        description="The rewards whose sum is kept; without a value none is, and the run grades; None: all there are.",
    )
    prompt_format: str = Field(
        "{question}",
        description="What the files have in the place of a question, with {question} in it, or a name, as "
        "data.prompt_format.",
    )
    tokenizer: str | None = Field(
        None, description="Path or name of the model that wrote the answers; prime-rl traces need it."
    )


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
            raise ConfigError(f"{command or 'no argument'} is neither a command ({', '.join(COMMANDS)}) nor a run")
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

    print(f"{export(options.run, options.folder, options.form)} trajectories in {options.folder}")


def _import(argv: Sequence[str]) -> None:
    options = options_of(ImportOptions, f"{PROGRAM} import", argv)
    from exgrpo.tools.experience.convert import import_answers

    print(import_answers(**dict(options)))


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], None], type[BaseModel]]] = {
    "show": (_show, ShowOptions),
    "export": (_export, ExportOptions),
    "import": (_import, ImportOptions),
}
