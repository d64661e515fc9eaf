"""The buffer on disk: exact, append-only, checked."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exgrpo.train.checkpoint import store as module
from exgrpo.train.checkpoint.store import ExperienceStore, segment_names
from exgrpo.train.common.records import KeptSets, Trajectory
from exgrpo.train.replay.stored import OF_TRAJECTORY, Stored, pack
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
        behaviour=("trainer", "engine", "unknown")[seed % 3],
        key=seed * 7919 - (1 << 62) if seed % 4 else 0,
        penalty=seed / 7,
        written=None if seed % 5 or length == 1 else np.arange(length) % 2 == 0,
        kept=KeptSets.of([range(seed % 7 + i) for i in range(length)]) if seed % 3 else None,
    )


def some(*parts: Stored | list[Trajectory], start: int = 0) -> Stored:
    """Answers one after the other, without the first ones; those of a `Stored` stay what they are to a store."""
    packed = [part if isinstance(part, Stored) else pack(part) for part in parts]
    columns, contents, number = {}, {}, 0
    for part in packed:
        columns_of_part = {**part.columns, "block": part.columns["block"] + number}
        contents |= {block + number: tokens for block, tokens in part.contents.items()}
        number = max(contents, default=-1) + 1
        for name, column in columns_of_part.items():
            columns[name] = np.concatenate([columns.get(name, column[:0]), column])
    return Stored({name: column[start:] for name, column in columns.items()}, contents)


def same(a: Trajectory, b: Trajectory) -> bool:
    names = ("question", "finished", "reward", "step", "behaviour", "key", "penalty")
    plain = all(getattr(a, name) == getattr(b, name) for name in names)
    arrays = ("response", "log_prob", "written")
    plain = plain and lists(a.kept) == lists(b.kept)
    return plain and all(np.array_equal(getattr(a, name), getattr(b, name)) for name in arrays)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), max_size=6), st.booleans())
@settings(max_examples=40)
def test_what_is_alive_comes_back_in_order(tmp_path_factory, history, reopen):
    folder = tmp_path_factory.mktemp("store")
    store, alive, answers, seed = ExperienceStore(folder), [], pack([]), 0
    for added, removed in history:
        new = [trajectory(seed + i, seed + i) for i in range(added)]
        removed = min(removed, len(alive))
        alive, answers = alive[removed:] + new, some(answers, new, start=removed)
        seed += added
        index = store.save(answers)
        if reopen:
            store = ExperienceStore(folder)
        loaded = store.load(index)
        assert len(loaded) == len(alive)
        assert all(map(same, loaded, alive))
        assert all(t.response.dtype == np.int32 and t.log_prob.dtype == np.float32 for t in loaded)
        answers = loaded


def test_a_save_writes_only_what_is_new(tmp_path):
    store = ExperienceStore(tmp_path)
    old = pack([trajectory(i, i) for i in range(50)])
    store.save(old)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    index = store.save(some(old, [trajectory(50, 51)], start=10))  # most of the segment lives: it stays
    assert {path: path.stat().st_mtime_ns for path in before} == before
    (new,) = set(tmp_path.iterdir()) - set(before)
    assert new.stat().st_size < 1000
    assert len(index["row"]) == 41
    store.save(some(old, start=10))
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("reopen", [False, True])
def test_a_segment_that_mostly_died_is_written_again_and_can_go(tmp_path, reopen):
    store = ExperienceStore(tmp_path)
    old = pack([trajectory(i, i) for i in range(50)])
    first = store.save(old)
    if reopen:
        store = ExperienceStore(tmp_path)
        old = store.load(first)
    living = some(old, start=26)
    index = store.save(living)
    assert not set(segment_names(index)) & set(segment_names(first))
    assert all(map(same, ExperienceStore(tmp_path).load(first), old)), "the checkpoint before it is still whole"
    store.remove_unused(set(segment_names(index)))
    assert all(map(same, ExperienceStore(tmp_path).load(index), living))
    again = store.save(living)
    assert segment_names(again) == segment_names(index)


def test_a_load_takes_the_memory_of_what_lives(tmp_path):
    store = ExperienceStore(tmp_path)
    tokens, count = 1000, 400
    zeros = np.zeros(tokens, np.int32)
    every = pack([Trajectory(i, zeros, zeros.astype(np.float32), True, 1.0, 0) for i in range(count)])
    index = store.save(every)
    index |= {name: index[name][::4] for name in ("segment", "row")}
    del store, every
    tracemalloc.start()
    try:
        kept = ExperienceStore(tmp_path).load(index)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(kept) == count / 4
    # 9 bytes per token, and less than half as much for room; columns and file names take under 200 bytes a trajectory.
    assert held < len(kept) * (1.5 * 9 * tokens + 200) + 50_000


def test_many_answers_are_several_segments_and_are_loaded_into_files(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST_TOKENS", 20)
    answers = pack([trajectory(i, i) for i in range(50)])
    index = ExperienceStore(tmp_path / "store").save(answers)
    total = int(answers.columns["length"].sum())
    assert len(segment_names(index)) == len(list((tmp_path / "store").iterdir())) == total // 20 + 1
    loaded = ExperienceStore(tmp_path / "store", tmp_path).load(index)
    blocks = loaded.contents.values()
    assert all(isinstance(array.base, np.memmap) for tokens in blocks for array in (*tokens[:3], tokens.kept.ids))
    assert all(map(same, loaded, answers))
    for name in OF_TRAJECTORY:
        assert loaded.columns[name].tolist() == answers.columns[name].tolist()
