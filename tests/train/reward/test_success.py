"""What a success is, and when rewards are said not to fit it."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from exgrpo.train.common.success import RewardWatch, is_success

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
