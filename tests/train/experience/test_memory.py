"""The memory against an independent model of its rules, under any sequence of operations."""

import math
import statistics
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exgrpo.train.experience import ExperienceMemory, deviation_buckets, estimate_successes, in_band
from exgrpo.train.records import Group, Trajectory

K = 4
QUESTIONS = 5


def trajectory(question: int, ids: tuple[int, ...], reward: float, step: int = 0) -> Trajectory:
    return Trajectory(question, np.array(ids, np.int32), np.full(len(ids), -0.5, np.float32), True, reward, step)


def group(question: int, rewards: list[float], *, replayed: bool = False, step: int = 0, first: int = 0) -> Group:
    fresh = tuple(trajectory(question, (first + i, 7), reward, step) for i, reward in enumerate(rewards))
    return Group(question, fresh, trajectory(question, (99,), 1.0) if replayed else None)


steps = st.lists(
    st.lists(
        st.tuples(
            st.integers(0, QUESTIONS - 1),
            st.lists(st.sampled_from([0.0, 1.0]), min_size=K, max_size=K),
            st.integers(0, 3),  # responses overlap between steps: duplicates happen
            st.booleans(),
        ),
        min_size=1,
        max_size=4,
        unique_by=lambda entry: entry[0],
    ),
    max_size=12,
)


@given(
    steps,
    st.booleans(),
    st.sampled_from([None, 1, 3]),
    st.sampled_from([None, 2]),
    st.booleans(),
    st.integers(0, 5),
)
@settings(max_examples=200)
def test_memory_follows_a_plain_model(history, count_replayed, max_per_question, max_age, retire, start):
    memory = ExperienceMemory(
        QUESTIONS, K, count_replayed=count_replayed, max_per_question=max_per_question, max_age=max_age, retire=retire
    )
    stored: dict[int, dict[tuple[int, ...], int]] = {}  # question -> response -> step, oldest first
    bucket: dict[int, int] = {}
    retired: set[int] = set()
    for step, entries in enumerate(history):
        groups = []
        for question, rewards, first, mixed in entries:
            mixed = mixed and question in stored
            groups.append(group(question, rewards[: K - mixed], replayed=mixed, step=step, first=first))
        memory.update(groups, step, collect=step >= start)
        for g in groups:
            right, shown = sum(r.reward for r in g.fresh), len(g.fresh)
            if count_replayed and g.replayed:
                right, shown = right + 1, shown + 1
            k = int(np.floor(K * right / shown + 0.5))
            if right == shown and retire:
                retired.add(g.question)
                stored.pop(g.question, None)
                bucket.pop(g.question, None)
                continue
            if g.question in retired:
                continue
            if step >= start:
                for row in g.fresh:
                    if row.reward == 1.0:
                        kept = stored.setdefault(g.question, {})
                        kept.pop(tuple(row.response), None)
                        kept[tuple(row.response)] = step
                        if max_per_question and len(kept) > max_per_question:
                            del kept[next(iter(kept))]
            if g.question in stored:
                bucket[g.question] = min(max(k, 1), K - 1)
        if max_age is not None:
            for question in list(stored):
                stored[question] = {k: v for k, v in stored[question].items() if v >= step - max_age}
                if not stored[question]:
                    del stored[question], bucket[question]

        assert {q: [tuple(t.response) for t in memory.trajectories(q)] for q in range(QUESTIONS)} == {
            q: list(stored.get(q, {})) for q in range(QUESTIONS)
        }
        assert memory.bucket.tolist() == [bucket.get(q, 0) for q in range(QUESTIONS)]
        assert set(np.flatnonzero(memory.retired)) == retired
        assert len(memory) == len(stored)
        assert memory.trajectory_count == sum(map(len, stored.values()))
        assert memory.bucket_sizes().tolist() == [0] + [sum(b == k for b in bucket.values()) for k in range(1, K + 1)]
        assert all(t.reward == 1.0 and t.question == q for q in stored for t in memory.trajectories(q))


