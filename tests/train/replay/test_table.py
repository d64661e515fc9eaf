"""The columns of stored trajectories against a list of dictionaries."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exgrpo.train.common.columns import LOG_PROB_SOURCES, columns_of
from exgrpo.train.common.errors import ConfigError
from exgrpo.train.common.records import AllowedTokens, Trajectory
from exgrpo.train.replay import blocks
from exgrpo.train.replay import table as module
from exgrpo.train.replay.table import NONE, Table, pack
from tests.train.batches import Row, lists, make_batch, sets

QUESTIONS = 4
OF_ORIGIN = ("advantage", "successes", "answers", "replays")


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """So that tables grow and are tidied within a few rows, and tokens lie in several blocks."""
    monkeypatch.setattr(module, "FEWEST", 4)
    monkeypatch.setattr(blocks, "FEWEST", 4)
    monkeypatch.setattr(blocks, "MOST", 16)


def a_row(number: int, question: int) -> tuple[Trajectory, dict]:
    """A trajectory and origin whose every column is different."""
    length = 1 + number % 3
    ids = np.arange(number, number + length, dtype=np.int32)
    trajectory = Trajectory(
        question,
        ids,
        -ids.astype(np.float32),
        bool(number % 2),
        number / 7,
        100 + number // 2,
        LOG_PROB_SOURCES[number % 3],
        number * 3 - 5,
        number / 13,
        None if number % 4 or length == 1 else ids == number,
        AllowedTokens.from_lists(sets(ids)) if number % 3 and number > 6 else None,
    )
    return trajectory, dict(zip(OF_ORIGIN, (number / 11 - 1, number % 5, number % 5 + 2, number % 2), strict=True))


def add(table: Table, rows: list[tuple[Trajectory, dict]]) -> list[int]:
    """Store rows of `a_row` together; returns their numbers."""
    groups = [
        (
            one.question,
            [
                Row(
                    response=one.response,
                    log_prob=one.log_prob,
                    response_mask=True if one.response_mask is None else one.response_mask,
                    old_log_probs_from=LOG_PROB_SOURCES.index(one.old_log_probs_from),
                    allowed_tokens=lists(one.allowed_tokens),
                    **{name: getattr(one, name) for name in ("reward", "finished", "step", "key", "penalty")},
                )
            ],
        )
        for one, _ in rows
    ]
    origins = {name: np.array([origin[name] for _, origin in rows]) for name in OF_ORIGIN}
    return table.add(make_batch(groups), **origins).tolist()


def expected(trajectory: Trajectory, origin: dict) -> dict:
    """The columns of a row."""
    return {
        "trajectory": trajectory,
        "finished": trajectory.finished,
        "old_log_probs_from": LOG_PROB_SOURCES.index(trajectory.old_log_probs_from),
        "penalty": trajectory.penalty,
        "question": trajectory.question,
        "step": trajectory.step,
        "reward": trajectory.reward,
        "length": len(trajectory.response),
        "key": trajectory.key,
        **origin,
    }


def check_made_again(made: Sequence[Trajectory], expected: list[Trajectory]) -> None:
    """That answers are made as they were."""
    assert len(made) == len(expected)
    for one, other in zip(made, expected, strict=True):
        for name in ("response", "log_prob", "response_mask"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        assert lists(one.allowed_tokens) == lists(other.allowed_tokens)
        plain = ("question", "finished", "reward", "step", "old_log_probs_from", "key", "penalty")
        assert [getattr(one, name) for name in plain] == [getattr(other, name) for name in plain]


def check(table: Table, model: list[dict]) -> None:
    """That a table shows what the model holds, oldest first."""
    rows = table.rows()
    assert len(table) == len(rows) == len(model)
    assert (np.diff(rows) > 0).all()
    for name in (*columns_of("group", "row", stored=True), "length"):
        assert table.column(name).tolist() == [row[name] for row in model]
        assert table.values(name, rows).tolist() == [row[name] for row in model]
    check_made_again(table.stored(), [one["trajectory"] for one in model])
    check_replayed(table, rows[::-2], model[::-2])
    for row, of_model in zip(rows.tolist(), model, strict=True):
        assert table.response(row).tolist() == of_model["trajectory"].response.tolist()
    for question in range(QUESTIONS):
        of_question = [row for row, one in zip(rows.tolist(), model, strict=True) if one["question"] == question]
        assert table.rows_of_question(question) == of_question
        assert table.held[question] == len(of_question)
        assert table.newest(np.array([question])).tolist() == (of_question[-1:] or [NONE])


def check_replayed(table: Table, rows: np.ndarray, model: list[dict]) -> None:
    """That rows are those of a batch, two in each group but the last."""
    questions = np.arange(10, 10 + (len(rows) + 1) // 2)
    batch = table.answers(rows, np.arange(len(rows)) // 2, questions)
    assert batch.question.tolist() == questions.tolist()
    assert batch.replayed.all()
    for name in columns_of("row", stored=True).keys() - {"advantage"}:
        assert getattr(batch, name).tolist() == [row[name] for row in model]
    for row, of_model in enumerate(model):
        trajectory, at = of_model["trajectory"], batch.at(row)
        np.testing.assert_array_equal(batch.token[at], trajectory.response)
        np.testing.assert_array_equal(batch.old_log_prob[at], trajectory.log_prob)
        written = (
            np.ones(len(trajectory.response), bool) if trajectory.response_mask is None else trajectory.response_mask
        )
        np.testing.assert_array_equal(batch.response_mask[at], written)
        allowed_tokens = (
            lists(batch.allowed_tokens[at]) if batch.has("allowed_tokens") else [[]] * len(trajectory.response)
        )
        assert allowed_tokens == (lists(trajectory.allowed_tokens) or [[]] * len(trajectory.response))


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(st.integers(0, QUESTIONS - 1), max_size=6)),
        st.tuples(st.just("remove"), st.lists(st.floats(0, 1, exclude_max=True), max_size=6)),
        st.tuples(st.just("remove as a list"), st.lists(st.floats(0, 1, exclude_max=True), max_size=3)),
        st.tuples(st.just("replay"), st.lists(st.floats(0, 1, exclude_max=True), max_size=4)),
        st.tuples(st.just("tidy"), st.just([])),
        st.tuples(st.just("fill"), st.just([])),
    ),
    max_size=20,
)


@given(OPERATIONS)
@settings(max_examples=400)
def test_a_table_is_a_list_of_rows(operations):
    table, model, number = Table(QUESTIONS), [], 0
    earlier = []
    for what, of_what in operations:
        places = list(dict.fromkeys(int(place * len(model)) for place in of_what)) if model and what != "add" else []
        rows = table.rows()[places]
        match what:
            case "add":
                made = [a_row(number + place, question) for place, question in enumerate(of_what)]
                assert add(table, made) == table.rows()[len(model) :].tolist()
                model += [expected(*one) for one in made]
                number += len(made)
            case "remove" | "remove as a list":
                table.remove(rows if what == "remove" else rows.tolist())
                model = [one for place, one in enumerate(model) if place not in places]
            case "replay":
                for place in places:
                    model[place]["replays"] += 1
                assert table.replayed(rows).tolist() == [model[place]["replays"] for place in places]
            case "tidy":
                table.tidy()
            case "fill":
                table = Table(QUESTIONS)
                origins = {name: np.array([one[name] for one in model]) for name in OF_ORIGIN}
                table.fill(pack([one["trajectory"] for one in model], **origins))
        check(table, model)
        earlier.append((table.stored(), [one["trajectory"] for one in model]))
    for before, trajectories in earlier:  # what leaves or moves later does not change them
        check_made_again(before, trajectories)


def test_tokens_take_at_most_twice_the_room_of_what_is_left():
    """And a block that is being filled; a window of answers moves on for a long time."""
    table, rng = Table(1), np.random.default_rng(0)
    for number in range(2000):
        add(table, [a_row(number, 0)])
        rows = table.rows()
        table.remove(rng.choice(rows, max(len(rows) - 50, 0), replace=False))
        table.tidy()
        room = sum(one.room for one in table.blocks.contents.values())
        assert room <= 2 * table.column("length").sum() + blocks.MOST


def test_tokens_in_files_are_those_in_memory(tmp_path):
    table, made = Table(2, tmp_path), [a_row(number, number % 2) for number in range(40)]
    model = [trajectory for trajectory, _ in made]
    add(table, made)
    check_made_again(table.stored(), model)
    table.remove(table.rows()[::2])
    table.tidy()
    check_made_again(table.stored(), model[1::2])
    columns = [one.columns for one in table.blocks.contents.values()]
    arrays = [
        (one["token"], one["allowed_tokens"].ids, one["allowed_tokens"].bounds)
        for one in columns
        if "allowed_tokens" in one
    ]
    assert arrays
    assert all(isinstance(array.base, np.memmap) for of_block in arrays for array in of_block)
    assert not list(tmp_path.iterdir()), "they have no names"


def test_a_folder_that_cannot_be_used_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"experience\.folder .*missing: No such file.* name a folder"):
        blocks.check_folder(tmp_path / "missing")
    blocks.check_folder(tmp_path)
    blocks.check_folder(None)


def test_rows_are_moved_together_once_more_than_half_have_left():
    table = Table(2)
    add(table, [a_row(number, number % 2) for number in range(20)])
    table.remove(np.arange(10))
    table.tidy()
    assert table.rows().tolist() == list(range(10, 20)), "half of them is not more than half"
    table.remove(np.array([11]))
    table.tidy()
    assert table.rows().tolist() == list(range(9))
    assert [one.response[0] for one in table.stored()] == [10, *range(12, 20)]


def test_a_replay_of_a_row_that_is_named_twice_counts_twice():
    table = Table(1)
    (row,) = add(table, [a_row(0, 0)])
    assert table.replayed(np.array([row, row])).tolist() == [2, 2]
