"""The weights of units against the formulas that the papers or their code state."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exgrpo.train.common.errors import ConfigError
from exgrpo.train.replay import ExperienceConfig, Priority, Setting, Units, draw, rules

K = 8


def prioritised(name: str, units: Units, **options) -> Priority:
    return rules.find("prioritise", name)(units, Setting(ExperienceConfig(**options), K))


def units(now: int = 100, **columns) -> Units:
    size = len(next(iter(columns.values())))
    return Units.of(now, question=np.arange(size), **{name: np.array(column) for name, column in columns.items()})


STEPS = st.lists(st.integers(1, 9), min_size=1, max_size=20)


@given(STEPS, st.data())
def test_the_newest_and_the_oldest_steps_are_exhausted_in_order(steps, data):
    wanted, rng = data.draw(st.integers(0, len(steps))), np.random.default_rng(data.draw(st.integers(0, 9)))
    for name, order in (("newest", sorted(steps, reverse=True)), ("oldest", sorted(steps))):
        drawn = draw(rng, len(steps), wanted, prioritised(name, units(step=steps)))
        assert sorted(steps[i] for i in drawn) == sorted(order[:wanted])


@given(st.lists(st.integers(0, 8), min_size=1, max_size=20), st.data())
def test_the_prompts_nearest_to_one_half_are_drawn_first(counts, data):
    wanted, rng = data.draw(st.integers(0, len(counts))), np.random.default_rng(data.draw(st.integers(0, 9)))
    drawn = draw(rng, len(counts), wanted, prioritised("middle", units(count=np.array(counts, float))))
    distances = sorted(abs(count - 4) for count in counts)
    assert sorted(abs(counts[i] - 4) for i in drawn) == distances[:wanted]


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=9))
def test_an_advantage_weighs_by_the_root_of_its_size(advantages):
    """(|A| + 1e-6)^(1/2): rollout-level replay, arXiv 2606.04560."""
    log_weight, stratum = prioritised("advantage", units(advantage=advantages))
    assert stratum is None
    np.testing.assert_allclose(np.exp(log_weight), [math.sqrt(abs(a) + 1e-6) for a in advantages], rtol=1e-12)


@given(
    st.lists(st.tuples(st.sampled_from([-1.0, 0.0, 0.3, 1.0]), st.integers(0, 500)), min_size=1, max_size=9),
    st.sampled_from([0.5, 50.0, 500.0]),
)
def test_freshness_weighs_by_reward_and_age(rows, scale):
    """p = (|reward| + 1e-6) exp(-age / tau), drawn by p^0.6: FreshPER, arXiv 2604.16918, and its code."""
    reward, age = zip(*rows, strict=True)
    given_units = units(now=600, reward=reward, step=[600 - one for one in age])
    log_weight, stratum = prioritised("freshness", given_units, age_scale=scale)
    assert stratum is None
    logarithms = [0.6 * math.log(abs(r) + 1e-6) - 0.6 * a / scale for r, a in rows]
    np.testing.assert_allclose(log_weight, logarithms, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "column"), [("advantage", "advantage"), ("freshness", "reward")])
def test_what_is_not_known_of_a_prompt_is_one_clear_error(name, column):
    with pytest.raises(ConfigError, match=rf"looks at '{column}', which is not known .*: there are question, count"):
        prioritised(name, units(count=[1.0, 2.0]))


def test_units_can_be_taken_by_number_and_by_a_mask():
    whole = units(step=[3, 5, 7], count=[1.0, 2.0, 3.0], successes=[1, 0, 2], answers=[4, 0, 8])
    np.testing.assert_array_equal(whole.accuracy, [0.25, 0, 0.25])
    for places in (np.array([2, 0]), np.array([True, False, True])):
        some = whole.take(places)
        np.testing.assert_array_equal(some.question, np.arange(3)[places])
        np.testing.assert_array_equal(some.age, np.array([97, 95, 93])[places])
        assert len(some) == 2
        assert some.take(np.array([1])).count.tolist() == [whole.count[places][1]]
