"""Runs that are one experiment with several seeds, and how experiments differ."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from exgrpo.train.config import Config
from exgrpo.train.dotted import flat
from exgrpo.train.recipe import NAMED
from exgrpo.train.report.runs import RunData

NOT_COMPARED = ("output.", "checkpoint.")
"""The beginnings of options that say where a run is kept, not what it computes."""
ABSENT = "\N{EN DASH}"


@dataclass(frozen=True, eq=False)
class RunGroup:
    """Runs that differ in nothing but the seed, in the order they were named."""

    label: str
    runs: list[RunData]


def group_runs(runs: Sequence[RunData]) -> list[RunGroup]:
    """Put together what differs in nothing but the seed; a run whose configuration is not known stays alone."""
    groups: list[tuple[dict[str, Any], list[RunData]]] = []
    for run in runs:
        settings = _settings(run)
        for others, members in groups:
            # The same seed twice is one experiment twice, and would narrow the interval without reason.
            seeds = [member.config.get("seed") for member in members]
            if settings and settings == others and run.config.get("seed") not in seeds:
                members.append(run)
                break
        else:
            groups.append((settings, [run]))
    return [RunGroup(_label(members), members) for _, members in groups]


def _settings(run: RunData) -> dict[str, Any]:
    """Every option by its full name, except those in which runs of one group may differ."""
    return {k: v for k, v in flat(run.config).items() if k not in ("seed", "resume") and not k.startswith(NOT_COMPARED)}


def _label(runs: Sequence[RunData]) -> str:
    more = len(runs) - 1
    return runs[0].name + (f" and {more} more seed{'s' if more > 1 else ''}" if more else "")


def differences(groups: Sequence[RunGroup]) -> dict[str, list[str]]:
    """Each option in which the groups differ, with its value in every group."""
    settings = [_settings(group.runs[0]) for group in groups]
    names = dict.fromkeys(name for options in settings for name in options)
    values = {name: [_value(options, name) for options in settings] for name in names}
    return {name: of_groups for name, of_groups in values.items() if len(set(of_groups)) > 1}


def changes(run: RunData) -> dict[str, list[str]]:
    """Each option of a run that is not its default, with its value and that default; a required one has none."""
    required: dict[str, Any] = {}
    for name in NAMED:
        section, option = name.split(".")
        required.setdefault(section, {})[option] = ""
    defaults = flat(Config.model_validate(required).model_dump(mode="json"))
    known = {name: value for name, value in defaults.items() if name not in NAMED}
    own = {name: value for name, value in flat(run.config).items() if not name.startswith(NOT_COMPARED)}
    values = {name: [_value(own, name), _value(known, name)] for name in own}
    return {name: both for name, both in values.items() if both[0] != both[1]}


def _value(options: dict[str, Any], name: str) -> str:
    return json.dumps(options[name], default=str) if name in options else ABSENT
