"""The buffer in memory, in files of tokens and on disk: exact, written once, checked."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exgrpo.train.checkpoint.store import ExperienceStore, file_names, read_checked, write_checked
from exgrpo.train.common.columns import columns_of
from exgrpo.train.common.errors import ConfigError
from exgrpo.train.common.records import AllowedTokens, Trajectory
from exgrpo.train.common.step_batch import StepBatch
from exgrpo.train.replay import blocks
from exgrpo.train.replay import table as table_module
from exgrpo.train.replay.table import Table, pack
from tests.train.batches import lists


def trajectory(question: int, seed: int) -> Trajectory:
    rng = np.random.default_rng(seed)
    length = int(rng.integers(1, 9))
    return Trajectory(
        question=question,
        response=rng.integers(0, 1 << 20, length).astype(np.int32),
        log_prob=-rng.random(length, dtype=np.float32),
        finished=bool(seed % 2),
        reward=1.0 + seed / 3,
        step=seed,
        old_log_probs_from=("trainer", "engine", "unknown")[seed % 3],
        key=seed * 7919 - (1 << 62) if seed % 4 else 0,
        penalty=seed / 7,
        response_mask=None if seed % 5 or length == 1 else np.arange(length) % 2 == 0,
        allowed_tokens=AllowedTokens.from_lists([range(seed % 7 + i) for i in range(length)])
        if seed % 3 and length > 1
        else None,
    )


def add(table: Table, trajectories: list[Trajectory]) -> None:
    """Store trajectories."""
    table.add(StepBatch.from_trajectories(trajectories))


def same(a: Trajectory, b: Trajectory) -> bool:
    names = ("question", "finished", "reward", "step", "old_log_probs_from", "key", "penalty")
    plain = all(getattr(a, name) == getattr(b, name) for name in names)
    arrays = ("response", "log_prob", "response_mask")
    plain = plain and lists(a.allowed_tokens) == lists(b.allowed_tokens)
    return plain and all(np.array_equal(getattr(a, name), getattr(b, name)) for name in arrays)


@pytest.fixture
def few(monkeypatch):
    """So that tables are tidied within a few rows, and tokens lie in several blocks."""
    monkeypatch.setattr(table_module, "FEWEST", 4)
    monkeypatch.setattr(blocks, "FEWEST", 4)
    monkeypatch.setattr(blocks, "MOST", 16)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), max_size=6), st.booleans())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_alive_comes_back_in_order(few, tmp_path_factory, history, reopen):
    folder = tmp_path_factory.mktemp("store")
    store, alive, table, seed = ExperienceStore(folder), [], Table(100), 0
    for added, removed in history:
        new = [trajectory(seed + i, seed + i) for i in range(added)]
        removed = min(removed, len(alive))
        table.remove(table.rows()[:removed])
        table.tidy()
        add(table, new)
        alive = alive[removed:] + new
        seed += added
        index = store.save(table.stored())
        if reopen:
            store = ExperienceStore(folder)
        loaded = store.load(index)
        assert len(loaded) == len(alive)
        assert all(map(same, loaded, alive))
        assert all(t.response.dtype == np.int32 and t.log_prob.dtype == np.float32 for t in loaded)
        table.fill(loaded)


@pytest.mark.parametrize("reopen", [False, True])
def test_a_full_block_is_written_once_and_goes_with_its_answers(tmp_path, monkeypatch, reopen):
    monkeypatch.setattr(blocks, "FEWEST", 64)
    monkeypatch.setattr(blocks, "MOST", 64)
    store, table = ExperienceStore(tmp_path), Table(200)
    made = [trajectory(i, i) for i in range(100)]
    add(table, made[:50])
    first = store.save(table.stored())
    assert len(file_names(first)) >= 3
    if reopen:
        store = ExperienceStore(tmp_path)
        table.fill(store.load(first))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    add(table, made[50:])
    index = store.save(table.stored())
    assert {path: path.stat().st_mtime_ns for path in before} == before
    unchanged = file_names(first) if reopen else file_names(first)[:-1]  # to the last one, answers were added
    assert set(unchanged) < set(file_names(index))
    assert all(map(same, ExperienceStore(tmp_path).load(first), made)), "the checkpoint before it is still whole"
    table.remove(table.rows()[:50])
    table.tidy()
    last = store.save(table.stored())
    assert not set(file_names(last)) & set(unchanged)
    store.remove_unused(set(file_names(last)))
    assert all(map(same, ExperienceStore(tmp_path).load(last), made[50:]))


def test_a_load_takes_the_memory_of_twice_what_lives_at_most(tmp_path, monkeypatch):
    tokens, count = 1000, 400
    monkeypatch.setattr(blocks, "MOST", 10 * tokens)
    zeros = np.zeros(tokens, np.int32)
    table, store = Table(count), ExperienceStore(tmp_path)
    add(table, [Trajectory(i, zeros + 1, zeros - np.float32(1), True, 1.0, 0) for i in range(count)])
    table.remove(table.rows()[np.arange(count) % 4 > 0])
    table.tidy()
    index = store.save(table.stored())
    del store, table
    tracemalloc.start()
    try:
        kept = ExperienceStore(tmp_path).load(index)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(kept) == count / 4
    # 8 bytes per token; columns and file names take under 300 bytes an answer.
    assert held < len(kept) * (2 * 8 * tokens + 300) + 50_000


WAS = {"response_mask": "own", "allowed_tokens": "kept", "old_log_probs_from": "behaviour"}
"""Columns whose names were others before."""


def test_answers_are_read_under_the_names_that_their_columns_had(tmp_path):
    def earlier(arrays):
        parts = {name: name.split(".") for name in arrays}
        return {".".join(WAS.get(part, part) for part in parts[name]): array for name, array in arrays.items()}

    answers = pack([trajectory(i, i) for i in range(50)])
    arrays = ExperienceStore(tmp_path).save(answers)
    names = [write_checked(tmp_path, earlier(read_checked(tmp_path, name))) for name in file_names(arrays)]
    assert file_names(arrays) != names
    arrays = {**earlier(arrays), "blocks": np.array([list(bytes.fromhex(name)) for name in names], np.uint8)}
    assert all(map(same, ExperienceStore(tmp_path).load(arrays), answers))


def test_tokens_are_loaded_into_files(tmp_path):
    answers = pack([trajectory(i, i) for i in range(50)])
    index = ExperienceStore(tmp_path / "store").save(answers)
    loaded = ExperienceStore(tmp_path / "store", tmp_path).load(index)
    columns = [block.columns for block in loaded.blocks.values()]
    arrays = [
        array
        for one in columns
        for array in (one["token"], one["old_log_prob"], one["response_mask"], one["allowed_tokens"].ids)
    ]
    assert all(isinstance(array.base, np.memmap) for array in arrays)
    assert all(map(same, loaded, answers))
    for name in columns_of("group", "row", stored=True):
        assert loaded.columns[name].tolist() == answers.columns[name].tolist()


def test_tokens_take_at_most_twice_the_room_of_what_is_left(few):
    """And a block that is being filled; a window of answers moves on for a long time."""
    table, rng = Table(1), np.random.default_rng(0)
    for number in range(2000):
        add(table, [trajectory(0, number)])
        rows = table.rows()
        table.remove(rng.choice(rows, max(len(rows) - 50, 0), replace=False))
        table.tidy()
        room = sum(one.room for one in table.blocks.contents.values())
        assert room <= 2 * table.column("length").sum() + blocks.MOST


def test_tokens_in_files_are_those_in_memory(few, tmp_path):
    table, made = Table(2, tmp_path), [trajectory(number % 2, number) for number in range(40)]
    add(table, made)
    before = table.stored()
    table.remove(table.rows()[::2])
    table.tidy()
    assert all(map(same, table.stored(), made[1::2]))
    assert all(map(same, before, made)), "what leaves later does not change it"
    columns = [one.columns for one in table.blocks.contents.values()]
    sets = [one["allowed_tokens"] for one in columns if "allowed_tokens" in one]
    arrays = [*((one.ids, one.bounds) for one in sets), [one["token"] for one in columns]]
    assert sets
    assert all(isinstance(array.base, np.memmap) for of_block in arrays for array in of_block)
    assert not list(tmp_path.iterdir()), "they have no names"


def test_a_folder_that_cannot_be_used_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"experience\.folder .*missing: No such file.* name a folder"):
        blocks.check_folder(tmp_path / "missing")
    blocks.check_folder(tmp_path)
    blocks.check_folder(None)


def test_a_replay_of_a_row_that_is_named_twice_counts_twice():
    table = Table(1)
    add(table, [trajectory(0, 0)])
    assert table.replayed(np.repeat(table.rows(), 2)).tolist() == [2, 2]
