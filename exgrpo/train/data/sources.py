"""What is different for the questions of a single source."""

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal

import tyro
from pydantic import Field

from exgrpo.train.errors import ConfigError, shown
from exgrpo.train.section import Section, StopString

ColumnNames = dict[Literal["question", "answer", "solution"], Annotated[str, Field(min_length=1)]]


class SourceConfig(Section):
    """Settings of one source of questions; what is None is as for the others."""

    source: str = Field(description="The source, as data.train or data.test has it.")
    columns: ColumnNames | None = Field(None, description="What it calls its columns, in the place of data.columns.")
    prompt_format: str | None = Field(None, description="Of its questions, in the place of data.prompt_format.")
    reward: str | None = Field(
        None, min_length=1, description="Of its questions, in the place of what it brings; as reward.function."
    )
    stop: tuple[StopString, ...] | None = Field(
        None, description="Strings that end an answer to its questions, in the place of rollout.stop."
    )


SourceConfigs = Annotated[tuple[SourceConfig, ...], tyro.conf.Suppress]
"""They stand in recipes alone: a command line has no good form for a list of sections."""


def settings_of(source: str, settings: Sequence[SourceConfig]) -> SourceConfig:
    """The settings of a source."""
    return next((one for one in settings if one.source == source), SourceConfig(source=source))


def names_of(source: str, options: Any) -> Mapping[str, str]:
    """What a source calls its columns, by such options as `data` and their `sources`."""
    own = settings_of(source, options.sources).columns
    return {**(options.columns if own is None else own)}


def check_sources(settings: Sequence[SourceConfig], sources: Collection[str]) -> None:
    """Whether settings are of sources that there are, and once of each.

    Raises:
        ConfigError: they are not.
    """
    named = [one.source for one in settings]
    for source in named:
        if source not in sources:
            raise ConfigError(
                f"data.sources has settings of {shown(source)}, and the sources of this run are "
                f"{shown(', '.join(sources))}: remove the entry, or name the source"
            )
        if named.count(source) > 1:
            raise ConfigError(f"data.sources has settings of {shown(source)} twice: put them into one entry")
