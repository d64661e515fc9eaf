"""What can be wrong with a run and shows in seconds: checked before torch, transformers and vLLM are imported.

This module and what it imports at its top stay free of those three; a test keeps it so.
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
from exgrpo.train.config.hub import check_upload, offline_reason
from exgrpo.train.config.objective import SURROGATES
from exgrpo.train.config.options import Config, check_evaluation, held_out_sets
from exgrpo.train.config.pretrained import on_hub
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
from exgrpo.train.metrics.trackers import check_trackers
from exgrpo.train.replay import rules
from exgrpo.train.replay.blocks import check_folder
from exgrpo.train.replay.rehearsal import rehearse
from exgrpo.train.reward.contract import TURNS, Columns
from exgrpo.train.reward.pool import Grader
from exgrpo.train.rollout.turns.environments import Environment, find_environment
from exgrpo.train.run.traces import check_traces


@dataclass(frozen=True, eq=False)
class Early:
    """What the first look has read and started.

    Attributes:
        train: rows of the questions to train on, by source, one row for each question of it.
        questions: those of them that ask another question than the sources before.
        held_out: rows of the held-out questions, by set and source.
        grader: grades answers; its processes run.
        counted: see `Selection`.
        notes: lines about the rows, for people.
    """

    train: list[list[Row]]
    questions: list[list[Row]]
    held_out: dict[str, list[list[Row]]]
    grader: Grader
    counted: str
    notes: tuple[str, ...]


def look(config: Config, resources: ExitStack, *, resumed: bool = False) -> Early:
    """Check what needs no model, read the questions and start the grader.

    Args:
        config: what to do.
        resources: closes what is opened.
        resumed: whether the folder of the results is there already and is gone on with.

    Raises:
        ExgrpoError: something is wrong; the message names it.
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
        PromptFormat.of_source(source, data).check_settings()
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
        check_upload(config.output)  # last, for it leaves a repository behind
    return Early(train.rows, train.questions, held_out, grader, train.counted, tuple(filter(None, notes)))


def columns_taken(grader: Grader, environment: Environment | None, reward: str) -> Columns:
    """Return the columns of a row that a reward, by its name, and the environment of a run take."""
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
    """Whether the functions of the method of replay are there, and go together.

    Raises:
        ConfigError: one is not, or they do not.
    """
    experience = config.experience
    compose = rules.find("compose", experience.compose)
    if getattr(compose, "fills", False) and config.rollout.refills:
        raise ConfigError(
            f"rollout.refills asks further questions in the place of groups without a gradient, and experience.compose "
            f"{experience.compose} puts stored groups there: leave one of them out"
        )
    if getattr(compose, "alone", False) and experience.advantage == "group":
        raise ConfigError(
            f"experience.compose {experience.compose} trains on single stored answers, which have no advantage in a "
            "group of their own: it needs experience.advantage=stored"
        )
    rehearse(experience, config.objective, config.rollout.samples, config.reward.success)


def check_surrogate(config: Config) -> None:
    """Whether the surrogate of the loss is there, and goes with the other options.

    Raises:
        ConfigError: it is not, or it does not.
    """
    surrogate, compose = SURROGATES.find(config.objective.surrogate), rules.find("compose", config.experience.compose)
    if config.objective.anchor == "start" and not getattr(surrogate, "all_rows", False):
        raise ConfigError(
            f"objective.anchor start is for regressions, and objective.surrogate is {config.objective.surrogate}: take "
            "oapl or coupled, or leave it out; kl_coef adds a divergence to the start"
        )
    if config.objective.anchor == "start" and config.objective.kl_coef and config.objective.kl_corrected:
        raise ConfigError(
            "objective.kl_corrected multiplies by the ratio to the policy that wrote a token, and with anchor start "
            "ratios are to the start: take kl_corrected false, or leave kl_coef out"
        )
    if getattr(surrogate, "coupled", False) and config.experience.ratio and getattr(compose, "alone", False):
        raise ConfigError(
            f"objective.surrogate {config.objective.surrogate} compares the answers of a group, and experience.compose "
            f"{config.experience.compose} makes groups of single answers: take oapl, or another composition"
        )


def check_output(config: Config) -> None:
    """Whether the folder of the results can be made.

    Raises:
        ConfigError: it exists already, or a part of its path is no folder or may not be written.
    """
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
    """Whether a model and questions can be where they are said to be.

    If one of them is on the hub and that does not answer, it says so once, and files come from the cache alone.

    Raises:
        ExgrpoError: there is no such folder or file.
    """
    # A list, since every place is looked at: one that does not exist is an error whatever the others are.
    if not any([on_hub(model), *(from_hub(source) for source in sources)]):
        return
    reason = offline_reason()
    if reason and is_first_rank():
        print(f"{reason}: models and data sets of the hub are taken from the cache of this machine", flush=True)
