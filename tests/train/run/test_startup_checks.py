"""What is wrong with a run and needs no model to be seen: told before torch is imported."""

import json
import os
import socket
import sys
from contextlib import ExitStack

import pytest

from exgrpo.tools.evaluate import __main__ as evaluate
from exgrpo.train import main as program
from exgrpo.train.common import process
from exgrpo.train.config import hub
from exgrpo.train.config.recipe import DEFAULT_RUN
from exgrpo.train.run import startup_checks
from exgrpo.train.run.startup_checks import check_startup
from tests.programs import python
from tests.train.configs import configured

HEAVY = ("torch", "transformers", "deepspeed", "vllm", "datasets", "huggingface_hub", "math_verify", "pyarrow")
BUILTIN = "--data.train=builtin:arithmetic"


@pytest.fixture
def start(monkeypatch, tmp_path, capsys):
    """The training program in this process, of which only the early part may run; gives its status and what it says."""
    monkeypatch.setattr(process, "stop_on_signals", lambda: None)  # the signals of this process are pytest's
    monkeypatch.setitem(sys.modules, "exgrpo.train.run.loop", None)

    def run(*arguments):
        status = program.main([f"--output.folder={tmp_path}", *arguments])
        return status, capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy.path=/no/such/model", BUILTIN], "policy.path: /no/such/model holds no config.json"),
        (["--policy.path=~nouser/model", BUILTIN], "policy.path: ~nouser/model holds no config.json"),
        (["--experience.prioritise=~nouser/a.py:f"], "there is no file"),
        (["--policy.path=builtin:nothing", BUILTIN], "no builtin model 'builtin:nothing'; there is arithmetic"),
        ([f"--recipe={DEFAULT_RUN}", "--data.train=missing.jsonl"], "missing.jsonl: there is no such file"),
        ([f"--recipe={DEFAULT_RUN}", "--data.prompt_format=none"], "does not contain {question}"),
        (["--experience.start=missing.parquet"], "missing.parquet: there is no such file or folder of traces"),
        (["--reward.function=maths"], "unknown reward 'maths'; did you mean 'math'?"),
        (["--recipe=missing.yaml"], "missing.yaml: no such recipe"),
        (["--output.folder=/dev/null"], "output.folder: /dev/null cannot be written"),
        (["--output.folder=/dev/null/deeper"], "because of /dev/null"),
        (["--resume=/no/such/run"], "resume: there is no folder /no/such/run"),
    ],
)
def test_a_mistake_is_one_line_before_anything_heavy_is_imported(start, tmp_path, arguments, message):
    status, said = start(*arguments)
    assert status == 2
    assert said.startswith("error: ")
    assert message in said
    assert said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_run_that_exists_is_not_begun_again(start, tmp_path):
    (tmp_path / "mine").mkdir()
    status, said = start("--output.name=mine")
    assert status == 2
    assert f"{tmp_path / 'mine'} exists already: choose another output.name, go on with it by --resume" in said


def test_the_first_look_imports_nothing_that_takes_seconds():
    names = json.dumps(HEAVY)
    script = f"""if True:
        import sys, json
        from contextlib import ExitStack
        from exgrpo.train import main as program
        from exgrpo.tools import doctor, launch
        from exgrpo.tools.evaluate import __main__ as evaluate
        from exgrpo.tools.evaluate.options import parse_options
        if __name__ == "__main__":
            with ExitStack() as resources:
                config, _ = program.configure([])
                program.check_startup(config, resources)
            names = ["builtin:arithmetic", "--data.test=builtin:arithmetic", "--data.test_limit=2"]
            evaluate.check_startup(parse_options(names))
            heavy = [name for name in json.loads('{names}') if name in sys.modules]
            sys.exit(f"imported: {{heavy}}" if heavy else 0)
    """
    python("-c", script)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/no/such/model", "--data.test=builtin:arithmetic"], "/no/such/model holds no config.json"),
        (["builtin:arithmetic", "--data.test=missing.jsonl"], "missing.jsonl: there is no such file"),
        (["builtin:arithmetic", "--data.test=a.jsonl", "--data.prompt_format=none"], "does not contain {question}"),
    ],
)
def test_an_evaluation_looks_first_too(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(process, "stop_on_signals", lambda: None)
    monkeypatch.setitem(sys.modules, "exgrpo.tools.evaluate.evaluation", None)
    assert evaluate.main(arguments) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_another_rank_leaves_the_folder_to_the_first(monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "1")
    (tmp_path / "mine").mkdir()
    with ExitStack() as resources:
        check_startup(configured({"output": {"folder": str(tmp_path), "name": "mine"}}), resources)


@pytest.fixture
def no_offline(monkeypatch):
    """An environment that says nothing about the hub, and that is as before afterwards."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")


@pytest.mark.parametrize("listens", [False, True], ids=["refuses", "hangs"])
def test_a_hub_that_does_not_answer_is_found_out_and_settled_for_all_libraries(
    monkeypatch, no_offline, capsys, listens
):
    monkeypatch.setattr(hub, "SECONDS", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if listens:
            silent.listen()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        startup_checks.check_places("owner/model", [])
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert "does not answer: models and data sets of the hub are taken from the cache" in capsys.readouterr().out


def test_a_hub_that_answers_anything_is_there(monkeypatch, no_offline):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        child = os.fork()
        if not child:
            connection, _ = server.accept()
            connection.recv(4096)
            connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            os._exit(0)
        assert hub.offline_reason() is None
        os.waitpid(child, 0)
    assert os.environ["HF_HUB_OFFLINE"] == "0"


def test_held_out_questions_do_not_depend_on_the_seed_of_a_run():
    with ExitStack() as resources:
        data = {"train_limit": 20, "test_limit": 20}
        first, second = (check_startup(configured({"seed": seed, "data": data}), resources) for seed in (0, 1))
    assert first.held_out == second.held_out
    assert first.train != second.train
