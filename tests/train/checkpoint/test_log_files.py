"""Logs that lost their end or hold rubbish: named, and restored to the byte."""

import json
import os

import pytest

from exgrpo.train.checkpoint.log_files import METRICS, SAMPLES, copy_logs, read_records, restore_logs
from exgrpo.train.errors import ConfigError
from exgrpo.train.metrics.run_log import RunLog
from exgrpo.train.samples import Sample, read_samples

LINES = [json.dumps({"step": step, "reward": 0.5 * step}).encode() for step in range(1, 6)]
RUBBISH = [b"\0" * 40, b"\xff\xfe\xfd", b"[1]", b"7", b"{}", b'{"step": 3, "rew', b"\0" + LINES[0], b"[" * 99_999]


def test_lines_that_are_no_records_are_named(tmp_path):
    path = tmp_path / METRICS
    mixed = [LINES[0], *RUBBISH[:3], LINES[1], b"", *RUBBISH[3:], LINES[2]]
    path.write_bytes(b"\n".join(mixed))
    records, unreadable = read_records(path)
    assert [record.numbers for record in records] == [{"step": n, "reward": 0.5 * n} for n in (1, 2, 3)]
    assert unreadable == [2, 3, 4, 7, 8, 9, 10, 11]


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        ({"step": 0, "kind": "evaluation", "weight_gap": 1e-6, "test/pass_rate": 0.5}, "evaluation"),
        ({"step": 2, "kind": "training", "test/pass_rate": 0.5}, "training"),
        # Of older runs.
        ({"step": 0, "weight_gap": 1e-6, "test/pass_rate": 0.5}, "evaluation"),
        ({"step": 1, "weight_gap": 1e-6, "reward": 0.5}, "training"),
        ({"step": 1, "kind": "another", "reward": 0.5}, "training"),
        ({"step": 2, "test/pass_rate": 0.5, "seconds/checkpoint": 0.5}, "evaluation"),
    ],
)
def test_a_record_says_what_it_is_about(tmp_path, record, kind):
    (tmp_path / METRICS).write_text(json.dumps(record))
    ((read,), _) = read_records(tmp_path / METRICS)
    assert (read.step, read.kind) == (record["step"], kind)
    assert "kind" not in read.numbers


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


def test_a_run_of_an_older_version_goes_on_with_a_new_file_of_samples(tmp_path, caplog):
    log = RunLog(tmp_path)
    log.metrics("training", {"step": 1})
    position = log.position()
    log.close()
    (tmp_path / "samples.md").write_text("## Step 1: question\n")
    older = {"step": 1, "metrics": position["metrics"], "samples": 20}
    for _ in range(2):  # the second time without a checkpoint of the new version
        log = RunLog(tmp_path, resume=older)
        log.sample(Sample(2, 0, "question", "gold", False, ()))
        log.close()
    assert [sample.step for sample in read_samples(tmp_path / SAMPLES)] == [2]
    message = f"{tmp_path / SAMPLES} begins after step 1: an older version has written samples.md before"
    assert caplog.messages == [message] * 2
    assert (tmp_path / "samples.md").read_text() == "## Step 1: question\n"
