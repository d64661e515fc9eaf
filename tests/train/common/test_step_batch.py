"""The record of a step against lists of lists: what its columns hold after parts were joined, taken and settled."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exgrpo.train.common.records import Rollout
from exgrpo.train.common.step_batch import StepBatch
from tests.train.batches import Row, lists, make_batch, rows_of, sets

REWARDS = st.sampled_from([0.0, 0.1, 1.0])
RESPONSES = st.lists(st.integers(0, 50), max_size=4)


def rows(replayed: bool) -> st.SearchStrategy[list[Row]]:
    made = st.builds(Row, reward=REWARDS, response=RESPONSES, replayed=st.just(replayed))
    cut = made.map(lambda row: replace(row, allowed_tokens=sets(row.response)))
    return st.lists(made | cut, max_size=4)


@st.composite
def groups(draw, count: int, *, replayed: bool) -> list[tuple[int, list[Row]]]:
    return [(draw(st.integers(0, 9)), draw(rows(replayed))) for _ in range(count)]


def told(batch: StepBatch) -> list[tuple[int, int, list[int], float, bool, list[float], list[list[int]]]]:
    """What is known of each row."""
    found = []
    for number, row in zip(batch.group, rows_of(batch), strict=True):
        words = lists(row.allowed_tokens) if batch.has("allowed_tokens") else [[]] * len(row.token)
        of_row = int(number), int(row.question), row.token.tolist(), float(row.reward), bool(row.replayed)
        found.append((*of_row, row.old_log_prob.tolist(), words))
    return found


def expected(of_groups: list[tuple[int, list[Row]]]) -> list:
    return [
        (
            *(i, question, list(row.response), row.reward, row.replayed, [-0.5] * len(row.response)),
            [[]] * len(row.response) if row.allowed_tokens is None else row.allowed_tokens,
        )
        for i, (question, of_group) in enumerate(of_groups)
        for row in of_group
    ]


@given(st.data(), st.integers(0, 4))
def test_stored_answers_stand_behind_the_fresh_ones_of_their_group(data, count):
    fresh = data.draw(groups(count, replayed=False))
    stored = [(question, data.draw(rows(True))) for question, _ in fresh]
    whole = make_batch(fresh).append_rows(make_batch(stored))
    assert told(whole) == expected([(q, [*of, *past]) for (q, of), (_, past) in zip(fresh, stored, strict=True)])
    assert [prompt.tolist() for prompt in whole.prompt] == [[q, q + 1] for q, _ in fresh]


@given(st.data(), st.integers(0, 3), st.integers(0, 3))
def test_further_groups_stand_behind_and_some_groups_are_numbered_anew(data, count, more):
    first, further = data.draw(groups(count, replayed=False)), data.draw(groups(more, replayed=True))
    whole = make_batch(first).append_groups(make_batch(further))
    everything = [*first, *further]
    assert told(whole) == expected(everything)
    chosen = data.draw(st.permutations(range(len(everything))))[: data.draw(st.integers(0, len(everything)))]
    assert told(whole.take_groups(chosen)) == expected([everything[i] for i in chosen])
    taken = whole.take(whole.rows_of(chosen))
    assert [one[1:] for one in told(taken)] == [one[1:] for one in expected([everything[i] for i in chosen])]


@given(st.data(), st.integers(0, 4))
def test_numbers_of_groups_are_those_of_their_lists(data, count):
    of_groups = data.draw(groups(count, replayed=False))
    batch = make_batch(of_groups)
    rewards = [[row.reward for row in of_group] for _, of_group in of_groups]
    assert batch.has_signal.tolist() == [len(set(of)) > 1 for of in rewards]
    means = [np.mean(of) if of else np.nan for of in rewards]
    np.testing.assert_allclose(batch.mean(batch.reward), means, rtol=1e-12)
    assert batch.num_tokens.tolist() == [len(row.response) for _, of in of_groups for row in of]


def test_a_token_that_the_policy_did_not_write_is_no_token_of_its_own():
    batch = make_batch([(1, [Row(response=[1, 2, 3], response_mask=[True, False, True], log_prob=[-1, 0, -3]), Row()])])
    assert batch.num_tokens.tolist() == [2, 2]
    assert batch.row_values(0, batch.old_log_prob).tolist() == [-1, -3]
    assert batch.answer(0).response_mask.tolist() == [True, False, True]
    assert batch.answer(1).response_mask is None


def test_what_nobody_has_filled_cannot_be_read_and_what_is_filled_in_part_is_nothing_elsewhere():
    batch = make_batch([(1, [Row(), Row(replayed=True)])])
    with pytest.raises(AttributeError, match="the column log_prob of the batch is not filled yet"):
        batch.log_prob  # noqa: B018
    with pytest.raises(AttributeError, match="a StepBatch has no rewards"):
        batch.rewards  # noqa: B018
    with pytest.raises(ValueError, match=r"advantage: expected \[2\], got \[3\]"):
        batch.fill(advantage=[1.0, 2.0, 3.0])
    batch.put(np.array([1]), log_prob=np.array([-1, -2], np.float32))
    np.testing.assert_array_equal(batch.log_prob, np.array([np.nan, np.nan, -1, -2], np.float32))


def test_equal_prompts_of_answers_that_are_scored_are_one_question():
    prompts = [np.array(ids, np.int32) for ids in ([1, 2], [3], [1, 2])]
    batch = StepBatch.from_answers(prompts, [Rollout(np.array([n], np.int32), True) for n in range(3)])
    assert batch.question.tolist() == [0, 1, 0]
    assert np.isnan(batch.engine_log_prob).all()
    assert batch.response_mask.all()
