"""Show and export stored answers of a run, and import those of others: `python -m exgrpo.tools.experience show RUN |
export RUN FOLDER | import FILES FOLDER`.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

from exgrpo.extras import needs

with needs(__name__, "exgrpo[train]"):
    import tyro
    from pydantic import BaseModel, ConfigDict, Field
    from rich.console import Console

    from exgrpo.tools.experience.show import show, show_question
    from exgrpo.tools.experience.sources import open_run
    from exgrpo.train.common.errors import ConfigError, ExgrpoError, print_error
    from exgrpo.train.config.command_line import options_of

PROGRAM = "python -m exgrpo.tools.experience"


class ShowOptions(BaseModel):
    """Show the answers stored in the newest sound checkpoint of a run."""

    model_config = ConfigDict(frozen=True)

    run: Annotated[Path, tyro.conf.Positional] = Field(description="Folder of a run.")
    question: int | None = Field(None, ge=0, description="Show the stored answers to the question of this index.")


class ExportOptions(BaseModel):
    """Write the answers stored in the newest sound checkpoint of a run as a data set in the Hugging Face layout."""

    model_config = ConfigDict(frozen=True)

    run: Annotated[Path, tyro.conf.Positional] = Field(description="Folder of a run.")
    folder: Annotated[Path, tyro.conf.Positional] = Field(description="Folder of the data set, new or empty.")


class ImportOptions(BaseModel):
    """Write answers of other projects as a data set for experience.start of a run."""

    model_config = ConfigDict(frozen=True)

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILES")] = Field(
        description="A parquet, JSONL or JSON file, or a pattern in quotes that matches several."
    )
    folder: Annotated[Path, tyro.conf.Positional] = Field(description="Folder of the data set, new or empty.")
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="Names of the columns in the files, if they differ (question prompt response output reward score).",
    )
    skip_bad: bool = Field(False, description="Leave out invalid rows, and print their number.")
    tokenizer: str | None = Field(
        None, description="Path or name of the model that wrote the answers; for token ids without texts."
    )


def main(argv: Sequence[str]) -> int:
    """Run the program; return its exit status."""
    command, *rest = argv or ("",)
    try:
        if command in ("-h", "--help"):
            for name, (_, options) in COMMANDS.items():
                print(f"{PROGRAM} {name}: {options.__doc__}")
            return 0
        if command not in COMMANDS:
            raise ConfigError(f"{command or 'no argument'} is no command; use one of {', '.join(COMMANDS)}")
        do, kind = COMMANDS[command]
        do(options_of(kind, f"{PROGRAM} {command}", rest))
    except ExgrpoError as error:
        return print_error(error)
    return 0


def _show(options: ShowOptions) -> None:
    experience, console = open_run(options.run), Console()
    if options.question is None:
        show(experience, console)
    else:
        show_question(experience, options.question, console)


def _export(options: ExportOptions) -> None:
    from exgrpo.tools.experience.export import export

    print(f"{export(options.run, options.folder)} trajectories in {options.folder}")


def _import(options: ImportOptions) -> None:
    from exgrpo.tools.experience.convert import import_answers

    print(import_answers(**dict(options)))


COMMANDS: dict[str, tuple[Callable[[Any], None], type[BaseModel]]] = {
    "show": (_show, ShowOptions),
    "export": (_export, ExportOptions),
    "import": (_import, ImportOptions),
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
