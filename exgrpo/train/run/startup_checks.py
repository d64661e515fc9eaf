"""Checks of a run that take seconds, before torch, transformers and vLLM are imported.

This module must not import those three at its top, even indirectly; a test checks that.
"""

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain

from exgrpo.train.checkpoint.resume import AUTO, finished, is_unsaved
from exgrpo.train.common.errors import ConfigError, is_first_rank
from exgrpo.train.common.functions import Needs
from exgrpo.train.config.hub import check_upload, offline_reason
from exgrpo.train.config.objective import SURROGATES
from exgrpo.train.config.options import Config, check_evaluation, held_out_sets
from exgrpo.train.config.policy import on_hub
from exgrpo.train.config.sources import check_sources
from exgrpo.train.data.files import HELD_OUT_SEED, from_hub
from exgrpo.train.data.prompts import PromptFormat
from exgrpo.train.data.rows import Row
from exgrpo.train.data.selection import (
    COUNTED_WRONG,
    gold_note,
    overlap_note,
    read_sources,
    reward_name,
    select,
    unearnable_pairs,
)
from exgrpo.train.metrics.run_log import check_trackers
from exgrpo.train.replay import rules
from exgrpo.train.replay.flat import check_folder
from exgrpo.train.replay.rehearsal import rehearse
from exgrpo.train.reward.contract import TURNS, Columns
from exgrpo.train.reward.pool import Grader
from exgrpo.train.rollout.turns.environments import Environment, find_environment
from exgrpo.train.run.traces import check_traces


@dataclass(frozen=True, eq=False)
class StartupResult:
    """Questions and grader of a run, from the startup checks.

    Attributes:
        train: rows of training questions by source, one row per question of the source.
        questions: the same without questions that an earlier source has, too.
        held_out: rows of held-out questions, by set and source.
        counted: as in `Selection`.
        notes: lines about the rows, to be printed.
    """

    train: list[list[Row]]
    questions: list[list[Row]]
    held_out: dict[str, list[list[Row]]]
    grader: Grader
    counted: str
    notes: tuple[str, ...]


def check_startup(config: Config, resources: ExitStack, *, resumed: bool = False) -> StartupResult:
    """Check everything that needs no model, read the questions and start the grader; raise ExgrpoError.

    `resumed`: the run continues in its existing folder.
    """
    check_trackers(config.output.trackers)
    if not resumed and is_first_rank():
        check_output(config)
    check_method(config)
    if config.experience.start and not resumed:
        check_traces(config.experience.start)
    check_folder(config.experience.folder)
    check_evaluation(config)
    data, reward, sets = config.data, config.reward, held_out_sets(config)
    sources = [*data.train, *chain.from_iterable(asked.source for asked in sets.values())]
    check_sources(data.sources, sources)
    for source in sources:
        PromptFormat.from_source(source, data).check_settings()
    check_places(config.policy.path, sources)
    environment = find_environment(config.environment)
    grader = Grader.of((reward_name(config, source) for source in sources), reward)
    resources.callback(grader.close)
    columns = partial(columns_taken, grader, environment)
    train = select(config, columns, progress=is_first_rank())
    held_out = {
        name: read_sources(config, asked.source, columns, split=asked.split, limit=asked.limit, seed=HELD_OUT_SEED)
        for name, asked in sets.items()
    }
    notes = (train.note, *_held_out_notes(config, train.questions, held_out))
    if is_first_rank():
        check_upload(config.output)  # last, since it creates a repository
    return StartupResult(train.rows, train.questions, held_out, grader, train.counted, tuple(filter(None, notes)))


def columns_taken(grader: Grader, environment: Environment | None, reward: str) -> Columns:
    """Return the columns of a row that the named reward and the environment of a run take."""
    taken = grader.columns(reward)
    return taken.without(TURNS) | environment.columns if environment else taken


def _held_out_notes(config: Config, train: list[list[Row]], held_out: dict[str, list[list[Row]]]) -> Iterator[str]:
    sets = {name: list(chain.from_iterable(sources)) for name, sources in held_out.items()}
    pairs = unearnable_pairs(chain.from_iterable(sets.values()), config.reward, progress=is_first_rank())
    for name, rows in sets.items():
        if note := gold_note(rows, pairs, COUNTED_WRONG):
            yield f"{name}: {note}"
    yield overlap_note(chain.from_iterable(train), sets)


def check_method(config: Config) -> None:
    """Raise ConfigError unless the functions of the replay method exist and fit together."""
    experience = config.experience
    compose = Needs.of(rules.find("compose", experience.compose))
    if compose.fills and config.rollout.refills:
        raise ConfigError(
            f"rollout.refills asks further questions in the place of groups without a gradient, and experience.compose "
            f"{experience.compose} puts stored groups there: leave one of them out"
        )
    if compose.alone and experience.advantage == "group":
        raise ConfigError(
            f"experience.compose {experience.compose} trains on single stored answers, which have no advantage in a "
            "group of their own: it needs experience.advantage=stored"
        )
    rehearse(config.method)


def check_surrogate(config: Config) -> None:
    """Raise ConfigError unless the surrogate of the loss exists and fits the other options."""
    surrogate = Needs.of(SURROGATES.find(config.objective.surrogate))
    compose = Needs.of(rules.find("compose", config.experience.compose))
    if config.objective.anchor == "start" and not surrogate.all_rows:
        raise ConfigError(
            f"objective.anchor start is for regressions, and objective.surrogate is {config.objective.surrogate}: take "
            "oapl or coupled, or leave it out; kl_coef adds a divergence to the start"
        )
    if config.objective.anchor == "start" and config.objective.kl_coef and config.objective.kl_corrected:
        raise ConfigError(
            "objective.kl_corrected multiplies by the ratio to the policy that wrote a token, and with anchor start "
            "ratios are to the start: take kl_corrected false, or leave kl_coef out"
        )
    if surrogate.coupled and config.experience.ratio and compose.alone:
        raise ConfigError(
            f"objective.surrogate {config.objective.surrogate} compares the answers of a group, and experience.compose "
            f"{config.experience.compose} makes groups of single answers: take oapl, or another composition"
        )


def check_output(config: Config) -> None:
    """Raise ConfigError if the run's folder exists already or cannot be made."""
    root, name = config.output.folder, config.output.name
    run = root / (name or "")
    if name and run.exists() and not (config.resume == AUTO and (finished(config) or is_unsaved(run))):
        raise ConfigError(
            f"output.folder: {run} exists already: choose another output.name, go on with it by --resume "
            f"{shlex.quote(str(run))}, or remove it"
        )
    there = next(folder for folder in (root.absolute(), *root.absolute().parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"output.folder: {root} cannot be written, because of {there}; choose another output.folder")


def check_places(model: str, sources: Sequence[str]) -> None:
    """Check that the model and the questions exist, or may exist on the hub.

    If one of them is on the hub and that cannot be reached, print that files come from the cache alone.

    Raises:
        ExgrpoError: there is no such folder or file.
    """
    # A list, so that every place is checked: `any` alone would stop at the first one on the hub.
    if not any([on_hub(model), *(from_hub(source) for source in sources)]):
        return
    reason = offline_reason()
    if reason and is_first_rank():
        print(f"{reason}: models and data sets of the hub are taken from the cache of this machine", flush=True)
