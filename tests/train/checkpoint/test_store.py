"""The buffer in memory, in files of tokens and on disk: exact, and checked."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exgrpo.train.common.columns import columns_of
from exgrpo.train.common.durable import SUFFIX, DamagedFileError, read_checked, write_checked
from exgrpo.train.common.errors import ConfigError
from exgrpo.train.common.records import AllowedTokens
from exgrpo.train.replay import flat
from exgrpo.train.replay import table as table_module
from exgrpo.train.replay.table import Table, packed, unpacked
from tests.train.batches import Row, each, same, stored_rows


def answer(question: int, seed: int) -> Row:
    rng = np.random.default_rng(seed)
    length = int(rng.integers(1, 9))
    return Row(
        question=question,
        response=rng.integers(0, 1 << 20, length).astype(np.int32),
        log_prob=-rng.random(length, dtype=np.float32),
        finished=bool(seed % 2),
        reward=1.0 + seed / 3,
        step=seed,
        old_log_probs_from=seed % 3,
        key=seed * 7919 - (1 << 62) if seed % 4 else 0,
        penalty=seed / 7,
        response_mask=True if seed % 5 or length == 1 else np.arange(length) % 2 == 0,
        allowed_tokens=[list(range(seed % 7 + i)) for i in range(length)] if seed % 3 and length > 1 else None,
    )


def answers(count: int) -> list[Row]:
    """Answers to as many questions."""
    return [answer(number, number) for number in range(count)]


def rows_in(table: Table) -> list[Row]:
    return stored_rows(table.stored())


def saved(folder, table: Table) -> list[Row]:
    """What a checkpoint of a table gives."""
    return stored_rows(unpacked(read_checked(folder, write_checked(folder, packed(table.stored())))))


@pytest.fixture
def few(monkeypatch):
    """So that tables are tidied within a few rows, and files grow often."""
    monkeypatch.setattr(table_module, "FEWEST", 4)
    monkeypatch.setattr(table_module, "PIECE", 3)
    monkeypatch.setattr(flat, "FEWEST", 4)
    monkeypatch.setattr(flat, "MOST", 16)


@pytest.mark.parametrize("mapped", [False, True])
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), max_size=6), st.booleans())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_alive_comes_back_in_order(few, tmp_path_factory, mapped, history, reopen):
    folder = tmp_path_factory.mktemp("store")
    table, alive, seed = Table(100, folder if mapped else None), [], 0
    for added, removed in history:
        new = [answer(seed + i, seed + i) for i in range(added)]
        removed = min(removed, len(alive))
        table.remove(table.rows()[:removed])
        table.tidy()
        table.add(each(new))
        alive = alive[removed:] + new
        seed += added
        loaded = unpacked(read_checked(folder, write_checked(folder, packed(table.stored()))))
        assert len(loaded) == len(alive)
        assert all(map(same, stored_rows(loaded), alive))
        assert (loaded.token.dtype, loaded.old_log_prob.dtype) == (np.int32, np.float32)
        if reopen:
            table.fill(loaded)


def test_a_load_takes_the_memory_of_twice_what_lives_at_most(tmp_path):
    tokens, count = 1000, 400
    table = Table(count)
    table.add(each([Row(1.0, [1] * tokens, -1.0, question=i) for i in range(count)]))
    table.remove(table.rows()[np.arange(count) % 4 > 0])
    name, alive = write_checked(tmp_path, packed(table.stored())), len(table)
    del table
    tracemalloc.start()
    try:
        table = Table(count)
        table.fill(unpacked(read_checked(tmp_path, name)))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(table) == alive == count / 4
    # 8 bytes per token; columns take under 300 bytes an answer.
    assert held < alive * (2 * 8 * tokens + 300) + 50_000


def test_a_file_that_was_lost_or_changed_is_named(tmp_path):
    name = write_checked(tmp_path, {"count": np.arange(3)})
    assert read_checked(tmp_path, name)["count"].tolist() == [0, 1, 2]
    path = tmp_path / f"{name}{SUFFIX}"
    assert list(tmp_path.iterdir()) == [path]
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(DamagedFileError, match="checksum"):
        read_checked(tmp_path, name)
    path.unlink()
    with pytest.raises(DamagedFileError, match="missing"):
        read_checked(tmp_path, name)


def test_tokens_are_loaded_into_files(tmp_path):
    made, table = answers(50), Table(50, tmp_path)
    table.fill(each(made))
    again = Table(50, tmp_path)
    again.fill(unpacked(packed(table.stored())))
    assert is_mapped(again)
    assert all(map(same, rows_in(again), made))
    for name in columns_of("group", "row", stored=True):
        assert again.column(name).tolist() == table.column(name).tolist()


def is_mapped(table: Table) -> bool:
    tokens = table.stored()
    arrays = [tokens.token, tokens.old_log_prob, tokens.response_mask, tokens.allowed_tokens.ids]

    def origin(array):
        return array if isinstance(array, np.memmap) or array.base is None else origin(array.base)

    return all(isinstance(origin(array), np.memmap) for array in arrays)


def test_tokens_take_at_most_twice_what_is_left(few):
    """And what a few rows take; a window of answers moves on for a long time."""
    table, rng = Table(1), np.random.default_rng(0)
    for number in range(2000):
        table.add(each([answer(0, number)]))
        rows = table.rows()
        table.remove(rng.choice(rows, max(len(rows) - 50, 0), replace=False))
        table.tidy()
        assert table.tokens.size <= 2 * table.column("length").sum() + 8 * table_module.FEWEST


@pytest.mark.parametrize("mapped", [False, True])
def test_what_joins_and_leaves_later_changes_no_snapshot(few, tmp_path, mapped):
    table, made = Table(40, tmp_path if mapped else None), answers(40)
    table.add(each(made[:5]))
    before = table.stored()
    table.replayed(table.rows())
    table.add(each(made[5:]))
    table.remove(table.rows()[:30])
    table.tidy()
    table.add(each(made))
    assert all(map(same, stored_rows(before), made[:5]))
    assert before.replays.tolist() == [0] * 5
    assert is_mapped(table) == mapped
    assert not list(tmp_path.iterdir()), "files of tokens have no names"


def test_a_folder_that_cannot_be_used_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"experience\.folder .*missing: No such file.* name a folder"):
        flat.check_folder(tmp_path / "missing")
    flat.check_folder(tmp_path)
    flat.check_folder(None)


def test_a_replay_of_a_row_that_is_named_twice_counts_twice():
    table = Table(1)
    table.add(each([answer(0, 0)]))
    assert table.replayed(np.repeat(table.rows(), 2)).tolist() == [2, 2]


def test_sets_come_late_and_are_the_whole_vocabulary_before(few):
    table = Table(3)
    plain = [Row(1.0, (1, 2), question=i) for i in range(2)]
    table.add(each(plain))
    assert not table.answers(table.rows(), np.arange(2), np.arange(2)).has("allowed_tokens")
    table.add(each([Row(1.0, (1, 2), question=2, allowed_tokens=[[1, 5], []])]))
    found = table.answers(table.rows(), np.arange(3), np.arange(3)).allowed_tokens
    assert isinstance(found, AllowedTokens)
    assert [ids.tolist() for ids in found.lists()] == [[], [], [], [], [1, 5], []]
