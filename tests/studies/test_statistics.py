"""Statistics against closed forms, other implementations and simulated truth."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from studies import statistics
from tests.studies.plans import result


def test_an_interquartile_mean_is_of_the_middle_half_of_all_tasks():
    tasks = [np.array([0.0, 10.0, 2.0, 3.0]), np.array([100.0, 4.0, 5.0, -7.0])]
    assert statistics.interquartile_mean(*tasks) == pytest.approx((2 + 3 + 4 + 5) / 4)
    stacked = [np.stack([task, task + 1]) for task in tasks]
    np.testing.assert_allclose(statistics.interquartile_mean(*stacked), [3.5, 4.5])


def test_an_interval_draws_the_seeds_of_each_task_apart():
    # One task has no spread: where seeds were drawn over all tasks, its share would vary, and the interval be wide.
    certain, spread = np.full(8, 5.0), np.array([1.0, 2.0, 3.0, 4.0, 6.0, 7.0, 8.0, 9.0])
    found = statistics.difference([certain, spread], [certain, np.zeros(8)])
    alone = statistics.difference([spread], [np.zeros(8)])
    assert found.value == pytest.approx(alone.value / 2)
    assert found.high - found.low == pytest.approx((alone.high - alone.low) / 2, rel=0.1)


def test_the_interval_of_a_difference_covers_the_truth_about_as_often_as_it_says():
    rng, trials = np.random.default_rng(0), 60
    covered = 0
    for _ in range(trials):
        ours, theirs = rng.normal(1.0, 1.0, (2, 20)), rng.normal(0.0, 1.0, (2, 20))
        covered += not statistics.difference(list(ours), list(theirs)).excludes(1.0)
    # 95 % in the limit, somewhat less with 20 seeds: fewer than 50 of 60 would have a chance below 1e-4 at 93 %.
    assert covered >= stats.binom.ppf(1e-4, trials, 0.93)


def test_the_probability_of_improvement_is_that_of_mann_and_whitney():
    rng = np.random.default_rng(1)
    ours, theirs = rng.integers(0, 6, (2, 7)).astype(float), rng.integers(0, 5, (2, 9)).astype(float)
    chances = [stats.mannwhitneyu(a, b).statistic / (7 * 9) for a, b in zip(ours, theirs, strict=True)]
    found = statistics.improvement(list(ours), list(theirs))
    assert found.value == pytest.approx(np.mean(chances))
    assert found.low <= found.value <= found.high


@pytest.mark.parametrize("seeds", range(1, statistics.FEWEST_SEEDS))
def test_few_seeds_have_no_interval(seeds):
    found = statistics.interval_of([np.full(seeds, 0.5), np.full(5, 0.5)])
    assert found.value == 0.5
    assert math.isnan(found.low)
    assert math.isnan(found.high)
    assert str(found) == "0.500"
    assert not found.excludes(0)
    ratio = statistics.cost_ratio([result("a", 0.0, 0.1)] * seeds, [result("b", 0.0, 0.2)] * 5)
    assert ratio.text(".2f") == "never"


def test_what_an_arm_saves_is_read_off_its_mean_curve():
    base = [result("a", 0.0, 0.2, 0.4)] * 5  # ends with 0.4 after 200 tokens
    assert statistics.cost_ratio(base, base).value == 1
    # On average 0.42 after 100 tokens.
    fast = [result("c", 0.0, 0.5, 0.6)] * 3 + [result("d", 0.0, 0.3, 0.6)] * 2
    found = statistics.cost_ratio(fast, base)
    assert found.value == pytest.approx(0.4 / 0.42 / 2)
    # Five of c are drawn in 8 % of all cases, and have 0.4 after 80 tokens. One of c and four of d are drawn in 8 %,
    # too, and are at 0.34 after 100 tokens; five of d in 1 %.
    assert (found.low, found.high) == (pytest.approx(0.4), pytest.approx((1 + 0.06 / 0.26) / 2))
    cheap = [result("e", 0.0, 0.2, 0.4, tokens=10.0)] * 2
    assert statistics.cost_ratio(cheap, base).value == pytest.approx(0.1)
    slow = [result("f", 0.0, 0.1, 0.2)] * 2
    assert statistics.cost_ratio(slow, base).value == math.inf
    short = [result("g", 0.0, 0.4)] * 2  # ended early, as where every question has retired
    # On average 0.3 after 100 tokens and 0.4333 after 133.3.
    assert statistics.cost_ratio([*short, result("h", 0.0, 0.1, 0.5)], base).value == pytest.approx(125 / 200)


def spent(run, generated, trained, seconds=None):
    """A run with other costs."""
    trained = np.array(trained, dtype=float)
    run.curves.update(generated_tokens=np.array(generated, dtype=float), gradient_tokens=trained)
    run.curves["seconds"] = trained if seconds is None else np.array(seconds, dtype=float)
    return run


def test_an_arm_saves_time_from_the_ratio_at_which_both_cost_the_same():
    base = [spent(result("a", 0.0, 0.4), [0, 1000], [0, 500])] * 2
    # Half of the way to its second evaluation: 600 tokens generated, 1,100 trained on.
    arm = [spent(result("b", 0.0, 0.2, 0.6), [0, 400, 800], [0, 600, 1600])] * 2
    ratio = statistics.break_even(arm, base).value
    assert ratio == pytest.approx(600 / 400)
    assert 1000 * ratio + 500 == pytest.approx(600 * ratio + 1100)
    assert statistics.break_even(base, base).value == math.inf
    assert statistics.break_even([spent(result("c", 0.0, 0.4), [0, 900], [0, 400])], base).value == 0  # less of both
    assert (
        statistics.break_even([spent(result("d", 0.0, 0.3), [0, 100], [0, 900])], base).value == math.inf
    )  # never gets there


@given(st.tuples(*[st.floats(0, 10)] * 3), st.integers(0, 2**31))
def test_prices_are_those_that_the_runs_were_made_with(true, seed):
    rng = np.random.default_rng(seed)
    runs = []
    for _ in range(6):
        generated, trained = rng.uniform(1, 9, 2)
        run = spent(result("a", *np.zeros(rng.integers(2, 9))), [0], [0])
        run.curves.update(
            {name: np.array([of]) for name, of in (("generated_tokens", generated), ("gradient_tokens", trained))}
        )
        run.curves["seconds"] = np.array([true @ np.array([generated, trained, run.curves["step"][-1]]) + 1e-9])
        runs.append(run)
    predicted = [
        statistics.prices(runs) @ [run.curves[cost][-1] for cost in ("generated_tokens", "gradient_tokens", "step")]
        for run in runs
    ]
    np.testing.assert_allclose(predicted, [run.curves["seconds"][-1] for run in runs], rtol=1e-6, atol=1e-8)
