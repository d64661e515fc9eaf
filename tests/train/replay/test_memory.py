"""The memory against an independent model of its rules, under any sequence of operations."""

import math
import statistics
import tracemalloc
from fractions import Fraction
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exgrpo.train.common.step_batch import StepBatch
from exgrpo.train.config.objective import ObjectiveConfig
from exgrpo.train.config.replay import Baseline
from exgrpo.train.replay import ExperienceConfig, ExperienceMemory, MethodOptions, Replay
from exgrpo.train.replay.groups import BANDS
from tests.train.batches import Row, make_batch, trajectories

K, QUESTIONS = 4, 5


def group(
    question: int, rewards: list[float], *, replayed: bool = False, step: int = 0, first: int = 0
) -> tuple[int, list[Row]]:
    """A group of two tokens each, for `make_batch`."""
    fresh = [Row(reward, (first + i, 7), step=step) for i, reward in enumerate(rewards)]
    return question, [*fresh, *([Row(1.0, (99,), replayed=True)] if replayed else [])]


def store(memory: ExperienceMemory, batch: StepBatch, step: int = 0) -> None:
    """With all rows that `admit` chooses."""
    memory.update(batch, step, memory.admitted(batch))


def remembering(questions: int, samples: int = K, *, success: float = 1.0, retire: bool = True, **options):
    """A memory with these options."""
    config = ExperienceConfig(**options, expire=("retirement",) if retire else ())
    return ExperienceMemory(questions, MethodOptions(config, samples, success))


REWARDS = [-0.5, 0.0, 0.1, 0.25, 0.7, 1.0]

# Responses overlap between steps: duplicates happen.
ENTRY = st.tuples(
    *(st.integers(0, QUESTIONS - 1), st.lists(st.sampled_from(REWARDS), min_size=K, max_size=K)),
    *(st.integers(0, 3), st.booleans()),
)
continuous_steps = st.lists(st.lists(ENTRY, max_size=4, unique_by=lambda entry: entry[0]), max_size=12)


@given(continuous_steps, st.booleans(), st.sampled_from([0.7, 1.0]))
def test_memory_of_continuous_rewards_follows_a_plain_model(history, retire, success):
    memory = remembering(QUESTIONS, K, bucket_by="reward_deviation", retire=retire, success=success)
    stored: dict[int, dict[tuple[int, ...], float]] = {}  # question -> response -> reward, oldest first
    bucket: dict[int, int] = {}
    retired: set[int] = set()
    for step, entries in enumerate(history):
        groups = []
        for question, rewards, first, mixed in entries:
            mixed = mixed and question in stored
            groups.append(group(question, rewards[: K - mixed], replayed=mixed, step=step, first=first))
        store(memory, make_batch(groups), step)
        of_fresh = [[row for row in rows if not row.replayed] for _, rows in groups]
        # By numpy here too: a position halfway between two buckets hangs on the last bit.
        spread = [float(np.std([row.reward for row in fresh])) for fresh in of_fresh]
        for (question, rows), fresh, sigma in zip(groups, of_fresh, spread, strict=True):
            if retire and all(row.reward >= success for row in fresh) and len(fresh) > 1:
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

        assert {q: [tuple(t.response) for t in trajectories(memory, q)] for q in range(QUESTIONS)} == {
            q: list(stored.get(q, {})) for q in range(QUESTIONS)
        }
        assert all(t.reward == stored[q][tuple(t.response)] for q in stored for t in trajectories(memory, q))
        assert memory.count.tolist() == [bucket.get(q, 0) for q in range(QUESTIONS)]
        assert set(np.flatnonzero(memory.retired)) == retired


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
    replay = Replay(MethodOptions(ExperienceConfig(), K), 3, 0)
    batch = make_batch([group(0, [1.0, 0.0, 0.0, 0.0]), group(1, [1.0] * 3, replayed=True), (2, [Row(replayed=True)])])
    bands = {name: replay.in_band(batch, name).tolist() for name in BANDS}
    assert bands == {
        "all": [True] * 3,
        "easy": [False, False, True],
        "medium": [False, False, True],
        "hard": [True, False, True],
    }


@pytest.mark.parametrize("baseline", get_args(Baseline))
def test_answers_that_are_all_alike_have_no_advantage_to_the_bit(baseline):
    memory = ExperienceMemory(
        1, MethodOptions(ExperienceConfig(admit="all"), 3, objective=ObjectiveConfig(baseline=baseline))
    )
    store(memory, make_batch([group(0, [0.1] * 3)]))
    assert memory.table.column("advantage").tolist() == [0.0] * 3


@pytest.mark.parametrize("bucket_by", ["success_count", "reward_deviation"])
def test_groups_of_stored_answers_alone_show_nothing(bucket_by):
    """As a composition of one's own may plan them beside others."""
    memory, other = (remembering(3, K, bucket_by=bucket_by, count_replayed=True) for _ in range(2))
    fresh, stored = group(0, [1.0, 1.0, 1.0, 0.0]), (1, [Row(1.0, (i,), replayed=True) for i in range(2)])
    for of in (memory, other):
        store(of, make_batch([group(1, [1.0, 1.0, 0.0, 0.0]), group(2, [0.0] * K)]))
    store(memory, make_batch([fresh, stored]), 1)
    store(other, make_batch([fresh]), 1)
    for name, array in other.arrays().items():
        assert memory.arrays()[name].tolist() == array.tolist(), name


@pytest.mark.parametrize("bucket_by", ["success_count", "reward_deviation"])
def test_an_answer_without_tokens_is_no_success_whatever_its_reward(bucket_by):
    memory = remembering(1, 2, success=-1.0, bucket_by=bucket_by)
    store(memory, make_batch([(0, [Row(0.0, (), finished=False), Row(-0.5)])]))
    assert not memory.retired.any()
    assert memory.table.stored().length.all()


def test_the_memory_takes_eight_bytes_per_token_and_room_for_as_much_again():
    tokens, count = 1000, 500
    rng = np.random.default_rng(0)
    memory = remembering(count, 8)

    tracemalloc.start()
    try:
        for question in range(count):
            rows = [Row(float(i < 3), rng.integers(0, 9, tokens, dtype=np.int32)) for i in range(8)]
            store(memory, make_batch([(question, rows)]))
        del rows
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(memory.table) == 3 * count
    # 4 bytes of id and 4 of log-prob; no mark of observations, as there are none. A row takes about 110 bytes. There is
    # room for as much again, which takes no memory until it is used.
    assert held < len(memory.table) * 2 * (8 * tokens + 110) + 50_000
