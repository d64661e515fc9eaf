"""An entry of the leaderboard from outside: the lines that `study bench` leaves, held against the protocol."""

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from exgrpo.train.common.errors import ReportError
from exgrpo.train.config.options import Config
from exgrpo.train.config.recipe import merged, validate
from exgrpo.train.config.section import explain
from studies.bench import IGNORED, METHOD
from studies.findings import Arm
from studies.results import Result, ResultFile
from studies.study import Study, key_of_settings, settings_of

NEEDED = ("step", "generated_tokens", "seconds", "pass_at_1", "pass_at_k")
"""The curves that a verdict is made from."""


class _Line(BaseModel):
    """What the leaderboard prints of a run."""

    model_config = ConfigDict(strict=True)

    settings: dict[str, Any]
    commit: str = Field(pattern=r"^[0-9a-f]{6,40}\+?$")
    date: str = Field(pattern=r"^\d{4}-\d\d-\d\d$")
    processor: str = Field(pattern=r"^[\w ()@.,/+-]+$")


def read_entry(study: Study, path: Path) -> Arm:
    """The runs of a method that count, on the tasks where there are any; `chosen` has all of the method's own options.

    Raises:
        OutputError: the file cannot be read, or a line is no result.
        ConfigError: a run has wrong settings.
        ReportError: a run is not of the protocol or not of the same method, or one that counts is missing. Messages
            name the file and the line.
    """
    plan, file = study.plan, ResultFile(path)
    if path.stem in plan.arms:
        raise ReportError(f"{path}: the protocol has an arm of this name; rename the file")
    searched = plan.search.over if plan.search else {}
    first: dict[str, Any] | None = None
    chosen: dict[str, Mapping[str, Any]] = {}
    counted: dict[str, dict[int, Result]] = {}
    tried: Counter[str] = Counter()
    for key, result in file.by_key.items():
        where = f"{path}: line {file.lines[key]}"
        seed = _checked(study, result, where).seed
        task, own = _task_of(study, result, where)
        fixed = {name: value for name, value in own.items() if name not in searched}
        first = fixed if first is None else first
        if gaps := _gaps(first, fixed):
            raise ReportError(f"{where}: the line before it has another method: {', '.join(gaps)}")
        if seed in plan.seeds:
            if gaps := _gaps(chosen.setdefault(task, own), own):
                raise ReportError(f"{where}: another run on {task} that counts has another {', '.join(gaps)}")
            counted.setdefault(task, {})[seed] = result
        elif plan.search is None or seed not in plan.search.seeds:
            raise ReportError(f"{where}: seed {seed} is none of the protocol's")
        elif seed == plan.search.seeds[0]:  # a choice is tried with this one first
            tried[task] += 1
            if tried[task] > (plan.search.trials or math.inf):
                raise ReportError(f"{where}: one more than the {plan.search.trials} trials of the protocol on {task}")
    for task, runs in counted.items():
        if absent := [str(seed) for seed in plan.seeds if seed not in runs]:
            raise ReportError(f"{path}: on {task} the runs of seed {', '.join(absent)} are missing")
    if not counted:
        raise ReportError(f"{path}: it has no run that counts: exgrpo study bench")
    return Arm(
        path.stem, {task: [of[seed] for seed in plan.seeds] for task, of in counted.items()}, chosen, (), plan.seeds
    )


def _checked(study: Study, result: Result, where: str) -> Config:
    """The configuration of a run whose line is sound, and which has the budget of the protocol."""
    try:
        _Line.model_validate({name: getattr(result, name) for name in _Line.model_fields})
    except ValidationError as error:
        raise ReportError(explain(error, _Line, where)) from None
    if key_of_settings(result.settings) != result.key:
        raise ReportError(f"{where}: its key is not that of its settings: one of them was edited")
    config = validate(merged(dict(result.settings)), where)
    curves = [result.curves.get(name, np.empty(0)) for name in NEEDED]
    if len({of.shape for of in curves}) > 1 or curves[0].ndim != 1 or not np.isfinite(curves).all():
        raise ReportError(f"{where}: it has not as many numbers of each of {', '.join(NEEDED)}")
    if not curves[0].size or curves[0][-1] != config.steps:
        raise ReportError(f"{where}: its curves do not end at its last step, {config.steps}")
    if budget := study.plan.budget_of(config.seed):
        asks = budget.answers / (max(1, config.steps) * config.questions * config.rollout.samples)
        wanted = budget.options(config, asks)
        if wanted != {"steps": config.steps, "evaluation.every": config.evaluation.every}:
            said = " and ".join(f"{name} {value}" for name, value in wanted.items())
            raise ReportError(f"{where}: the protocol's budget has {said}")
    return config


def _task_of(study: Study, result: Result, where: str) -> tuple[str, dict[str, Any]]:
    """The task of a run, and the options that are its method's own."""
    plan, gaps = study.plan, {}
    for task in plan.tasks:
        settings = settings_of(study.planned(task, plan.baseline, plan.seeds[0], {}).config)
        gaps[task] = [name for name in _gaps(settings, result.settings) if not name.startswith((*METHOD, *IGNORED))]
    task = min(gaps, key=lambda task: len(gaps[task]))
    if gaps[task]:
        raise ReportError(f"{where}: on {task}, the protocol has another {', '.join(gaps[task])}")
    return task, {name: value for name, value in result.settings.items() if name.startswith(METHOD)}


def _gaps(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Names of the values that differ."""
    return sorted(name for name in {**one, **other} if one.get(name) != other.get(name))
