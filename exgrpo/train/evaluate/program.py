"""Evaluate a model on questions: `python -m exgrpo.train.evaluate MODEL --data FILE [FILE ...]`.

Several processes: `deepspeed --num_accelerators 2 --module exgrpo.train.evaluate MODEL --data FILE`.
"""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from exgrpo.train.distributed import start
from exgrpo.train.errors import ExgrpoError, OutputError, os_errors_as, print_error
from exgrpo.train.evaluate.evaluation import run
from exgrpo.train.evaluate.options import parse_options
from exgrpo.train.evaluate.scores import SourceScore, average

SCORES = "scores.json"


def write(scores: dict[str, SourceScore], folder: Path, console: Console) -> None:
    """Print the scores as a table and write them to scores.json, with the questions that were left out by source.

    Raises:
        OutputError: scores.json cannot be written.
    """
    ks = sorted({k for source in scores.values() for k in source.pass_at})
    table = Table("source", "questions", "left out", "answers", "Pass@1", "± s.e.", *(f"pass@{k}" for k in ks))
    for name, source in scores.items():
        pass_at = [f"{source.pass_at[k]:.3f}" if k in source.pass_at else "-" for k in ks]
        counts = [str(source.questions), str(source.left_out), str(source.answers)]
        table.add_row(name, *counts, f"{source.pass_rate:.3f}", f"{source.standard_error:.3f}", *pass_at)
    table.add_row("average", "", "", "", f"{average(scores):.3f}", "")
    console.print(table)
    result = {"average": average(scores), "sources": {name: asdict(source) for name, source in scores.items()}}
    with os_errors_as(OutputError, f"{folder / SCORES} cannot be written"):
        (folder / SCORES).write_text(json.dumps(result, indent=2), encoding="utf-8")
    console.print(f"answers to read and scores are in {folder}", highlight=False)


def main(argv: Sequence[str]) -> int:
    """Run the program; returns its exit status."""
    with ExitStack() as resources:
        try:
            options = parse_options(argv)
            world = start(timeout_minutes=30)
            scores = run(options, world, resources)
            if world.is_main:
                write(scores, options.output, Console())
        except ExgrpoError as error:
            return print_error(error)
    return 0
