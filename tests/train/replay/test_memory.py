"""The memory against an independent model of its rules, under any sequence of operations."""

import math
import statistics
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exgrpo.train.replay import ExperienceConfig, ExperienceMemory, Replay, Setting
from exgrpo.train.replay.difficulty import BANDS, count_successes, deviation_counts, success_counts
from tests.train.batches import Row, make_batch

K = 4
QUESTIONS = 5


def group(
    question: int, rewards: list[float], *, replayed: bool = False, step: int = 0, first: int = 0
) -> tuple[int, list[Row]]:
    """A group of two tokens each, for `make_batch`."""
    fresh = [Row(reward, (first + i, 7), step=step) for i, reward in enumerate(rewards)]
    return question, [*fresh, *([Row(1.0, (99,), replayed=True)] if replayed else [])]


def remembering(questions: int, samples: int = K, *, success: float = 1.0, retire: bool = True, **options):
    """A memory with these options."""
    config = ExperienceConfig(**options, expire=("retirement",) if retire else ())
    return ExperienceMemory(questions, Setting(config, samples, success))


steps = st.lists(
    st.lists(
        st.tuples(
            st.integers(0, QUESTIONS - 1),
            st.lists(st.sampled_from([0.0, 0.4, 1.0]), min_size=K, max_size=K),
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
    st.sampled_from([2, K]),
    st.fixed_dictionaries(
        {
            "success": st.sampled_from([0.4, 1.0]),
            "count_replayed": st.booleans(),
            "max_per_question": st.sampled_from([None, 1, 3]),
            "max_age": st.sampled_from([None, 1, 2]),
            "retire": st.booleans(),
        }
    ),
    st.integers(0, 5),
)
@settings(max_examples=300)
def test_memory_follows_a_plain_model(history, samples, options, start):
    memory = remembering(QUESTIONS, samples, **options)
    success, max_per_question, max_age = options["success"], options["max_per_question"], options["max_age"]
    stored: dict[int, dict[tuple[int, ...], int]] = {}  # question -> response -> step, oldest first
    count: dict[int, Fraction] = {}
    retired: set[int] = set()
    for step, entries in enumerate(history):
        groups = []
        for question, rewards, first, mixed in entries:
            mixed = mixed and question in stored
            groups.append(group(question, rewards[: samples - mixed], replayed=mixed, step=step, first=first))
        memory.update(make_batch(groups), step, collect=step >= start)
        for question, rows in groups:
            counted = [row for row in rows if options["count_replayed"] or not row.replayed]
            right, shown = sum(row.reward >= success for row in counted), len(counted)
            if right == shown and shown >= 2 and options["retire"]:
                retired.add(question)
                stored.pop(question, None)
                count.pop(question, None)
                continue
            if question in retired:
                continue
            if step >= start:
                for row in rows:
                    if row.reward >= success and not row.replayed:
                        kept = stored.setdefault(question, {})
                        kept.pop(row.response, None)
                        kept[row.response] = step
                        if max_per_question and len(kept) > max_per_question:
                            del kept[next(iter(kept))]
            if question in stored:
                count[question] = min(max(Fraction(samples * right, shown), 1), samples - 1)
        if max_age is not None:
            for question in list(stored):
                stored[question] = {k: v for k, v in stored[question].items() if step + 1 - v <= max_age}
                if not stored[question]:
                    del stored[question], count[question]

        assert {q: [tuple(t.response) for t in memory.trajectories(q)] for q in range(QUESTIONS)} == {
            q: list(stored.get(q, {})) for q in range(QUESTIONS)
        }
        assert memory.count.tolist() == [float(count.get(q, 0)) for q in range(QUESTIONS)]
        assert set(np.flatnonzero(memory.retired)) == retired
        assert len(memory) == len(stored)
        assert memory.trajectory_count == sum(map(len, stored.values()))
        shown = [math.floor(k + Fraction(1, 2)) for k in count.values()]
        assert memory.bucket_sizes().tolist() == [shown.count(k) for k in range(samples + 1)]
        assert all(t.reward >= success and t.question == q for q in stored for t in memory.trajectories(q))


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
    memory = remembering(QUESTIONS, K, bucket_by="reward_deviation", retire=retire)
    stored: dict[int, dict[tuple[int, ...], float]] = {}  # question -> response -> reward, oldest first
    bucket: dict[int, int] = {}
    retired: set[int] = set()
    for step, entries in enumerate(history):
        groups = []
        for question, rewards, first, mixed in entries:
            mixed = mixed and question in stored
            groups.append(group(question, rewards[: K - mixed], replayed=mixed, step=step, first=first))
        memory.update(make_batch(groups), step, collect=True)
        of_fresh = [[row for row in rows if not row.replayed] for _, rows in groups]
        # By numpy here too: a position halfway between two buckets hangs on the last bit.
        spread = [float(np.std([row.reward for row in fresh])) for fresh in of_fresh]
        for (question, rows), fresh, sigma in zip(groups, of_fresh, spread, strict=True):
            if retire and all(row.reward == 1.0 for row in fresh):
                retired.add(question)
                stored.pop(question, None)
                bucket.pop(question, None)
            elif question not in retired:
                mean = statistics.mean(Fraction(str(row.reward)) for row in rows)
                for row in fresh:
                    if Fraction(str(row.reward)) > mean:
                        kept = stored.setdefault(question, {})
                        kept.pop(row.response, None)
                        kept[row.response] = row.reward
                if question in stored:
                    # The formula of the paper, to the nearest bucket there is.
                    position = K * (sigma - min(spread)) / max(max(spread) - min(spread), 1e-6)
                    bucket[question] = min(max(math.floor(position + 0.5), 1), K - 1)

        assert {q: [tuple(t.response) for t in memory.trajectories(q)] for q in range(QUESTIONS)} == {
            q: list(stored.get(q, {})) for q in range(QUESTIONS)
        }
        assert all(t.reward == stored[q][tuple(t.response)] for q in stored for t in memory.trajectories(q))
        assert memory.count.tolist() == [bucket.get(q, 0) for q in range(QUESTIONS)]
        assert set(np.flatnonzero(memory.retired)) == retired


def test_counts_by_deviation_span_the_step():
    spreads = [0.0, 0.1, 0.2, 0.4]
    groups = [group(q, [0.5 - s, 0.5 + s] * 4) for q, s in enumerate(spreads)]
    for count, expected in ((4, [0, 2, 4, 8]), (1, [0]), (0, [])):  # 8 sigma / 0.4
        assert deviation_counts(count_successes(make_batch(groups[:count]), 1.0), 8).tolist() == expected


@pytest.mark.parametrize("samples", [2, 3, 7, 8])
def test_bands_are_the_papers(samples):
    for shown in (samples, samples - 1):
        for right in range(shown + 1):
            k, percent = np.array([samples * right / shown]), Fraction(100 * right, shown)
            assert {name: in_band(k, samples).tolist() for name, in_band in BANDS.items()} == {
                "all": [True],
                "easy": [75 <= percent < 100],
                "medium": [25 < percent <= 75],
                "hard": [0 < percent <= 25],
            }


def test_a_group_is_in_a_band_by_its_fresh_answers_and_without_any_in_all_bands():
    replay = Replay(ExperienceConfig(), 3, K, 0)
    batch = make_batch([group(0, [1.0, 0.0, 0.0, 0.0]), group(1, [1.0] * 3, replayed=True), (2, [Row(replayed=True)])])
    bands = {name: replay.in_band(batch, name).tolist() for name in BANDS}
    assert bands == {
        "all": [True] * 3,
        "easy": [False, False, True],
        "medium": [False, False, True],
        "hard": [True, False, True],
    }


@given(st.integers(2, 16), st.booleans(), st.booleans(), st.data())
def test_a_groups_count_is_the_fraction_of_its_counted_rows(samples, mixed, count_replayed, data):
    right = data.draw(st.integers(0, samples - mixed))
    rewards = [1.0] * right + [0.0] * (samples - mixed - right)
    batch = make_batch([group(0, [1.0, 0.0]), group(1, rewards, replayed=mixed)])
    evidence = count_successes(batch, 1.0, count_replayed=count_replayed)
    more = mixed and count_replayed
    right, rows = right + more, samples - mixed + more
    assert (evidence.successes.tolist(), evidence.rows.tolist()) == ([1, right], [2, rows])
    assert success_counts(evidence, samples).tolist() == [samples / 2, float(Fraction(samples * right, rows))]
    assert evidence.solved.tolist() == [False, right == rows > 1]


@pytest.mark.parametrize(("success", "stored"), [(0.3, 3), (0.9, 2), (1.0, 0)])
@pytest.mark.parametrize("right", [0.9, float(np.float32(0.9)), 0.2 + 0.7], ids=["exact", "fp32", "sum"])
def test_a_success_is_what_the_setting_says(success, stored, right):
    memory = remembering(2, K, success=success)
    memory.update(make_batch([group(0, [right, right, 0.3, 0.0]), group(1, [right] * K)]), 0, collect=True)
    assert memory.trajectory_count == stored
    assert memory.count[0] == stored
    assert memory.retired.tolist() == [False, success < 1]


def test_by_deviation_a_question_is_solved_when_all_answers_are_successes():
    solved = {}
    for success in (1.0, 5.0, 9.0):
        memory = remembering(3, K, bucket_by="reward_deviation", success=success)
        groups = [group(0, [2.0, 5.0, 9.0, 9.0]), group(1, [5.0, 9.0, 9.0, 9.0]), group(2, [9.0] * K)]
        memory.update(make_batch(groups), 0, collect=True)
        solved[success] = memory.retired.tolist()
    assert solved == {1.0: [True, True, True], 5.0: [False, True, True], 9.0: [False, False, True]}


@pytest.mark.parametrize("bucket_by", ["success_count", "reward_deviation"])
def test_an_answer_without_tokens_is_no_success_whatever_its_reward(bucket_by):
    memory = remembering(1, 2, success=-1.0, bucket_by=bucket_by)
    memory.update(make_batch([(0, [Row(0.0, (), finished=False), Row(-0.5)])]), 0, collect=True)
    assert not memory.retired.any()
    assert all(len(row.response) for row in memory.all_trajectories())


def test_the_memory_takes_nine_bytes_per_token_and_room_for_as_much_again():
    tokens, count = 1000, 500
    rng = np.random.default_rng(0)
    memory = remembering(count, 8)

    tracemalloc.start()
    try:
        for question in range(count):
            rows = [Row(float(i < 3), rng.integers(0, 9, tokens, dtype=np.int32)) for i in range(8)]
            memory.update(make_batch([(question, rows)]), 0, collect=True)
        del rows
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert memory.trajectory_count == 3 * count
    room = sum(len(block.response) for block in memory.table.blocks.contents.values())
    assert memory.trajectory_count * tokens <= room < 2 * memory.trajectory_count * tokens
    # 4 bytes of id, 4 of log-prob and 1 that marks observations. A trajectory's columns take about 130 bytes, and there
    # is room for as many again.
    assert held < 9 * room + 300 * memory.trajectory_count
