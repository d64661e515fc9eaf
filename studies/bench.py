"""`exgrpo study bench METHOD`: a verdict on a method against the best GRPO, whose runs are stored."""

import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from pydantic import BaseModel, ConfigDict, Field

from exgrpo.train.common.errors import ConfigError, ReportError
from exgrpo.train.common.process import run_program
from exgrpo.train.config.command_line import options_of
from exgrpo.train.config.recipe import merged, read_recipe, recipe_path
from exgrpo.train.config.replay import KINDS, MethodKind
from exgrpo.train.config.section import flat
from studies import report, run
from studies.findings import Findings
from studies.origin import ROOT
from studies.plan import ArmPart
from studies.results import ResultFile
from studies.sources import found_from
from studies.statistics import height
from studies.study import Study, load_study
from studies.verdict import verdict, warnings

PROGRAM = "exgrpo study bench"
PROTOCOL = ROOT / "studies" / "strongest.yaml"
FOLDER = Path("runs") / "bench"
PRESET = "recommended"
QUICK = ("colouring", "countdown")
QUICK_TRIALS = 3
METHOD = ("experience.", "objective.", "optimizer.", "questions", "rollout.samples", "rollout.refills")
"""Prefixes of options that belong to a method."""
IGNORED = ("steps", "seed", "output.", "checkpoint.", "evaluation.every")
"""Prefixes of options that the protocol sets."""


class Options(BaseModel):
    """Compare a method with the best GRPO and the recommended recipe, at equal generated tokens: docs/referee.md."""

    model_config = ConfigDict(frozen=True)

    method: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="METHOD")] = Field(
        min_length=1, description="Recipes, and functions as FILE.py:FUNCTION; later ones win."
    )
    kind: MethodKind = Field("prioritise", description="Kind of a function: one of the five of a method.")
    asks: float = Field(
        1.0,
        gt=0,
        description="Answers that a step generates, divided by questions * rollout.samples: efficient has 0.3.",
    )
    quick: bool = Field(
        False, description="Two tasks and three learning rates; else all tasks and the whole search, for hours."
    )
    name: str = Field("mine", pattern=r"^[\w.-]+$", description="Name of the method, and of its files.")
    output: Path = Field(FOLDER, description="Folder of results, runs and pages.")
    workers: int = Field(2, ge=1, description="Runs at a time, each on a core of its own.")
    plan: bool = Field(False, description="Show what is left, and stop.")


def method_of(options: Options, folder: Path) -> dict[str, Any]:
    """Return the options of a method; its paths are relative to `folder`, the working directory of the program.

    Raise ConfigError if a recipe is wrong, or sets an option that belongs to no method.
    """
    layers = []
    for name in options.method:
        file = name.rpartition(":")[0]
        if file.endswith(".py"):
            value: Any = (name,) if options.kind == "expire" else name
            layers.append({KINDS[options.kind].option: value})
        else:
            layers.append(read_recipe(recipe_path(Path(name), folder)))
    values = {name: value for name, value in flat(merged(*layers)).items() if not name.startswith(IGNORED)}
    if foreign := [name for name in values if not name.startswith(METHOD)]:
        raise ConfigError(
            f"{', '.join(options.method)}: the protocol sets models, questions, rewards and evaluations: "
            f"leave out {', '.join(foreign)}"
        )
    return found_from(values, folder)


def match(study: Study, options: Options, done: ResultFile, folder: Path) -> Study:
    """Return the study of a method against stored arms, on the tasks that have their runs.

    Raise ConfigError if the method is wrong, ReportError if there are no runs of the baseline.
    """
    plan = study.plan
    if options.name in plan.arms:
        raise ConfigError(f"--name {options.name}: the protocol has an arm of this name; take another one")
    judged = {key: height(result) for key, result in done.by_key.items()}
    against = [name for name in (plan.baseline, PRESET) if name in plan.arms]

    def has_runs(task: str, arm: str) -> bool:
        chosen = study.chosen(task, arm, judged.get)
        seeds = plan.seeds_of(arm)
        return chosen is not None and all(study.planned(task, arm, seed, chosen).key in judged for seed in seeds)

    tasks = [task for task in plan.tasks if all(has_runs(task, arm) for arm in against)]
    tasks = [task for task in tasks if task in QUICK] if options.quick else tasks
    if not tasks:
        needed = " and ".join(against)
        raise ReportError(f"{done.path} has no complete runs of {needed}: python -m studies.run {study.path}")
    values = method_of(options, folder)
    lines = {name: _with(line, values.get(name)) for name, line in plan.lines_of(plan.baseline).items()}
    mine = ArmPart(
        settings=values,
        text=" ".join(options.method),
        asks=options.asks,
        search={name: line for name, line in lines.items() if plan.search and name in plan.search.over},
        trials=QUICK_TRIALS if options.quick else None,
    )
    parts = {"arms": {**{name: plan.arms[name] for name in against}, options.name: mine}, "claims": ()}
    whole = Study(study.path, plan.model_copy(update=parts)).only(tasks)
    whole.check()
    return whole


def _with(line: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    """Insert a method's own value into a line of values."""
    return line if value is None or value in line else tuple(sorted({*line, value}))


def judge(study: Study, options: Options, results: ResultFile) -> list[str]:
    """Write the report; return verdict, warnings and a note about chance.

    Raise ReportError if no seed of the method has been run, OutputError if the folder cannot be written.
    """
    findings = Findings.of(study, results)
    arms = {arm.name: arm for arm in findings.arms}
    if options.name not in arms:
        raise ReportError(f"{options.name} has no seed with runs on all tasks: repeat the command to do them")
    mine = arms[options.name]
    against = [replace(findings, arms=[arms[base], mine]) for base in (study.plan.baseline, PRESET) if base in arms]
    sentences = [*(verdict(pair, mine) for pair in against), *warnings(findings, mine, options.asks)]
    plan = study.plan
    sentences.append(
        f"{len(mine.seeds)} seeds on {len(study.plan.tasks)} tasks; {results.path} has the runs. Of methods that "
        "change nothing, about one in twenty would be called better or worse: docs/referee.md."
    )
    title = f"{options.name} against {plan.baseline}"
    plan = plan.model_copy(update={"title": title, "text": " ".join(sentences)})
    shown = Study(options.output / f"{options.name}.yaml", plan)
    report.write(replace(findings, study=shown), options.output)
    return sentences


def main(argv: Sequence[str]) -> int:
    """Run the program; return its exit status."""

    def work(resources: ExitStack) -> None:
        options = options_of(Options, PROGRAM, argv)
        stored, results = ResultFile(run.RESULTS), ResultFile(options.output / f"{options.name}.jsonl")
        study = match(load_study(PROTOCOL), options, stored, Path.cwd())
        results.by_key = {**stored.by_key, **results.by_key}
        work_options = run.Options(
            study=study.path, runs=options.output / "runs", workers=options.workers, plan=options.plan
        )
        run.do(study, results, work_options, resources)
        if not options.plan:
            print("\n".join(judge(study, options, results)))

    return run_program(work, f"stopped: the same command resumes it: {PROGRAM} {shlex.join(argv)}")
