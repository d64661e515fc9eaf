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
    "tokens/s": ("tokens_per_second", ".0f"),
    "mfu": ("mfu", ".1%"),
    "s/step": ("seconds", ".1f"),
    "failed": ("reward_failed_fraction", ".0%"),
}
WANTED = (
    *("reward", "Pass@1", "replayed", "length", "s/step", "entropy", "cut"),
    *("buffer", "retired", "tokens/s", "mfu", "idle", "grad", "ratio"),
)
"""Columns by priority: a narrow terminal shows the first ones."""
FAILED = "failed"
"""Column that appears once it is above 0, then with the highest priority."""
CELL = 6
"""Width of the longest usual cell in characters."""
SHOWN_STEPS = 12


def fitting(width: int, *, failed: bool = False) -> list[str]:
    """Return the titles of the columns that fit into `width` characters next to the step, in the order of `COLUMNS`."""
    wanted = (FAILED, *WANTED) if failed else WANTED
    # A cell has a space on either side and a border.
    ends = list(accumulate(max(len(title), CELL) + 3 for title in ("step", *wanted)))[1:]
    kept = {title for title, end in zip(wanted, ends, strict=True) if end < width}
    return [title for title in COLUMNS if title in kept]


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
            titles = [title for title in COLUMNS if self.failed or title != FAILED]
            cells = [f"{title} {_cell(record, *COLUMNS[title])}" for title in titles]
            remaining = self.progress.tasks[0].time_remaining
            eta = "" if remaining is None else f"  ETA {remaining // 60:.0f}:{remaining % 60:02.0f}"
            self.console.print(f"step {record['step']:.0f}  " + "  ".join(cells) + eta, highlight=False, soft_wrap=True)

    def _view(self) -> Group:
        titles = fitting(self.console.width, failed=self.failed) if self.console else []
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
