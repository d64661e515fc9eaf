"""The buffer in memory, in files of tokens and on disk: exact, and checked."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exgrpo.train.checkpoint.store import SUFFIX, read_checked, read_experience, write_checked
from exgrpo.train.common.columns import columns_of
from exgrpo.train.common.durable import DamagedFileError
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
    return stored_rows(unpacked(read_experience(folder, write_checked(folder, packed(table.stored())))))


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
        loaded = unpacked(read_experience(folder, write_checked(folder, packed(table.stored()))))
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
        table.fill(unpacked(read_experience(tmp_path, name)))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(table) == alive == count / 4
    # 8 bytes per token; columns take under 300 bytes an answer.
    assert held < alive * (2 * 8 * tokens + 300) + 50_000


WAS = {"response_mask": "own", "allowed_tokens": "kept", "old_log_probs_from": "behaviour"}
"""Columns whose names were others before."""


def of_format_6(folder, made: list[Row]) -> str:
    """Write answers as format 6 did, with the names of its beginning: tokens in files of several answers."""
    arrays, digests = {"count": np.arange(3)}, []
    batch = each(made)
    rows = {name: batch.column(name) for name in columns_of("group", "row", stored=True)}
    block, start = np.arange(len(made)) // 7, np.zeros(len(made), np.int64)
    for number in range(max(block, default=-1) + 1):
        part = batch.take(np.flatnonzero(block == number)[::-1])
        start[part.group] = part.start[:-1]
        file = {name: getattr(part, name) for name in ("token", "old_log_prob")}
        if number:
            file["response_mask"] = part.response_mask
            file |= {"allowed_tokens": part.allowed_tokens.ids, "allowed_tokens.sizes": part.allowed_tokens.sizes}
        digests.append(list(bytes.fromhex(write_checked(folder, earlier(file)))))
    rows |= {"length": batch.length, "start": start, "block": block}
    arrays |= {f"row.{name}": values for name, values in rows.items()}
    return write_checked(folder, earlier({**arrays, "blocks": np.array(digests, np.uint8).reshape(-1, 32)}))


def earlier(arrays):
    parts = {name: name.split(".") for name in arrays}
    return {".".join(WAS.get(part, part) for part in parts[name]): array for name, array in arrays.items()}


@pytest.mark.parametrize("count", [0, 1, 50])
def test_format_6_is_read_under_the_names_that_its_columns_had(tmp_path, count):
    made = [answer(i, i + 1 if i < 7 else i) for i in range(count)]
    # The first file has neither masks nor sets.
    made[:7] = [Row(**{**vars(one), "response_mask": True, "allowed_tokens": None}) for one in made[:7]]
    arrays = read_experience(tmp_path, of_format_6(tmp_path, made))
    assert arrays["count"].tolist() == [0, 1, 2]
    found = stored_rows(unpacked(arrays))
    assert len(found) == count
    assert all(map(same, found, made))


@pytest.mark.parametrize("count", [0, 20])
def test_format_5_is_read(tmp_path, count):
    """Its files have rows, too, of which some have left."""
    made, files, digests = answers(count), {0: range(12), 1: range(12, 20)} if count else {}, []
    for places in files.values():
        batch = each([made[place] for place in places])
        file = {name: getattr(batch, name) for name in ("question", "reward", "step", "key", "penalty")}
        file |= {"response": batch.token, "log_prob": batch.old_log_prob, "length": batch.length.astype(np.int32)}
        file |= {"finished": batch.finished.astype(np.uint8), "behaviour": batch.old_log_probs_from}
        file |= {"written": batch.response_mask.astype(np.uint8), "kept": batch.allowed_tokens.ids}
        digests.append(list(bytes.fromhex(write_checked(tmp_path, {**file, "kept_words": batch.allowed_tokens.sizes}))))
    left = [place for place in range(count) if place % 3]
    arrays = {name: np.arange(len(left)) for name in ("successes", "answers", "replays")}
    arrays |= {"advantage": np.arange(len(left)) / 2, "segments": np.array(digests, np.uint8).reshape(-1, 32)}
    arrays["segment"] = np.array([int(place >= 12) for place in left], np.int32)
    arrays["row"] = np.array([place % 12 for place in left], np.int32)
    found = unpacked(read_experience(tmp_path, write_checked(tmp_path, arrays)))
    assert len(found) == len(left)
    assert all(same(one, made[place]) for one, place in zip(stored_rows(found), left, strict=True))
    for name in ("advantage", "successes", "answers", "replays"):
        assert getattr(found, name).tolist() == arrays[name].tolist()


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
