"""Weights against the formulas of the papers, draws against chi-square tests (seeded, so that they cannot flicker)."""

import itertools
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from exgrpo.train.common.errors import ConfigError
from exgrpo.train.replay import Candidates, ExperienceConfig, MethodOptions, Priority, Replay, draw, rules
from tests.train.batches import make_batch
from tests.train.replay.test_memory import group, store

K = 8
VALUES = sorted({float(Fraction(K * m, f)) for f in (K - 1, K) for m in range(1, f)})
"""Every success count that a question which is neither solved nor hopeless can have."""

CLOSED_FORMS = {
    "gaussian": lambda k: math.exp(-((k - 4) ** 2) / 2),
    "uniform": lambda k: 1.0,
    "linear": lambda k: k / 8,
    "sqrt": lambda k: math.sqrt(k / 8),
    "linear_clip": lambda k: min(k / 8, 0.5),
}


def candidates(now: int = 100, **columns) -> Candidates:
    size = len(next(iter(columns.values())))
    return Candidates.of(now, question=np.arange(size), **{name: np.array(column) for name, column in columns.items()})


def prioritised(name: str, given: Candidates, **options) -> Priority:
    return rules.find("prioritise", name)(given, MethodOptions(ExperienceConfig(**options), K))


def draw_questions(rng: np.random.Generator, count: np.ndarray, wanted: int, name: str, **options) -> np.ndarray:
    """Draw among the buffered questions, those with a count."""
    buffered = np.flatnonzero(count)
    return buffered[draw(rng, len(buffered), wanted, prioritised(name, candidates(count=count[buffered]), **options))]


def weights(name: str, values: np.ndarray, **options) -> np.ndarray:
    """The weight of each of some different counts, in order."""
    log_weight, stratum = prioritised(name, candidates(count=values), **options)
    np.testing.assert_array_equal(stratum, np.arange(len(values)))
    return np.exp(log_weight)


def counts(sizes: dict[float, int]) -> np.ndarray:
    """Success count of each question, in an order that mixes them; ten are not buffered."""
    count = np.repeat(np.array(list(sizes), float), list(sizes.values()))
    return np.random.default_rng(0).permutation(np.concatenate([count, np.zeros(10)]))


def test_gaussian_law_has_the_papers_weights():
    expected = [0.0044, 0.054, 0.242, 0.399, 0.242, 0.054, 0.0044]
    np.testing.assert_allclose(weights("gaussian", np.arange(1.0, K)) / np.sqrt(2 * np.pi), expected, atol=5e-4)


@pytest.mark.parametrize("law", CLOSED_FORMS)
def test_laws_are_evaluated_between_whole_counts(law):
    expected = [CLOSED_FORMS[law](k) for k in VALUES]
    np.testing.assert_allclose(weights(law, np.array(VALUES)), expected)


def test_mu_and_sigma_of_the_gaussian():
    ours = np.log(weights("gaussian", np.array([2.0, 24 / 7, 3.5]), mu=0.25, sigma=1.5))
    np.testing.assert_allclose(ours, [0, -((10 / 7) ** 2) / 4.5, -0.5])


