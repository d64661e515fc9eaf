"""A disk that is full: one line that names the file and the way on, and what was written stays."""

from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models

from exgrpo.tools.evaluate import __main__ as program
from exgrpo.tools.evaluate import evaluation
from exgrpo.train.common import distributed, process
from exgrpo.train.common.distributed import ALONE
from exgrpo.train.common.errors import OutputError, os_errors_as
from exgrpo.train.metrics.log_files import METRICS, SAMPLES, Sample
from exgrpo.train.metrics.run_log import RunLog, TensorBoard
from exgrpo.train.run.model_folder import write_model

FULL = "/dev/full"
WAY_ON = r"cannot be written: No space left on device\. Make room there and start again with --resume auto"


def refuse(_):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("name", [METRICS, SAMPLES])
def test_a_log_that_cannot_be_written_is_named(tmp_path, name):
    (tmp_path / name).symlink_to(FULL)
    log = RunLog(tmp_path)
    sample = Sample(1, 0, "question" * 10_000, "gold", False, ())
    with pytest.raises(OutputError, match=rf"/{name} {WAY_ON}"):
        log.metrics("training", {"step": 1}) if name == METRICS else log.sample(sample)
    log.close()


def test_a_log_that_cannot_be_brought_to_disk_is_named(tmp_path, monkeypatch):
    log = RunLog(tmp_path)

    monkeypatch.setattr("os.fsync", refuse)
    with pytest.raises(OutputError, match=rf"/{METRICS} {WAY_ON}"):
        log.position()
    log.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_tensorboard_on_a_full_disk_is_one_warning(tmp_path, caplog):
    board = TensorBoard(tmp_path, None)
    (events,) = (tmp_path / "tensorboard").iterdir()
    events.unlink()
    events.symlink_to(FULL)
    log = RunLog(tmp_path, [board])
    for step in range(1, 400):
        log.metrics("training", {"step": step, "reward": 0.5})
    log.close()
    (warning,) = caplog.messages
    assert warning.startswith("tensorboard failed ([Errno 28] No space left on device)")
    assert len((tmp_path / METRICS).read_text().splitlines()) == 399


def test_libraries_that_name_the_error_of_the_system_in_a_text_are_understood():
    with pytest.raises(OutputError, match="^x: No space left on device$"), os_errors_as(OutputError, "x"):
        Tokenizer(models.BPE()).save(FULL)
    with pytest.raises(OutputError, match="^x: "), os_errors_as(OutputError, "x"):
        save_file({"a": np.zeros(4)}, "/dev/null/a/b")


def test_a_model_that_cannot_be_saved_is_named(tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(OutputError, match=rf"/model {WAY_ON}"):
        write_model(tmp_path / "model", SimpleNamespace(save=refuse, world=ALONE), None, None)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]  # the one before stays


def test_scores_that_cannot_be_written_are_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / program.SCORES).symlink_to(FULL)
    monkeypatch.setattr(process, "stop_on_signals", lambda: None)  # the signals of this process are pytest's
    monkeypatch.setattr(distributed, "start", lambda **_: ALONE)
    monkeypatch.setattr(evaluation, "run", lambda options, world, resources: {})
    monkeypatch.setattr(program, "average", lambda scores: 0.5)
    questions = ("--data.test=builtin:arithmetic", "--data.test_limit=1")
    assert program.main(["builtin:arithmetic", *questions, f"--output.folder={tmp_path}"]) == 2
    message = f"error: {tmp_path / program.SCORES} cannot be written: No space left on device\n"
    assert capsys.readouterr().err == message
