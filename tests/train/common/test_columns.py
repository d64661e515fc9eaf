"""A column that is declared once goes through batch, buffer, checkpoint, resume, export and import."""

import numpy as np
import pytest

from exgrpo.tools.experience.convert import import_answers
from exgrpo.tools.experience.export import export
from exgrpo.train.common.columns import COLUMNS, Column
from exgrpo.train.common.durable import read_checked, write_checked
from exgrpo.train.replay import ExperienceConfig, MethodOptions, Replay, ReplayState
from exgrpo.train.replay.table import unpacked
from exgrpo.train.run.traces import read_traces
from tests.tools.experience.runs import make_run, some
from tests.tools.experience.test_start import begin, trace, write
from tests.train.batches import Row, make_batch


@pytest.fixture(autouse=True)
def declared(monkeypatch):
    """One column of rows and one of tokens, each by an entry of the table."""
    monkeypatch.setitem(COLUMNS, "hardness", Column("row", "how hard it was", True, "hardness"))
    monkeypatch.setitem(COLUMNS, "surprise", Column("token", "by token", True, "surprise", dtype=np.float32))


def replay_of(questions: int) -> Replay:
    config = ExperienceConfig(start_pass_rate=0.0, trajectory="random", ratio=1.0, admit="all", expire=())
    return Replay(MethodOptions(config, 4), questions, seed=1)


def step_of(question: int, step: int):
    """A group of which every second answer is right; each value of the new columns is another one."""
    rows = [Row(float(i % 2), (10 * step + i, 7), step=step) for i in range(4)]
    batch = make_batch([(question, rows)])
    batch.fill(hardness=step + np.arange(4) / 8, surprise=(step + np.arange(8) / 16).astype(np.float32))
    return batch


def check(batch) -> None:
    """That the values of rows and tokens are those of `step_of`."""
    number = batch.token[batch.start[:-1]] - 10 * batch.step
    np.testing.assert_array_equal(batch.hardness, batch.step + number / 8)
    expected = np.stack([batch.step + number / 8, batch.step + number / 8 + 1 / 16], axis=1)
    np.testing.assert_array_equal(batch.surprise, expected.ravel())


def test_it_goes_through_batch_buffer_checkpoint_and_resume(tmp_path):
    replay = replay_of(3)
    for step in (1, 2, 3):
        check(step_of(0, step).append_groups(step_of(1, step)).take(np.array([6, 1])))
        replay.store(step_of(step - 1, step), step)
    np.testing.assert_array_equal(replay.memory.stored(4).hardness, [s + i / 8 for s in (1, 2, 3) for i in range(4)])
    state, again = replay.state(), replay_of(3)
    name = write_checked(tmp_path, state.arrays)
    again.restore(ReplayState(state.values, read_checked(tmp_path, name)))
    for one in (replay, again):
        table = one.memory.table
        rows = table.rows()[::-1]
        assert len(rows) == 12
        check(table.answers(rows, np.arange(12), table.values("question", rows)))
        selected = one.select(one.plan(3, 4), None)
        assert len(selected) == 3
        check(step_of(0, 4).append_groups(selected))


def test_a_checkpoint_that_lacks_it_gives_its_default(tmp_path, monkeypatch):
    with monkeypatch.context() as before:
        before.delitem(COLUMNS, "hardness")
        before.delitem(COLUMNS, "surprise")
        replay = replay_of(1)
        replay.store(make_batch([(0, [Row(1.0), Row()])]), 1)
        name = write_checked(tmp_path, replay.memory.arrays())
    table = replay_of(1).memory.table
    table.fill(unpacked(read_checked(tmp_path, name)))
    batch = table.answers(table.rows(), np.array([0, 1]), np.array([0, 0]))
    assert np.isnan(batch.hardness).all()
    assert np.isnan(batch.surprise).all()
    assert len(batch.surprise) == 4


def test_it_is_exported_imported_and_begun_with(tmp_path):
    tokens = [len(one.response) for one in some()]
    surprise = np.arange(sum(tokens), dtype=np.float32) / 8
    further = {"hardness": np.arange(len(tokens)) / 4, "surprise": surprise}
    export(make_run(tmp_path / "run", some(), further=further), tmp_path / "set")
    assert "| hardness | how hard it was |" in (tmp_path / "set" / "README.md").read_text()
    import_answers(str(tmp_path / "set" / "data" / "*.parquet"), tmp_path / "again")
    for folder in ("set", "again"):
        traces = list(read_traces(tmp_path / folder))
        assert [one.more["hardness"] for one in traces] == further["hardness"].tolist()
        np.testing.assert_array_equal(np.concatenate([one.more["surprise"] for one in traces]), surprise)
    source = write(tmp_path / "mine.jsonl", trace(0, "1 7 3", hardness=0.5), trace(1, "1 7 4 3", reward=1.0))
    trainer, _ = begin(source)
    np.testing.assert_array_equal(trainer.replay.memory.table.column("hardness"), [0.5, np.nan])
