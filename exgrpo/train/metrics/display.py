"""What a person sees while a run goes on."""

import math
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from exgrpo.train.common.errors import printable

COLUMNS = {
    "reward": ("reward", ".3f"),
    "Pass@1": ("pass_rate", ".3f"),
    "entropy": ("entropy", ".3f"),
    "replayed": ("replayed", ".0f"),
    "buffer": ("buffer_trajectories", ".0f"),
    "retired": ("retired", ".0f"),
    "ratio": ("fresh_ratio", ".3f"),
    "grad": ("grad_norm", ".2f"),
    "idle": ("idle_group_fraction", ".0%"),
    "length": ("response_tokens", ".0f"),
    "cut": ("truncated", ".0%"),
    "failed": ("reward_failed_fraction", ".0%"),
    "tokens/s": ("tokens_per_second", ".0f"),
    "mfu": ("mfu", ".1%"),
    "s/step": ("seconds", ".1f"),
}


class Display:
    """A line per step, on a terminal above a progress bar.

    Args:
        steps: of the run.
        done: steps that are behind already, in a run that goes on.
        console: where to print; None prints nothing (ranks other than 0).
    """

    def __init__(self, steps: int, done: int, console: Console | None) -> None:
        self.console = console
        self.progress = Progress(
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=console,
            disable=console is None or not console.is_terminal,
        )
        self.task = self.progress.add_task("training", total=steps, completed=done)

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def say(self, message: str) -> None:
        """Print a line above the bar."""
        if self.console:
            self.console.print(printable(message), highlight=False, markup=False)

    def step(self, record: dict[str, float]) -> None:
        """Show the metrics of a finished step."""
        self.progress.advance(self.task)
        if self.console:
            cells = [f"{title} {_cell(record, *column)}" for title, column in COLUMNS.items()]
            remaining = self.progress.tasks[0].time_remaining
            eta = "" if remaining is None else f"  ETA {remaining // 60:.0f}:{remaining % 60:02.0f}"
            self.console.print(f"step {record['step']:.0f}  " + "  ".join(cells) + eta, highlight=False, soft_wrap=True)


def _cell(record: dict[str, float], key: str, form: str) -> str:
    value = record[key]
    return "-" if math.isnan(value) else format(value, form)
