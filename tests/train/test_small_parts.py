"""Seeds, the sharing of work, successes and the screen."""

import io
import math
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from exgrpo.train.common.distributed import World
from exgrpo.train.common.seeds import derive_seed, generator
from exgrpo.train.common.success import RewardWatch, is_success
from exgrpo.train.metrics.display import COLUMNS, Display


def test_seeds_differ_by_purpose_and_number_and_repeat():
    every = product((0, 1), ("rollouts", "replay"), ((), (0,), (1,), (0, 1)))
    seeds = [derive_seed(seed, purpose, *numbers) for seed, purpose, numbers in every]
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


numbers = st.integers(-1000, 1000).map(lambda hundredths: hundredths / 100)


@given(st.lists(numbers, min_size=1), numbers)
def test_a_reward_of_at_least_the_threshold_is_a_success(rewards, threshold):
    # Whole hundredths compare exactly.
    expected = [round(100 * reward) >= round(100 * threshold) for reward in rewards]
    assert is_success(np.array(rewards), threshold).tolist() == expected
    assert is_success(np.array(rewards, np.float32).astype(float), threshold).tolist() == expected
    assert [is_success(reward, threshold) for reward in rewards] == expected


def told(watch, steps):
    return [watch.observe(np.array(rewards)) for rewards in steps]


@given(st.lists(st.lists(st.sampled_from([0.0, 0.3, 0.9, 2.0, 5.0]), min_size=1, max_size=6), max_size=8), numbers)
def test_the_watch_speaks_once_where_rewards_differ_and_all_or_none_are_successes(steps, threshold):
    watch = RewardWatch(threshold, "the.option", patience=8)
    seen = []
    said = False
    for rewards, note in zip(steps, told(watch, steps), strict=True):
        seen += rewards
        successes = sum(reward >= threshold for reward in seen)
        expected = not said and len(seen) >= 8 and len(set(seen)) > 1 and successes in (0, len(seen))
        assert (note is not None) == expected
        said |= expected


def test_few_answers_are_spoken_of_at_the_end_and_only_once():
    watch = RewardWatch(1.0, "reward.success")
    assert watch.conclude() is None
    assert told(watch, [[0.1, 0.9], [0.5]]) == [None, None]
    assert watch.conclude().startswith("no answer is a success: the rewards of 3 answers lie between 0.1 and 0.9")
    assert watch.conclude() is None
