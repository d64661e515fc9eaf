"""What a person can mend is one line of a program; what is broken in the code is a traceback."""

import inspect
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from exgrpo.tools import report, serve
from exgrpo.tools.evaluate import __main__ as evaluate
from exgrpo.tools.evaluate import evaluation
from exgrpo.train import main as program
from exgrpo.train.common import distributed, errors, process
from exgrpo.train.common.distributed import ALONE
from exgrpo.train.common.errors import ConfigError, DataError, ExgrpoError
from exgrpo.train.config.recipe import read_recipe
from exgrpo.train.data.files import read_rows
from exgrpo.train.metrics.report import page
from exgrpo.train.policy.source import find_model
from exgrpo.train.reward.names import resolve_reward
from exgrpo.train.run import build
from exgrpo.train.run import loop as run
from tests.train.configs import configured

FAMILY = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, ExgrpoError)]
DEFECTS = (TypeError("broken"), ValueError("broken"), OSError(2, "broken"), KeyError("broken"), RuntimeError("broken"))


def fail_with(error):
    def fail(*_, **__):
        raise error

    return fail


@pytest.fixture
def programs(monkeypatch):
    """Each program in this process: how it is started, and a function inside its set-up that can be broken."""
    monkeypatch.setattr(run, "start", lambda *_: ALONE)
    monkeypatch.setattr(process, "stop_on_signals", lambda: None)  # the signals of this process are pytest's
    monkeypatch.setattr(distributed, "start", lambda **_: ALONE)
    monkeypatch.setattr(serve, "_built_for_cpu", lambda: True)
    asked = ["builtin:arithmetic", "--data.test=builtin:arithmetic", "--data.test_limit=1"]
    return {
        "run": (lambda: program.main([]), build, "load_pretrained"),
        "evaluate": (lambda: evaluate.main(asked), evaluation, "load_pretrained"),
        "report": (lambda: report.main(["somewhere"]), page, "load_run"),
        "serve": (lambda: serve.main(["builtin:arithmetic"]), serve, "find_model"),
    }


FASTEST = "report"
OTHERS = ("run", "evaluate", "serve")


@pytest.mark.parametrize(("name", "error"), [*((FASTEST, one) for one in DEFECTS), *((n, DEFECTS[0]) for n in OTHERS)])
def test_a_defect_in_the_set_up_is_a_traceback(programs, monkeypatch, name, error):
    start, module, function = programs[name]
    monkeypatch.setattr(module, function, fail_with(error))
    with pytest.raises(type(error)) as caught:
        start()
    assert caught.value is error


@pytest.mark.parametrize(("name", "kind"), [*((FASTEST, kind) for kind in FAMILY), *((n, ConfigError) for n in OTHERS)])
def test_each_error_of_the_family_is_one_line(programs, monkeypatch, capsys, name, kind):
    start, module, function = programs[name]
    monkeypatch.setattr(module, function, fail_with(kind("x: do this")))
    if name == "serve":
        with pytest.raises(SystemExit) as exit_:
            start()
        assert exit_.value.code == "error: x: do this"
    else:
        assert start() == kind.status
        assert capsys.readouterr().err == "error: x: do this\n"


def test_another_rank_says_which_it_is_after_the_launcher_would_have_ended_it(monkeypatch, capsys):
    waited = []
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(errors.time, "sleep", waited.append)
    assert errors.print_error(ConfigError("x: do this")) == 2
    assert capsys.readouterr().err == "error on rank 3: x: do this\n"
    assert waited == [errors.OTHER_RANKS_WAIT]


def test_what_was_an_error_of_python_still_is_one():
    for kind in (errors.ConfigError, errors.DataError, errors.ModelError, errors.RewardError, errors.ReportError):
        assert issubclass(kind, ValueError)
    for kind in (errors.CheckpointError, errors.RolloutError, errors.GraderError, errors.WeightMismatchError):
        assert issubclass(kind, RuntimeError)


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    path = tmp_path / "mine.jsonl"
    path.write_text("{}")
    monkeypatch.setattr(Path, "open", fail_with(PermissionError(13, "Permission denied")))
    with pytest.raises(DataError, match=r"/mine.jsonl cannot be read: Permission denied$"):
        read_rows(str(path))
    with pytest.raises(ConfigError, match=r"/mine.jsonl cannot be read: Permission denied$"):
        read_recipe(path)


def test_a_folder_that_may_not_be_looked_into_is_named(monkeypatch):
    monkeypatch.setattr(Path, "is_file", fail_with(PermissionError(13, "Permission denied", "/closed")))
    with pytest.raises(errors.ModelError, match=r"^policy.path: '/closed' cannot be read: Permission denied$"):
        find_model("/closed")
    with pytest.raises(DataError, match=r"^/closed.jsonl cannot be read: Permission denied$"):
        read_rows("/closed.jsonl")
    with pytest.raises(errors.RewardError, match=r"/closed.py cannot be read: Permission denied$"):
        resolve_reward("/closed.py:f")


def test_a_backend_that_does_not_exist_is_named_before_anything_is_loaded():
    config = configured({"policy": {"kernel_backend": "fast"}})
    with ExitStack() as resources, pytest.raises(ConfigError, match=r"policy.kernel_backend: .*expected auto, .*torch"):
        run.Run(config, SimpleNamespace(), ALONE, resources)
