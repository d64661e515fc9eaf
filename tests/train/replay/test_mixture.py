"""Fresh questions of several sources: shares by weight, an order for each source, and a state that goes on exactly."""

import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2

from exgrpo.train.config.options import ExperienceConfig
from exgrpo.train.replay import FreshQuestions, MethodOptions, Mixture, Replay

SIZES, WEIGHTS = (40, 7, 300), (1.0, 2.0, 5.0)
SOURCE = np.repeat(np.arange(3), SIZES)


def pool(seed=0, sizes=SIZES, weights=WEIGHTS):
    return FreshQuestions(sum(sizes), np.random.default_rng(seed), Mixture(sizes, weights))


def nobody(questions):
    return np.zeros(questions, bool)


@given(st.integers(1, 30), st.lists(st.integers(1, 12), min_size=1, max_size=8), st.integers(0, 99), st.data())
def test_without_a_mixture_the_stream_is_that_of_one_order(questions, counts, seed, data):
    """Against the plain walk through one permutation after the other."""
    rng, order, place = np.random.default_rng(seed), [], 0
    fresh = FreshQuestions(questions, np.random.default_rng(seed))
    for count in counts:
        excluded = np.array(data.draw(st.lists(st.booleans(), min_size=questions, max_size=questions)))
        expected = []
        order = order or rng.permutation(questions).tolist()
        while len(expected) < min(count, int((~excluded).sum())):
            if place == len(order):
                order, place = rng.permutation(questions).tolist(), 0
            if not excluded[order[place]] and order[place] not in expected:
                expected.append(order[place])
            place += 1
        assert fresh.draw(count, excluded).tolist() == expected


def test_within_a_batch_the_shares_are_the_weights_while_all_sources_have_questions():
    fresh, sizes = pool(sizes=(50, 60), weights=(3.0, 1.0)), np.array([50, 60])
    counts = np.zeros(2)
    for _ in range(500):
        drawn = fresh.draw(16, nobody(110))
        assert len(set(drawn.tolist())) == 16
        counts += np.bincount(np.repeat([0, 1], sizes)[drawn], minlength=2)
    expected = 8000 * np.array([0.75, 0.25])
    assert ((counts - expected) ** 2 / expected).sum() < chi2.ppf(1 - 1e-6, 1)


def test_each_source_comes_epoch_by_epoch():
    fresh = pool()
    drawn = np.concatenate([fresh.draw(1, nobody(347)) for _ in range(3000)])
    for source, size in enumerate(SIZES):
        of_source = drawn[SOURCE[drawn] == source]
        epochs = of_source[: len(of_source) // size * size].reshape(-1, size)
        assert len(epochs) >= 2
        for epoch in epochs:
            assert len(set(epoch.tolist())) == size
        assert epochs[0].tolist() != epochs[1].tolist()


@given(st.integers(0, 400), st.integers(0, 2**32), st.floats(0, 1))
def test_what_is_excluded_is_never_drawn_and_all_else_is_before_the_batch_stays_smaller(count, seed, share):
    excluded = np.random.default_rng(seed).random(347) < share
    excluded[40:47] = True  # a source of which nothing is left
    drawn = pool(seed).draw(count, excluded)
    assert not excluded[drawn].any()
    assert len(drawn) == len(set(drawn.tolist())) == min(count, int((~excluded).sum()))


@pytest.mark.parametrize("steps", [1, 7, 40])
def test_a_replay_with_a_mixture_goes_on_exactly(steps):
    def replay(seed):
        return Replay(MethodOptions(ExperienceConfig(), 4), 347, seed, mixture=Mixture(SIZES, WEIGHTS))

    whole, resumed = replay(3), replay(4)
    for step in range(steps):
        whole.plan(16, step)
    state = copy.deepcopy(whole.state())
    expected = [whole.plan(16, step) for step in range(60)]
    resumed.restore(state)
    assert [resumed.plan(16, step) for step in range(60)] == expected
