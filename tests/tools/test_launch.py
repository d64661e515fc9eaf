"""Runs that are started again by themselves when a process is lost."""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.progress import Progress

from exgrpo.tools import first
from exgrpo.tools import launch as module
from exgrpo.tools.launch import LaunchOptions, main, prepared
from exgrpo.train import main as program
from exgrpo.train.checkpoint.listing import folders
from exgrpo.train.checkpoint.resume import is_unsaved
from exgrpo.train.common import process
from exgrpo.train.common.errors import ConfigError
from exgrpo.train.config.recipe import load_recipe, merged, parse_args, read_recipes, recipe_path, to_yaml, validate
from studies.bench import PROTOCOL
from studies.results import ResultFile
from studies.run import RESULTS
from studies.statistics import height
from studies.study import load_study
from tests.programs import printed, wait_for
from tests.train.configs import configured
from tests.train.launch import MAIN, completed, environment
from tests.train.run.test_run import SMALL, untimed
from tests.train.warm import ROOT

OPTIONS = (*SMALL[1:], "--steps=3", "--checkpoint.every=1", "--preflight=off")


class Launcher:
    """The program, whose ranks are known by the folder that their command lines name."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.run = folder / "small"
        self._mark = f"--output.folder={folder}"
        command = [sys.executable, "-m", "exgrpo.tools.launch", *arguments, *OPTIONS, self._mark]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(command, env=environment(), text=True, **pipes)

    def ranks(self) -> dict[int, int]:
        """The process of each rank."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if str(MAIN) in words and self._mark in words:
                    variables = dict(one.split("=", 1) for one in (path / "environ").read_text().split("\0") if one)
                    found[int(variables["RANK"])] = int(path.name)
        return found

    def wait(self, come) -> None:
        """Until something is true of it."""
        wait_for(come, of=[self.process])

    def saved(self, step: int) -> bool:
        """Whether the checkpoint of a step is complete."""
        return self.run.is_dir() and any(int(folder.name[-8:]) >= step for folder in folders(self.run))


@pytest.mark.long
def test_a_run_that_loses_a_process_goes_on_by_itself_and_gives_the_same_metrics(tmp_path):
    launcher = Launcher(tmp_path, "--processes=2", "--restarts=1")
    launcher.wait(lambda: launcher.saved(1) and len(launcher.ranks()) == 2)
    os.kill(launcher.ranks()[0], signal.SIGKILL)
    printed, said = launcher.process.communicate(timeout=240)
    assert launcher.process.returncode == 0, said
    assert re.search(r"going on with .* after step [12]", printed)
    completed(MAIN, *OPTIONS, f"--output.folder={tmp_path / 'whole'}", ranks=2)
    assert untimed(launcher.run) == untimed(tmp_path / "whole" / "small")


@pytest.mark.long
def test_a_run_that_was_not_saved_begins_anew_and_without_a_restart_left_the_end_is_one_line(tmp_path):
    launcher = Launcher(tmp_path, "--restarts=1")
    launcher.wait(lambda: (launcher.run / "config.yaml").exists())
    os.kill(launcher.ranks()[0], signal.SIGKILL)
    launcher.wait(lambda: launcher.saved(1) and launcher.ranks())
    os.kill(launcher.ranks()[0], signal.SIGKILL)
    _, said = launcher.process.communicate(timeout=120)
    assert launcher.process.returncode == 2
    assert "small had no complete checkpoint: it is small.unsaved1 now, and a new run begins" in said
    error = "error: the process of rank 0 has ended by SIGKILL, and 1 restarts are used up: go on with --resume auto"
    assert said.splitlines()[-1] == error
    assert "Traceback" not in said


@pytest.mark.long
def test_the_last_line_of_a_stopped_run_has_the_command_that_goes_on(tmp_path):
    launcher = Launcher(tmp_path / "with a space", "--processes=2", "--restarts=1")
    launcher.wait(lambda: launcher.saved(1))
    launcher.process.send_signal(signal.SIGINT)
    _, said = launcher.process.communicate(timeout=240)
    (way_on,) = re.findall(r"^stopped after step [12] of 3\. To go on after step [12]: (.*)$", said, re.MULTILINE)
    assert "--processes=2 --restarts=1 --resume " in way_on
    here = environment() | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    assert "going on with" in printed("bash", "-c", way_on, env=here, timeout=240)
    assert (launcher.run / "finished").exists()