REWARDS = [-0.5, 0.0, 0.1, 0.25, 0.7, 1.0]

continuous_steps = st.lists(
    st.lists(
        st.tuples(
            st.integers(0, QUESTIONS - 1),
            st.lists(st.sampled_from(REWARDS), min_size=K, max_size=K),
            st.integers(0, 3),
            st.booleans(),
        ),
        min_size=1,
        max_size=4,
        unique_by=lambda entry: entry[0],
    ),
    max_size=12,
)


@given(continuous_steps, st.booleans())
@settings(max_examples=200)
def test_memory_of_continuous_rewards_follows_a_plain_model(history, retire):
    memory = ExperienceMemory(QUESTIONS, K, bucket_by="reward_deviation", retire=retire)
    stored: dict[int, dict[tuple[int, ...], float]] = {}  # question -> response -> reward, oldest first
    bucket: dict[int, int] = {}
    retired: set[int] = set()
    for step, entries in enumerate(history):
        groups = []
        for question, rewards, first, mixed in entries:
            mixed = mixed and question in stored
            groups.append(group(question, rewards[: K - mixed], replayed=mixed, step=step, first=first))
        memory.update(groups, step, collect=True)
        # By numpy here too: a position halfway between two buckets hangs on the last bit.
        spread = [float(np.std([row.reward for row in g.fresh])) for g in groups]
        for g, sigma in zip(groups, spread, strict=True):
            if retire and all(row.reward == 1.0 for row in g.fresh):
                retired.add(g.question)
                stored.pop(g.question, None)
                bucket.pop(g.question, None)
            elif g.question not in retired:
                mean = statistics.mean(Fraction(str(row.reward)) for row in g.rows)
                for row in g.fresh:
                    if Fraction(str(row.reward)) > mean:
                        kept = stored.setdefault(g.question, {})
                        kept.pop(tuple(row.response), None)
                        kept[tuple(row.response)] = row.reward
                if g.question in stored:
                    # The formula of the paper, to the nearest bucket there is.
                    position = K * (sigma - min(spread)) / max(max(spread) - min(spread), 1e-6)
                    bucket[g.question] = min(max(math.floor(position + 0.5), 1), K - 1)

        assert {q: [tuple(t.response) for t in memory.trajectories(q)] for q in range(QUESTIONS)} == {
            q: list(stored.get(q, {})) for q in range(QUESTIONS)
        }
        assert all(t.reward == stored[q][tuple(t.response)] for q in stored for t in memory.trajectories(q))
        assert memory.bucket.tolist() == [bucket.get(q, 0) for q in range(QUESTIONS)]
        assert set(np.flatnonzero(memory.retired)) == retired


def test_binary_groups_store_the_same_by_either_rule():
    by_count, by_spread = ExperienceMemory(3, K), ExperienceMemory(3, K, bucket_by="reward_deviation")
    groups = [group(0, [1.0, 0.0, 0.0, 0.0]), group(1, [1.0, 1.0, 0.0, 0.0]), group(2, [0.0] * 4)]
    for memory in (by_count, by_spread):
        memory.update(groups, 0, collect=True)
    for question in range(3):
        assert by_count.trajectories(question) == by_spread.trajectories(question)
    assert by_count.bucket.tolist() == [1, 2, 0]
    # Deviations 0.433, 0.5 and 0 of a range of 0.5: 3.46 and 4 of 4, kept inside 1..3.
    assert by_spread.bucket.tolist() == [3, 3, 0]


def test_buckets_by_deviation_span_the_step():
    spreads = [0.0, 0.1, 0.2, 0.4]
    groups = [group(q, [0.5 - s, 0.5 + s] * 4) for q, s in enumerate(spreads)]
    assert deviation_buckets(groups, 8).tolist() == [1, 2, 4, 7]  # 8 sigma / 0.4 = 0, 2, 4, 8
    assert deviation_buckets(groups[:1], 8).tolist() == [1]
    assert deviation_buckets([], 8).tolist() == []


