"""Seeds, the sharing of work, files and the screen."""

import io
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from exgrpo.train.common.distributed import World
from exgrpo.train.common.seeds import derive_seed, generator
from exgrpo.train.metrics.display import COLUMNS, Display


def test_seeds_differ_by_purpose_and_number_and_repeat():
    seeds = [
        derive_seed(seed, purpose, *numbers)
        for seed in (0, 1)
        for purpose in ("rollouts", "replay")
        for numbers in ((), (0,), (1,), (0, 1))
    ]
    assert len(set(seeds)) == len(seeds)
    assert derive_seed(0, "rollouts", 3) == derive_seed(0, "rollouts", 3)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert generator(3, "replay").integers(1 << 40) == generator(3, "replay").integers(1 << 40)


@given(st.integers(1, 5), st.lists(st.integers(), max_size=20))
def test_shares_join_to_the_whole_in_order(size, items):
    shares = [World(rank, size, torch.device("cpu"), None).split(items) for rank in range(size)]

    class Gathering(World):
        def gather(self, value):
            return shares

    assert Gathering(0, size, torch.device("cpu"), None).join(shares[0]) == items


@pytest.mark.parametrize("terminal", [True, False])
def test_the_display_shows_every_column(terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=170)
    with Display(3, 0, console) as display:
        display.say("hello [/b]")
        for step in (1, 2):
            record = {"step": float(step), **{key: 0.5 for key, _ in COLUMNS.values()}}
            display.step({**record, "fresh_ratio": math.nan})
    shown = console.file.getvalue()
    assert "hello [/b]" in shown
    assert all(title in shown for title in COLUMNS)
    assert "ETA" in shown
    assert "0.500" in shown


def test_ranks_without_a_console_print_nothing(capsys):
    with Display(3, 0, None) as display:
        display.say("hello")
        display.step({"step": 1.0, **{key: np.nan for key, _ in COLUMNS.values()}})
    assert capsys.readouterr().out == ""
