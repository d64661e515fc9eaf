"""Logs that lost their end or hold rubbish: named, and restored to the byte."""

import json
import os

import pytest

from exgrpo.train.common.errors import ConfigError
from exgrpo.train.metrics.log_files import METRICS, SAMPLES, copy_logs, read_records, restore_logs
from exgrpo.train.metrics.run_log import RunLog
from exgrpo.train.metrics.samples import Sample

KINDS = ("training", "evaluation", "training")
LINES = [json.dumps({"step": n, "kind": kind, "reward": 0.5 * n}).encode() for n, kind in enumerate(KINDS, start=1)]
RUBBISH = [b"\0" * 40, b"\xff\xfe\xfd", b"[1]", b"7", b"{}", b'{"step": 3, "rew', b"\0" + LINES[0], b"[" * 99_999]
RUBBISH += [b'{"step": 1, "reward": 0.5}', b'{"step": 1, "kind": "another"}']


def test_lines_that_are_no_records_are_named(tmp_path):
    path = tmp_path / METRICS
    mixed = [LINES[0], *RUBBISH[:3], LINES[1], b"", *RUBBISH[3:], LINES[2]]
    path.write_bytes(b"\n".join(mixed))
    records, unreadable = read_records(path)
    assert [record.numbers for record in records] == [{"step": n, "reward": 0.5 * n} for n in (1, 2, 3)]
    assert [(record.step, record.kind) for record in records] == list(enumerate(KINDS, start=1))
    assert unreadable == [2, 3, 4, *range(7, 14)]


DAMAGES = {
    "cut": (lambda content: content[:10], "is damaged in line 1"),
    "cut at a line": (lambda content: content[: len(LINES[0]) + 1], "is damaged in line 2"),
    "empty": (lambda content: b"", "is damaged in line 1"),
    "zeroed": (lambda content: content[:50] + b"\0" * 30 + content[80:], "is damaged in line 2"),
    "flipped": (lambda content: content[:-4] + bytes([content[-4] ^ 1]) + content[-3:], "is damaged in line 3"),
    "not UTF-8": (lambda content: b"\xff" + content[1:], "is damaged in line 1"),
}


@pytest.mark.parametrize("name", [METRICS, SAMPLES])
@pytest.mark.parametrize("damage", [*DAMAGES, "missing"])
def test_a_damaged_log_is_restored_from_the_checkpoint(tmp_path, caplog, name, damage):
    run, checkpoint = tmp_path / "run", tmp_path / "checkpoint"
    run.mkdir()
    checkpoint.mkdir()
    saved = b"\n".join(LINES[:3]) + b"\n"
    (run / name).write_bytes(saved)
    copy_logs(run, checkpoint)
    if damage == "missing":
        (run / name).unlink()
        expected, kept = "is missing", None
    else:
        change, expected = DAMAGES[damage]
        kept = change(saved)
        (run / name).write_bytes(kept)
    restore_logs(run, checkpoint)
    assert (run / name).read_bytes() == saved
    (warning,) = caplog.messages
    assert f"{run / name} {expected}" in warning
    assert str(checkpoint / name) in warning
    if kept is not None:
        assert (run / f"{name}.damaged").read_bytes() == kept


def test_what_was_logged_after_the_checkpoint_stays(tmp_path, caplog):
    """Trackers are not told again what they know: they look for it there."""
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (tmp_path / METRICS).write_bytes(LINES[0] + b"\n")
    copy_logs(tmp_path, checkpoint)
    longer = LINES[0] + b"\n" + LINES[1] + b'\n{"torn'
    (tmp_path / METRICS).write_bytes(longer)
    restore_logs(tmp_path, checkpoint)
    assert (tmp_path / METRICS).read_bytes() == longer
    assert not caplog.messages
    (tmp_path / METRICS).write_bytes(b"\0" * 10 + longer[10:])
    restore_logs(tmp_path, checkpoint)
    assert (tmp_path / METRICS).read_bytes() == longer


@pytest.mark.parametrize("name", [METRICS, SAMPLES])
def test_a_log_is_never_filled_up(tmp_path, name):
    log = RunLog(tmp_path)
    log.metrics("training", {"step": 1, "reward": 0.5})
    log.sample(Sample(1, 0, "question", "gold", False, ()))
    position = log.position()
    log.close()
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[:-5])
    with pytest.raises(
        ConfigError, match=rf"{name} is damaged: it has {len(content) - 5} bytes and had {len(content)}"
    ):
        RunLog(tmp_path, resume=position)
    assert (tmp_path / name).read_bytes() == content[:-5]


def test_a_position_is_on_disk(tmp_path, monkeypatch):
    forced, fsync = set(), os.fsync

    def record(descriptor):
        forced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    log = RunLog(tmp_path)
    log.metrics("training", {"step": 1, "reward": 0.5})
    log.position()
    log.close()
    assert forced >= {(tmp_path / name).stat().st_ino for name in (METRICS, SAMPLES)}