@pytest.mark.parametrize("samples", [2, 3, 7, 8])
def test_bands_are_the_papers(samples):
    for k in range(samples + 1):
        percent = Fraction(100 * k, samples)
        assert in_band(k, samples, "all")
        assert in_band(k, samples, "easy") == (75 <= percent < 100)
        assert in_band(k, samples, "medium") == (25 < percent <= 75)
        assert in_band(k, samples, "hard") == (0 < percent <= 25)
    with pytest.raises(ValueError, match="unknown band 'simple'; expected all, easy"):
        in_band(1, samples, "simple")


def test_without_retirement_a_solved_question_goes_to_the_highest_bucket_and_keeps_its_trajectories():
    memory = ExperienceMemory(2, K, retire=False)
    memory.update([group(0, [1.0, 0.0, 0.0, 0.0], first=10)], 0, collect=True)
    memory.update([group(0, [1.0] * 3, replayed=True), group(1, [1.0] * 4)], 1, collect=True)
    assert not memory.retired.any()
    assert memory.bucket.tolist() == [K - 1, K - 1]
    assert [len(memory.trajectories(q)) for q in range(2)] == [4, 4]


@pytest.mark.parametrize("right", range(8))
def test_mixed_group_estimate_rescales_the_fresh_rows(right):
    mixed = group(0, [1.0] * right + [0.0] * (7 - right), replayed=True)
    # algorithm: m of 7 becomes round(8 m / 7)
    assert estimate_successes(mixed, 8) == round(8 * right / 7)
    assert estimate_successes(mixed, 8, count_replayed=True) == right + 1


@given(st.integers(2, 16), st.data())
def test_estimate_is_extreme_only_where_the_evidence_is(samples, data):
    shown = data.draw(st.sampled_from([samples, samples - 1]))
    right = data.draw(st.integers(0, shown))
    k = estimate_successes(group(0, [1.0] * right + [0.0] * (shown - right), replayed=shown < samples), samples)
    assert (k == 0) == (right == 0)
    assert (k == samples) == (right == shown)
    if shown == samples:
        assert k == right


def test_unsolved_buffered_question_moves_to_the_lowest_bucket_and_keeps_its_trajectories():
    memory = ExperienceMemory(1, K)
    memory.update([group(0, [1.0, 1.0, 1.0, 0.0])], 0, collect=True)
    assert memory.bucket[0] == 3
    memory.update([group(0, [0.0] * 3, replayed=True)], 1, collect=True)
    assert memory.bucket[0] == 1
    assert memory.trajectory_count == 3


def test_nothing_is_collected_before_the_start_but_solved_questions_retire():
    memory = ExperienceMemory(2, K)
    memory.update([group(0, [1.0] * 4), group(1, [1.0, 0.0, 0.0, 0.0])], 0, collect=False)
    assert memory.retired.tolist() == [True, False]
    assert len(memory) == 0


def test_of_two_equal_responses_the_newer_log_probs_stay():
    memory = ExperienceMemory(1, K)
    for step in (0, 5):
        memory.update([group(0, [1.0, 0.0, 0.0, 0.0], step=step)], step, collect=True)
    assert [t.step for t in memory.trajectories(0)] == [5]


def test_the_memory_takes_about_eight_bytes_per_token():
    tokens, count = 1000, 500
    rng = np.random.default_rng(0)
    memory = ExperienceMemory(count, 8)

    def row(question: int, reward: float) -> Trajectory:
        response, log_prob = rng.integers(0, 9, tokens, dtype=np.int32), rng.random(tokens, dtype=np.float32)
        return Trajectory(question, response, log_prob, True, reward, 0)

    tracemalloc.start()
    try:
        for question in range(count):
            rows = tuple(row(question, float(i < 3)) for i in range(8))
            memory.update([Group(question, rows)], 0, collect=True)
        del rows
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert memory.trajectory_count == 3 * count
    # 4 bytes of id and 4 of log-prob; a trajectory's objects take about half a kilobyte.
    assert held / (memory.trajectory_count * tokens) < 8.8
