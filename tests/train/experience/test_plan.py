"""Which questions a step works on, when replay starts, and which trajectory is replayed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exgrpo.train.experience import (
    Candidates,
    DelayedStart,
    ExperienceMemory,
    FreshQuestions,
    MeanScore,
    plan_questions,
    question_law,
)
from exgrpo.train.experience.selection import RULES
from tests.train.experience.test_memory import K, group, trajectory

LAW = question_law("gaussian", K)


def filled(questions: int, buffered: int, retired: int) -> ExperienceMemory:
    memory = ExperienceMemory(questions, K)
    memory.update([group(q, [1.0, 1.0, 0.0, 0.0]) for q in range(buffered)], 0, collect=True)
    memory.update([group(q, [1.0] * K) for q in range(buffered, buffered + retired)], 0, collect=True)
    return memory


@given(
    st.integers(0, 12),
    st.integers(0, 12),
    st.integers(0, 12),
    st.integers(1, 16),
    st.sampled_from([0, 0.25, 0.5, 1]),
)
def test_plan_mixes_replayed_and_fresh_questions(buffered, retired, other, batch, ratio):
    questions = max(1, buffered + retired + other)
    memory = filled(questions, buffered, retired)
    rng = np.random.default_rng(0)
    pool = FreshQuestions(questions, rng)
    plan = plan_questions(memory, pool, rng, batch=batch, ratio=ratio, law=LAW)
    assert len(plan.replayed) == min(int(ratio * batch), buffered)
    chosen = [*plan.fresh, *plan.replayed]
    assert len(chosen) == len(set(chosen)) == min(batch, max(questions - retired, 0))
    assert not memory.retired[chosen].any()


def test_floor_of_the_ratio_is_not_lost_to_rounding():
    memory, rng = filled(200, 100, 0), np.random.default_rng(0)
    plan = plan_questions(memory, FreshQuestions(200, rng), rng, batch=100, ratio=0.29, law=LAW)
    assert len(plan.replayed) == 29


def test_without_replay_all_questions_are_fresh():
    memory, rng = filled(20, 10, 0), np.random.default_rng(0)
    plan = plan_questions(memory, FreshQuestions(20, rng), rng, batch=8, ratio=0, law=LAW)
    assert len(plan.replayed) == 0
    assert len(plan.fresh) == 8


def test_fresh_questions_come_epoch_by_epoch():
    pool = FreshQuestions(10, np.random.default_rng(0))
    nobody = np.zeros(10, bool)
    drawn = np.concatenate([pool.draw(4, nobody) for _ in range(5)])
    assert sorted(drawn[:10]) == list(range(10))
    assert sorted(drawn[10:]) == list(range(10))


@pytest.mark.parametrize("seed", range(3))
def test_a_batch_that_spans_two_epochs_has_no_question_twice(seed):
    pool = FreshQuestions(5, np.random.default_rng(seed))
    for _ in range(20):
        drawn = pool.draw(4, np.zeros(5, bool))
        assert len(set(drawn.tolist())) == 4


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
    rows = tuple(trajectory(0, tuple(range(1 + 7 * i % 5)), 1.0) for i in range(len(values)))
    unscored, scored = Candidates(rows), Candidates(rows, [MeanScore(entropy, nll) for entropy, nll in values])
    rng, order = np.random.default_rng(0), range(len(rows))
    expected = {
        "lowest_entropy": min(order, key=lambda i: (values[i][0], i)),
        "highest_entropy": min(order, key=lambda i: (-values[i][0], i)),
        "lowest_nll": min(order, key=lambda i: (values[i][1], i)),
        "shortest": min(order, key=lambda i: (len(rows[i].response), i)),
    }
    for name, best in expected.items():
        assert RULES[name].choose(scored if RULES[name].scored else unscored, rng) == best
    assert RULES["random"].choose(unscored, rng) in order
    assert set(RULES) == {*expected, "random"}


def test_random_selection_is_uniform():
    candidates = Candidates([trajectory(0, (i,), 1.0) for i in range(4)])
    rng = np.random.default_rng(0)
    counts = np.bincount([RULES["random"].choose(candidates, rng) for _ in range(4000)])
    assert abs(counts - 1000).max() < 4 * np.sqrt(4000 * 0.25 * 0.75)
