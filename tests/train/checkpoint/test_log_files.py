"""Logs that lost their end or hold rubbish: that is named, and what is sound is read."""

import json

import pytest

from exgrpo.train.metrics.log_files import METRICS, SAMPLES, Sample, read_records, read_samples
from exgrpo.train.metrics.run_log import RunLog

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


@pytest.mark.parametrize("name", [METRICS, SAMPLES])
def test_a_log_that_has_lost_its_end_is_named_and_goes_on_behind_it(tmp_path, caplog, name):
    log = RunLog(tmp_path)
    for step in (1, 2):
        log.metrics("training", {"step": step, "reward": 0.5})
        log.sample(Sample(step, 0, "question", "gold", False, ()))
    position = log.position()
    log.close()
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[:-5])
    log = RunLog(tmp_path, resume=position)
    log.metrics("training", {"step": 3, "reward": 0.5})
    log.sample(Sample(3, 0, "question", "gold", False, ()))
    log.close()
    (warning,) = caplog.messages
    assert warning == f"{tmp_path / name} is damaged: it has {len(content) - 5} bytes and had {len(content)}"
    cut = [record.step for record in read_records(tmp_path / METRICS)[0]]
    read = [sample.step for sample in read_samples(tmp_path / SAMPLES)]
    assert (cut, read) == (([1, 3], [1, 2, 3]) if name == METRICS else ([1, 2, 3], [1, 3]))