HOST = {"GROUP_WORLD_SIZE": "2", "GROUP_RANK": "0", "MASTER_ADDR": "node1"}


@pytest.mark.parametrize(
    ("variables", "command"),
    [
        ({}, "exgrpo train"),
        (
            {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", process.LAUNCHED: "--processes=2 --restarts=1"},
            "exgrpo train --processes=2 --restarts=1",
        ),
        ({"WORLD_SIZE": "4", "LOCAL_SIZE": "2"}, "deepspeed --hostfile HOSTFILE main.py"),
        (
            {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "a", **HOST},
            "torchrun --nnodes=2 --node_rank=0 --master_addr=node1 --nproc_per_node=2 main.py",
        ),
    ],
)
def test_the_command_that_goes_on_starts_as_many_processes(monkeypatch, variables, command):
    for name in ("WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", process.LAUNCHED):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["main.py"])
    monkeypatch.setattr(process.shutil, "which", lambda _: "/bin/exgrpo")
    assert process.command_to_go_on(Path("runs/it's")) == f"{command} --resume 'runs/it'\"'\"'s'"


def test_no_process_is_left_when_the_launcher_is_killed(tmp_path):
    launcher = Launcher(tmp_path, "--processes=2")
    launcher.wait(lambda: len(launcher.ranks()) == 2)
    launcher.process.kill()
    launcher.process.communicate(timeout=240)  # when nobody holds the pipes any more
    assert launcher.ranks() == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--processes=0"], "processes"),
        (["--processes=2", "--hosts=2"], "unknown option --hosts"),
        (["--restarts=1", "--steps=-1"], "steps"),
        (["--restarts=3", "--data.train=missing.jsonl"], "missing: --policy.path"),
        (
            ["--processes=2", "--policy.path=builtin:arithmetic", "--data.train=missing.jsonl"],
            "missing.jsonl: there is no such file",
        ),
        (["--first", "--processes=2"], "first: it starts two runs of one process each"),
        (["--first", "--output.name=mine"], "first: it names its runs"),
        (["--machine=h100"], "give --dry-run with it"),
        (["--dry-run", "--machine=h10"], "known GPUs are"),
        (["--dry-run", "--machine=h100x8", "--processes=4"], "processes (4): h100x8 has 8"),
        (["--dry-run", "--policy.overrides", "rope_thetta=40000"], "has no 'rope_thetta'"),
    ],
)
def test_a_mistake_is_one_line_before_a_process_is_started(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", lambda *_: pytest.fail("started"))
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("started"))
    monkeypatch.setattr(first, "start", lambda *_: pytest.fail("started"))
    monkeypatch.setattr(process, "stop_on_signals", lambda: None)
    assert main([*arguments, f"--output.folder={tmp_path}"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said
    assert said.count("\n") == 1


def test_what_may_start_again_has_a_name_and_goes_on_by_itself(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "check_startup", lambda *_, **__: None)
    folder = f"--output.folder={tmp_path}"
    assert prepared(LaunchOptions(), [folder]) == [folder]
    named = [folder, "--output.name=a"]
    assert prepared(LaunchOptions(restarts=1), named) == [*named, "--resume=auto"]
    of_host = prepared(LaunchOptions(restarts=1), [folder])
    assert re.fullmatch(r"--output\.name=\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", of_host[1])
    assert of_host[2] == "--resume=auto"
    with pytest.raises(ConfigError, match="there is no folder /no/such/run"):
        prepared(LaunchOptions(), [folder, "--resume=/no/such/run"])
    monkeypatch.setattr(module, "configure", lambda rest: (parse_args(rest), tmp_path / "unfinished"))
    goes_on = [folder, "--resume=auto"]
    assert prepared(LaunchOptions(restarts=1), goes_on) == [*goes_on, "--output.name=unfinished"]


@pytest.mark.parametrize(
    ("holds", "unsaved"),
    [
        ([], True),
        (["config.yaml", "metrics.jsonl"], True),
        (["config.yaml", "checkpoints/step_00000001.unfinished/policy"], True),
        (["config.yaml", "checkpoints/step_00000001/manifest.json"], False),
        (["config.yaml", "checkpoints/step_00000001.damaged/manifest.json"], False),
        (["config.yaml", "finished"], False),
        (["thesis.tex"], False),
    ],
)
def test_only_a_run_that_has_never_been_saved_is_begun_anew(tmp_path, holds, unsaved):
    for name in holds:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert is_unsaved(tmp_path) == unsaved


def test_a_run_that_is_finished_has_nothing_left_to_do(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(program, "check_startup", lambda *_, **__: pytest.fail("begun"))
    monkeypatch.setattr(process, "stop_on_signals", lambda: None)
    (tmp_path / "mine").mkdir()
    options = [f"--output.folder={tmp_path}", "--output.name=mine", "--resume=auto", "--steps=7"]
    (tmp_path / "mine" / "config.yaml").write_text(to_yaml(parse_args(options[:2])).replace("steps: 60", "steps: 7"))
    (tmp_path / "mine" / "finished").touch()
    assert program.main(options) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'mine'} is finished: nothing is left to do\n"
    for other, message in (("--steps=9", "for more, --resume"), ("--seed=5", "seed was 0 and is now 5")):
        assert program.main([*options, other]) == 2
        assert message in capsys.readouterr().err


def test_the_first_result_compares_two_methods_as_the_study_has_chosen_them():
    methods = ("on_policy", "freshper")
    study, results = load_study(PROTOCOL).only(("colouring",), methods), ResultFile(RESULTS)
    both = {"evaluation": {"every": 15, "samples": 8}, "data.test_limit": 128, "steps": 60, "reward.workers": 1}
    for name, method in zip(first.ARMS, methods, strict=True):
        chosen = study.chosen("colouring", method, lambda key: height(results.by_key.get(key)))
        recipes = [recipe_path(Path("builtin:colouring")), ROOT / "recipes" / "replay" / f"{method}.yaml"]
        expected = merged(read_recipes(recipes), both, chosen)
        assert load_recipe(first.RECIPES / f"{name}.yaml") == validate(expected, "expected")


def test_a_first_run_that_fails_between_two_looks_is_no_result(tmp_path, monkeypatch):
    class Failing:
        """Its end is seen by the third look, as where it comes just before that."""

        returncode = None
        looks = 0
        terminate = wait = staticmethod(lambda: None)

        def poll(self):
            self.looks += 1
            self.returncode = 1 if self.looks > 2 else None
            return self.returncode

    monkeypatch.setattr(first, "start", lambda *_: Failing())
    monkeypatch.setattr(first, "LOOK_EVERY", 0)
    (tmp_path / "one.log").write_text("it failed")
    arm = SimpleNamespace(folder=tmp_path / "one", log=tmp_path / "one.log", config=configured(), arguments=[], steps=0)
    with pytest.raises(first.RunFailedError, match="^it failed "):
        first.do([arm], Progress(disable=True))


@pytest.mark.long
def test_the_first_result_goes_on_where_it_was_stopped_and_is_not_done_twice(tmp_path):
    options = (*SMALL[1:-1], "--steps=6", "--checkpoint.every=1", "--preflight=off", "--evaluation.every=2")
    command = [sys.executable, "-m", "exgrpo.tools.launch", "--first", *options]
    here = {"cwd": tmp_path, "env": environment(), "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    runs = [tmp_path / "runs" / "first" / name for name in first.ARMS]
    stopped = subprocess.Popen(command, **here)
    wait_for(lambda: any(run.is_dir() and folders(run) for run in runs), of=[stopped])
    stopped.send_signal(signal.SIGINT)
    assert stopped.communicate(timeout=120)[1] == "stopped: the same command resumes it\n"
    assert stopped.returncode == process.INTERRUPTED
    done = subprocess.run(command, **here, timeout=400)
    assert done.returncode == 0, done.stderr
    printed = [run.with_suffix(".log").read_text() for run in runs]
    assert any("going on with" in text for text in printed)
    for run in runs:
        assert [record["step"] for record in untimed(run) if record["kind"] == "training"] == [1, 2, 3, 4, 5, 6]
        tokens = f"{untimed(run)[-2]['generated_tokens']:,}"
        assert re.search(f"│ {run.name.replace('_', ' ')} .* {tokens} │", done.stdout)
    said = re.search(
        r"^After .* held-out Pass@1 is .* for “without_replay” and .* for “with_replay”", done.stdout, re.M
    )
    assert said[0] in (tmp_path / "runs" / "first.html").read_text()
    again = subprocess.run(command, **here, timeout=120)
    assert again.stdout.partition("┏")[2] == done.stdout.partition("┏")[2]
    assert [run.with_suffix(".log").read_text() for run in runs] == printed
