"""Terminal display of a run."""

import math
from itertools import accumulate
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from exgrpo.train.common.errors import printable

FAILED = "failed"
"""Column that appears once it is above 0."""
COLUMNS = {
    FAILED: ("reward_failed_fraction", ".0%"),
    "reward": ("reward", ".3f"),
    "Pass@1": ("pass_rate", ".3f"),
    "replayed": ("replayed", ".0f"),
    "length": ("response_tokens", ".0f"),
    "s/step": ("seconds", ".1f"),
    "entropy": ("entropy", ".3f"),
    "cut": ("truncated", ".0%"),
    "buffer": ("buffer_trajectories", ".0f"),
    "retired": ("retired", ".0f"),
    "tokens/s": ("tokens_per_second", ".0f"),
    "mfu": ("mfu", ".1%"),
    "idle": ("idle_group_fraction", ".0%"),
    "grad": ("grad_norm", ".2f"),
    "ratio": ("fresh_ratio", ".3f"),
}
"""Metric and format of each column, by title and priority: a narrow terminal shows the first ones."""
CELL = 6
"""Width of the longest usual cell in characters."""
SHOWN_STEPS = 12


class Display:
    """Live table of the latest steps above a progress bar; without a terminal, one line per step.

    A narrow terminal shows the columns that fit; metrics.jsonl has all.

    Args:
        done: number of finished steps of a resumed run.
        console: console to print on; None: print nothing (ranks other than 0).
    """

    def __init__(self, steps: int, done: int, console: Console | None) -> None:
        self.console = console
        self.recent: list[dict[str, float]] = []
        self.failed = False
        self.progress = Progress(
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=console,
        )
        self.task = self.progress.add_task("training", total=steps, completed=done)
        self.live = Live(self._view(), console=console) if console and console.is_terminal else None

    def __enter__(self) -> Self:
        if self.live:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live:
            self.live.stop()

    def say(self, message: str) -> None:
        """Print a line above the display."""
        if self.console:
            self.console.print(printable(message), highlight=False, markup=False)

    def step(self, record: dict[str, float]) -> None:
        """Show the metrics of a finished step."""
        self.recent = [*self.recent, record][-SHOWN_STEPS:]
        self.failed |= record[COLUMNS[FAILED][0]] > 0
        self.progress.advance(self.task)
        if self.live:
            self.live.update(self._view())
        elif self.console:
            cells = [f"{title} {_cell(record, *COLUMNS[title])}" for title in self._titles()]
            remaining = self.progress.tasks[0].time_remaining
            eta = "" if remaining is None else f"  ETA {remaining // 60:.0f}:{remaining % 60:02.0f}"
            self.console.print(f"step {record['step']:.0f}  " + "  ".join(cells) + eta, highlight=False, soft_wrap=True)

    def _titles(self) -> list[str]:
        return [title for title in COLUMNS if self.failed or title != FAILED]

    def _view(self) -> Group:
        titles = self._titles()
        # A cell has a space on either side and a border.
        ends = accumulate(max(len(title), CELL) + 3 for title in ("step", *titles))
        titles = titles[: max(0, sum(end < self.console.width for end in ends) - 1)] if self.console else []
        table = Table(expand=True)
        for title in ("step", *titles):
            table.add_column(title, justify="right", no_wrap=True)
        for record in self.recent:
            cells = [_cell(record, *COLUMNS[title]) for title in titles]
            table.add_row(f"{record['step']:.0f}", *cells)
        return Group(table, self.progress)


def _cell(record: dict[str, float], key: str, form: str) -> str:
    value = record[key]
    return "-" if math.isnan(value) else format(value, form)
