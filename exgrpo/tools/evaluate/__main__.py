"""Evaluate a model on questions: `python -m exgrpo.tools.evaluate MODEL --data.test FILE [FILE ...]`.

Several processes: `deepspeed --num_accelerators 2 --module exgrpo.tools.evaluate MODEL --data.test FILE`.
"""

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from exgrpo.extras import needs

with needs(__name__, "exgrpo[train]"):
    from rich.console import Console
    from rich.table import Table

    from exgrpo.tools.evaluate.options import EvaluationOptions, parse_options
    from exgrpo.train.common.errors import OutputError, os_errors_as
    from exgrpo.train.common.process import leave, run_program
    from exgrpo.train.config.policy import LoraConfig, with_saved
    from exgrpo.train.config.sources import names_of
    from exgrpo.train.data.files import HELD_OUT_SEED, from_hub, read_rows
    from exgrpo.train.data.prompts import PromptFormat
    from exgrpo.train.run.startup_checks import check_places
    from exgrpo.train.run.validation_scores import SourceScore, average

SCORES = "scores.json"


def write(scores: dict[str, SourceScore], folder: Path, console: Console) -> None:
    """Print the scores as tables and write them to scores.json; raise OutputError if it cannot be written."""
    console.print(_rates(scores))
    if ks := sorted({k for source in scores.values() for k in source.distinct_at}):
        console.print(_distinct(scores, ks))
    console.print(_counts(scores))
    result = {"average": average(scores), "sources": {name: asdict(source) for name, source in scores.items()}}
    with os_errors_as(OutputError, f"{folder / SCORES} cannot be written"):
        (folder / SCORES).write_text(json.dumps(result, indent=2, allow_nan=False), encoding="utf-8")
    console.print(f"answers to read and scores are in {folder}", highlight=False)


def _rates(scores: dict[str, SourceScore]) -> Table:
    ks = sorted({k for source in scores.values() for k in source.pass_at})
    table = Table("source", "Pass@1", "95 % interval", *(f"pass@{k}" for k in ks))
    for name, source in scores.items():
        pass_at = [_number(source.pass_at.get(k)) for k in ks]
        table.add_row(name, f"{source.pass_rate:.3f}", f"{source.low:.3f} to {source.high:.3f}", *pass_at)
    table.add_row("average", f"{average(scores):.3f}")
    return table


def _distinct(scores: dict[str, SourceScore], ks: Sequence[int]) -> Table:
    table = Table("source", *(f"distinct@{k}" for k in ks))
    for name, source in scores.items():
        table.add_row(name, *(_number(source.distinct_at.get(k)) for k in ks))
    return table


def _counts(scores: dict[str, SourceScore]) -> Table:
    fractions = ("cut", "no form", "no answer")
    table = Table("source", "questions", "left out", "answers", *fractions)
    for name, source in scores.items():
        counts = [str(source.questions), str(source.left_out), str(source.answers)]
        lacking = (source.truncated, source.without_form, source.without_answer)
        table.add_row(name, *counts, *map(_number, lacking))
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def main(argv: Sequence[str]) -> int:
    """Run the program; return its exit status."""

    def work(resources: ExitStack) -> None:
        options = parse_options(argv)
        check_startup(options)
        # torch, transformers and DeepSpeed take seconds to import: check the options first
        from exgrpo.tools.evaluate.evaluation import run
        from exgrpo.train.common.distributed import start

        world = start(timeout_minutes=30, threads=options.distributed.threads)
        if world.is_main and world.threads:
            Console().print(str(world.threads), highlight=False, soft_wrap=True)
        scores = run(options, world, resources)
        if world.is_main:
            write(scores, options.output.folder, Console())

    return run_program(work, "stopped: the same command resumes the evaluation")


def check_startup(options: EvaluationOptions) -> None:
    """Run the startup checks that need no model; raise an ExgrpoError for the first that fails."""
    data = options.data
    PromptFormat.from_options(data).check_settings()
    check_places(options.model, data.test)
    with_saved(LoraConfig(path=options.lora.path))
    for source in data.test:
        if not from_hub(source):
            names = names_of(source, data)
            read_rows(source, split=data.test_split, limit=data.test_limit, seed=HELD_OUT_SEED, names=names)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