@pytest.mark.parametrize("with_fresh_groups", [False, True])
def test_questions_of_medium_difficulty_get_the_replays_that_the_law_gives_them(with_fresh_groups):
    """From graded groups to planned questions: mixed groups show m of 7 and never 4 of 8."""
    shown = [(m, 7) for m in range(7)] + [(m, 8) for m in range(1, 8) if with_fresh_groups]
    shown = [pair for pair in shown for _ in range(30)]
    replay = Replay(MethodOptions(ExperienceConfig(start_pass_rate=0.0, ratio=0.5), K), len(shown), 5)
    memory = replay.memory
    store(memory, make_batch([group(q, [1.0] + [0.0] * 7) for q in range(len(shown))]))
    rewards = [[1.0] * m + [0.0] * (f - m) for m, f in shown]
    store(memory, make_batch([group(q, r, replayed=len(r) == 7) for q, r in enumerate(rewards)]), 1)
    planned = [replay.plan(8, 2) for _ in range(3000)]
    assert all(sum(one.choose for one in groups) == 4 for groups in planned)
    drawn = np.array([one.question for groups in planned for one in groups if one.choose])
    observed: dict[Fraction, int] = dict.fromkeys((max(Fraction(K * m, f), Fraction(1)) for m, f in shown), 0)
    for question in drawn:
        m, f = shown[question]
        observed[max(Fraction(K * m, f), Fraction(1))] += 1
    law = np.array([CLOSED_FORMS["gaussian"](k) for k in observed])
    assert stats.chisquare(list(observed.values()), len(drawn) * law / law.sum()).pvalue > 0.01
    near = sum(n for k, n in observed.items() if abs(k - 4) < 1) / len(drawn)
    # 2 a / (2 (a + b + c) + d) with a, b, c, d = exp(-(4/7)^2 / 2), exp(-(12/7)^2 / 2), exp(-(20/7)^2 / 2), exp(-4.5);
    # fresh groups add 1 above, and 1 + 2 exp(-1/2) + 2 exp(-2) + exp(-4.5) below.
    assert near == pytest.approx(0.574 if with_fresh_groups else 0.771, abs=0.01)


def test_what_a_count_cannot_supply_goes_to_the_others():
    # Equal weights, three draws, one member with 24/7: it is drawn unless all three are given to 5.
    count, rng = counts({24 / 7: 1, 5: 20}), np.random.default_rng(3)
    took = [np.sum(count[draw_questions(rng, count, 3, "uniform")] == 24 / 7) for _ in range(4000)]
    assert stats.binomtest(int(sum(took)), 4000, 7 / 8).pvalue > 0.01


WEIGHTS = [5.0, 1.0, 0.25, 3.0]


def successive(weights, wanted: int) -> dict[tuple[int, ...], float]:
    """The exact probability of each order in which `wanted` candidates are drawn one after the other."""
    found = {}
    for order in itertools.permutations(range(len(weights)), wanted):
        left, chance = sum(weights), 1.0
        for one in order:
            chance *= weights[one] / left
            left -= weights[one]
        found[order] = chance
    return found


@pytest.mark.parametrize(("rounds", "block", "most"), [(8, 256, 9), (8, 3, 9), (8, 3, 1), (1, 2, 9), (0, 256, 9)])
@pytest.mark.parametrize("wanted", [1, 2, 3, 4])
def test_candidates_are_drawn_one_after_the_other_by_their_weights(monkeypatch, wanted, rounds, block, most):
    monkeypatch.setattr("exgrpo.train.replay.candidates.ROUNDS", rounds)
    monkeypatch.setattr("exgrpo.train.replay.candidates.BLOCK", block)
    monkeypatch.setattr("exgrpo.train.replay.candidates.MOST", most)
    exact, rng, times = successive(WEIGHTS, wanted), np.random.default_rng(6), 5_000
    priority = Priority(np.log(WEIGHTS) + 700)
    observed = Counter(tuple(draw(rng, 4, wanted, priority).tolist()) for _ in range(times))
    assert set(observed) <= set(exact)
    assert sum(exact.values()) == pytest.approx(1)
    statistic = stats.chisquare([observed[order] for order in exact], [times * chance for chance in exact.values()])
    assert statistic.pvalue > 0.01


@pytest.mark.parametrize("gap", [690.0, 744.0, 745.0, 5000.0, np.inf])
def test_weights_that_nearly_vanish_come_last_and_are_drawn_by_themselves(gap):
    """Two of ordinary weight, and four that are exp(gap) times as light; of these one is three times as likely."""
    rng, times = np.random.default_rng(7), 3000
    light = -gap + np.log([1.0, 1.0, 3.0, 1.0])
    priority = Priority(np.concatenate([[0.0, 1.0], light]))
    drawn = np.array([draw(rng, 6, 3, priority) for _ in range(times)])
    assert {tuple(sorted(pair)) for pair in drawn[:, :2].tolist()} == {(0, 1)}
    counts = np.bincount(drawn[:, 2], minlength=6)[2:]
    expected = np.array([1, 1, 3, 1]) / 6 if np.isfinite(gap) else np.full(4, 1 / 4)
    assert stats.chisquare(counts, times * expected).pvalue > 0.01


