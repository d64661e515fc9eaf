"""The buffer on disk: exact, append-only, checked."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exgrpo.train.checkpoint.store import DamagedFileError, ExperienceStore, segment_names
from exgrpo.train.records import Trajectory


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
        written=None if seed % 5 or length == 1 else np.arange(length) % 2 == 0,
    )


def same(a: Trajectory, b: Trajectory) -> bool:
    names = ("question", "finished", "reward", "step", "behaviour", "key")
    plain = all(getattr(a, name) == getattr(b, name) for name in names)
    arrays = ("response", "log_prob", "written")
    return plain and all(np.array_equal(getattr(a, name), getattr(b, name)) for name in arrays)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), max_size=6), st.booleans())
@settings(max_examples=40)
def test_what_is_alive_comes_back_in_order(tmp_path_factory, history, reopen):
    folder = tmp_path_factory.mktemp("store")
    store, alive, seed = ExperienceStore(folder), [], 0
    for added, removed in history:
        alive = alive[removed:] + [trajectory(seed + i, seed + i) for i in range(added)]
        seed += added
        index = store.save(alive)
        if reopen:
            store = ExperienceStore(folder)
        loaded = store.load(index)
        assert len(loaded) == len(alive)
        assert all(map(same, loaded, alive))
        assert loaded == [] or all(t.response.dtype == np.int32 and t.log_prob.dtype == np.float32 for t in loaded)
        if reopen:
            alive = loaded


def test_a_save_writes_only_what_is_new(tmp_path):
    store = ExperienceStore(tmp_path)
    old = [trajectory(i, i) for i in range(50)]
    store.save(old)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    index = store.save([*old[10:], trajectory(50, 50)])  # most of the segment lives: it stays
    assert {path: path.stat().st_mtime_ns for path in before} == before
    (new,) = set(tmp_path.iterdir()) - set(before)
    assert new.stat().st_size < 1000
    assert len(index["row"]) == 41
    store.save([*old[10:]])
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("reopen", [False, True])
def test_a_segment_that_mostly_died_is_written_again_and_can_go(tmp_path, reopen):
    store = ExperienceStore(tmp_path)
    old = [trajectory(i, i) for i in range(50)]
    first = store.save(old)
    if reopen:
        store = ExperienceStore(tmp_path)
        old = store.load(first)
    index = store.save(old[26:])
    assert not set(segment_names(index)) & set(segment_names(first))
    assert all(map(same, ExperienceStore(tmp_path).load(first), old)), "the checkpoint before it is still whole"
    store.remove_unused(set(segment_names(index)))
    assert all(map(same, ExperienceStore(tmp_path).load(index), old[26:]))
    again = store.save(old[26:])
    assert segment_names(again) == segment_names(index)


def test_loaded_trajectories_hold_their_own_memory_and_nothing_else(tmp_path):
    store = ExperienceStore(tmp_path)
    tokens, count = 1000, 400
    zeros = np.zeros(tokens, np.int32)
    index = store.save([Trajectory(i, zeros, zeros.astype(np.float32), True, 1.0, 0) for i in range(count)])
    del store
    tracemalloc.start()
    try:
        reopened = ExperienceStore(tmp_path)
        kept = reopened.load(index)[::4]
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # 8 bytes per token; objects, index and file names take under a kilobyte a trajectory.
    assert held < len(kept) * (8 * tokens + 1000) + 50_000


def test_unused_segments_are_removed(tmp_path):
    store = ExperienceStore(tmp_path)
    store.save([trajectory(0, 0)])
    kept = [trajectory(1, 1)]
    index = store.save(kept)
    store.remove_unused(set(segment_names(index)))
    assert len(list(tmp_path.iterdir())) == 1
    assert same(store.load(index)[0], kept[0])


@pytest.mark.parametrize("damage", ["flip", "cut", "delete"])
def test_damage_is_found_and_named(tmp_path, damage):
    store = ExperienceStore(tmp_path)
    index = store.save([trajectory(i, i) for i in range(5)])
    (path,) = tmp_path.iterdir()
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[-3] ^= 1
    path.write_bytes(content[:-1] if damage == "cut" else content)
    if damage == "delete":
        path.unlink()
    with pytest.raises(DamagedFileError, match=path.name):
        store.load(index)
