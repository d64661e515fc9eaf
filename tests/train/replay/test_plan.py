"""Which questions a step works on, when replay starts, and which trajectory is replayed."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from exgrpo.train.replay import DelayedStart, ExperienceConfig, MeanScores, Replay
from exgrpo.train.replay.candidates import RULES, Candidates
from tests.train.batches import make_batch
from tests.train.replay.test_memory import K, group


def filled(questions: int, buffered: int, retired: int, ratio: float) -> Replay:
    replay = Replay(ExperienceConfig(start_pass_rate=0.0, ratio=ratio), questions, K, 0)
    memory = replay.memory
    memory.update(make_batch([group(q, [1.0, 1.0, 0.0, 0.0]) for q in range(buffered)]), 0, collect=True)
    memory.update(make_batch([group(q, [1.0] * K) for q in range(buffered, buffered + retired)]), 0, collect=True)
    return replay


@given(
    st.integers(0, 12),
    st.integers(0, 12),
    st.integers(0, 12),
    st.integers(1, 16),
    st.sampled_from([0, 0.25, 0.5, 1]),
)
def test_plan_mixes_replayed_and_fresh_questions(buffered, retired, other, batch, ratio):
    questions = max(1, buffered + retired + other)
    replay = filled(questions, buffered, retired, ratio)
    groups = replay.plan(batch, 1)
    replayed = [group for group in groups if group.choose]
    assert len(replayed) == min(int(ratio * batch), buffered)
    assert groups[len(groups) - len(replayed) :] == replayed, "groups that replay come last"
    assert {(group.fresh, group.choose, group.rows) for group in replayed} <= {(K - 1, 1, ())}
    assert {(group.fresh, group.rows) for group in groups if not group.choose} <= {(K, ())}
    chosen = [group.question for group in groups]
    left = questions - int(replay.memory.retired.sum())
    assert int(replay.memory.retired.sum()) == (retired if ratio else 0)
    assert len(chosen) == len(set(chosen)) == min(batch, left)
    assert not replay.memory.retired[chosen].any()


def test_floor_of_the_ratio_is_not_lost_to_rounding():
    groups = filled(200, 100, 0, ratio=0.29).plan(100, 1)
    assert sum(group.choose for group in groups) == 29


def test_the_start_is_a_one_way_latch():
    latch = DelayedStart(0.35)
    latch.observe(0.35)
    assert not latch.open
    latch.observe(0.36)
    assert latch.open
    latch.observe(0.0)
    assert latch.open
    assert DelayedStart(0.0).open


@given(st.lists(st.tuples(st.floats(0, 5, width=32), st.floats(0, 5, width=32)), min_size=1, max_size=6))
def test_selection_equals_brute_force(values):
    lengths = [1 + 7 * i % 5 for i in range(len(values))]
    candidates = Candidates(np.array(lengths), MeanScores(*np.array(values).T))
    rng, order = np.random.default_rng(0), range(len(values))
    expected = {
        "lowest_entropy": min(order, key=lambda i: (values[i][0], i)),
        "highest_entropy": min(order, key=lambda i: (-values[i][0], i)),
        "lowest_nll": min(order, key=lambda i: (values[i][1], i)),
        "shortest": min(order, key=lambda i: (lengths[i], i)),
    }
    for name, best in expected.items():
        assert RULES[name].choose(candidates, rng) == best
    assert RULES["random"].choose(candidates, rng) in order
    assert set(RULES) == {*expected, "random"}


def test_random_selection_is_uniform():
    candidates = Candidates(np.ones(4, np.int64), MeanScores(np.zeros(4), np.zeros(4)))
    rng = np.random.default_rng(0)
    counts = np.bincount([RULES["random"].choose(candidates, rng) for _ in range(4000)])
    assert abs(counts - 1000).max() < 4 * np.sqrt(4000 * 0.25 * 0.75)