@given(
    st.lists(
        st.one_of(st.floats(-1e6, 1e6), st.sampled_from([-np.inf, math.log(1e-300), 0.0])), min_size=1, max_size=12
    ),
    st.data(),
)
def test_any_weights_give_different_units_and_all_of_them_where_all_are_wanted(log_weight, data):
    size = len(log_weight)
    wanted = data.draw(st.integers(0, size))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    for priority in (Priority(), Priority(np.array(log_weight)), Priority(np.zeros(3), np.arange(size) % 3)):
        drawn = draw(rng, size, wanted, priority)
        assert drawn.dtype == np.int64
        assert len(set(drawn.tolist())) == len(drawn) == wanted
        assert set(drawn.tolist()) <= set(range(size))
    # With gaps of more than 50 nats the order is certain.
    steep = Priority(-60.0 * np.arange(size))
    assert draw(rng, size, wanted, steep).tolist() == list(range(wanted))


@pytest.mark.parametrize("law", ["linear", "sqrt", "linear_clip"])
def test_a_count_of_zero_comes_last(law):
    """Prompts may have it, questions with stored answers cannot."""
    count, rng = np.array([0.0, 3.0, 0.0, 5.0]), np.random.default_rng(0)
    drawn = [draw(rng, 4, 3, prioritised(law, candidates(count=count))).tolist() for _ in range(300)]
    assert all({1, 3} < set(one) for one in drawn)
    assert {one for of_draw in drawn for one in of_draw} == {0, 1, 2, 3}
    assert set(draw(rng, 2, 1, prioritised(law, candidates(count=np.zeros(2)))).tolist()) <= {0, 1}


FIRST = {
    "newest": ("step", int, lambda n: -n),
    "oldest": ("step", int, lambda n: n),
    "middle": ("count", float, lambda n: abs(n - 4)),
}


@pytest.mark.parametrize("name", FIRST)
@given(st.lists(st.integers(0, 8), min_size=1, max_size=20), st.data())
def test_the_newest_or_oldest_steps_or_the_prompts_nearest_to_one_half_are_drawn_first(name, values, data):
    wanted, rng = data.draw(st.integers(0, len(values))), np.random.default_rng(data.draw(st.integers(0, 9)))
    column, kind, order = FIRST[name]
    drawn = draw(rng, len(values), wanted, prioritised(name, candidates(**{column: np.array(values, kind)})))
    assert sorted(order(values[i]) for i in drawn) == sorted(map(order, values))[:wanted]


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=9))
def test_an_advantage_weighs_by_the_root_of_its_size(advantages):
    """(|A| + 1e-6)^(1/2): rollout-level replay, arXiv 2606.04560."""
    log_weight, stratum = prioritised("advantage", candidates(advantage=advantages))
    assert stratum is None
    np.testing.assert_allclose(np.exp(log_weight), [math.sqrt(abs(a) + 1e-6) for a in advantages], rtol=1e-12)


@given(
    st.lists(st.tuples(st.sampled_from([-1.0, 0.0, 0.3, 1.0]), st.integers(0, 500)), min_size=1, max_size=9),
    st.sampled_from([0.5, 50.0, 500.0]),
)
def test_freshness_weighs_by_reward_and_age(rows, scale):
    """p = (|reward| + 1e-6) exp(-age / tau), drawn by p^0.6: FreshPER, arXiv 2604.16918, and its code."""
    reward, age = zip(*rows, strict=True)
    given_units = candidates(now=600, reward=reward, step=[600 - one for one in age])
    log_weight, stratum = prioritised("freshness", given_units, age_scale=scale)
    assert stratum is None
    logarithms = [0.6 * math.log(abs(r) + 1e-6) - 0.6 * a / scale for r, a in rows]
    np.testing.assert_allclose(log_weight, logarithms, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "column"), [("advantage", "advantage"), ("freshness", "reward")])
def test_what_is_not_known_of_a_prompt_is_one_clear_error(name, column):
    with pytest.raises(ConfigError, match=rf"looks at '{column}', which is not known .*: there are question, count"):
        prioritised(name, candidates(count=[1.0, 2.0]))
