"""Running a study: each run once, in the right order, whatever ends when."""

import functools
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

import studies.run
from exgrpo.train.checkpoint.resume import FINISHED
from exgrpo.train.metrics.report.runs import load_run
from studies.origin import Origin
from studies.results import ResultFile
from studies.runner import KEPT, Run, RunFailedError
from studies.study import load_study
from tests.programs import ran, wait_for
from tests.studies.plans import result, with_function, write
from tests.train.warm import ROOT

SEARCH = {"over": {"optimizer.lr": [1e-4, 3e-4]}, "seeds": [100]}


class Scripted:
    """Runs that end at once; their height is their learning rate."""

    def __init__(self):
        self.done, self.tidied, self.going, self.most = [], [], 0, 0
        self.broken, self.interrupting = set(), set()

    def __call__(self, planned, folder, core):
        does = {"result": lambda origin: self.run(planned, core), "tidy": lambda: self.tidied.append(planned.key)}
        return SimpleNamespace(planned=planned, core=core, stop=lambda: None, **does)

    def run(self, planned, core):
        self.going += 1
        self.most = max(self.most, self.going)
        time.sleep(0.02)
        self.going -= 1
        if (planned.arm, planned.seed) in self.interrupting:
            raise KeyboardInterrupt
        if (planned.arm, planned.seed) in self.broken:
            raise RunFailedError("no space left")
        self.done.append((planned.arm, planned.seed, planned.config.optimizer.lr, core))
        return result(planned.key, 0.0, planned.config.optimizer.lr)


@pytest.fixture
def scripted(monkeypatch):
    runs = Scripted()
    monkeypatch.setattr(studies.run, "Run", runs)
    monkeypatch.setattr(studies.run, "cores", lambda wanted: list(range(wanted)))
    return runs


def run(folder, study, *options):
    return studies.run.main(
        [str(study), "--results", str(folder / "results.jsonl"), "--runs", str(folder / "runs"), *options]
    )


def test_the_search_comes_first_and_decides(tmp_path, scripted):
    assert run(tmp_path, write(tmp_path, search=SEARCH)) == 0
    for name in ("with", "without"):
        of_arm = [(seed, lr) for arm, seed, lr, _ in scripted.done if arm == name]
        assert {seed for seed, _ in of_arm[:2]} == {100}
        assert sorted(of_arm[2:]) == [(0, 3e-4), (1, 3e-4)]
    assert scripted.done[0][0] == "without", "arm by arm"
    assert scripted.most == 2
    assert {core for *_, core in scripted.done} == {0, 1}
    assert len(scripted.tidied) == 8


def test_a_plan_runs_nothing_and_nothing_is_run_twice(tmp_path, scripted, capsys):
    assert run(tmp_path, write(tmp_path), "--plan") == 0
    assert scripted.done == []
    assert "0 of 4 runs are done" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()
    assert run(tmp_path, write(tmp_path, seeds=[0])) == 0
    assert run(tmp_path, write(tmp_path, seeds=[0, 1])) == 0
    assert run(tmp_path, write(tmp_path, seeds=[0, 1])) == 0
    assert sorted((arm, seed) for arm, seed, *_ in scripted.done) == [
        (arm, seed) for arm in ("with", "without") for seed in (0, 1)
    ]
    assert "4 of 4 runs are done" in capsys.readouterr().out


def test_some_arms_alone(tmp_path, scripted, capsys):
    assert run(tmp_path, write(tmp_path), "--arms", "with") == 0
    assert [arm for arm, *_ in scripted.done] == ["with", "with"]
    assert run(tmp_path, write(tmp_path), "--arms", "wiht") == 2
    assert "--arms wiht: " in capsys.readouterr().err
    assert run(tmp_path, write(tmp_path), "--tasks", "chess") == 2
    assert "--tasks chess: " in capsys.readouterr().err


@pytest.mark.parametrize("during", [False, True])
def test_a_function_that_changes_under_way_gives_no_result(tmp_path, monkeypatch, during):
    this = Run(load_study(with_function(tmp_path)).planned("countdown", "with", 0, {}), tmp_path / "runs", 0)

    def train(run):
        (tmp_path / "mine.py").write_text("def first(*given):\n    return 2\n")
        this.folder.mkdir(parents=True)
        (this.folder / FINISHED).touch()
        return 0

    monkeypatch.setattr(Run, "_do", train)
    if not during:
        train(this)
    with pytest.raises(RunFailedError, match="has changed since the study was read"):
        this.result(Origin.here())
    assert this.folder.exists() is not during


def test_a_run_that_fails_is_named_and_the_others_go_on(tmp_path, scripted, capsys):
    scripted.broken = {("with", 0)}
    assert run(tmp_path, write(tmp_path)) == 2
    assert "error: with on countdown, seed 0: no space left" in capsys.readouterr().err
    assert len(scripted.done) == 3
    scripted.broken = set()
    assert run(tmp_path, write(tmp_path)) == 0
    assert len(scripted.done) == 4


def test_a_study_that_is_stopped_says_how_it_goes_on(tmp_path, scripted, capsys):
    scripted.interrupting = {("with", 0)}
    assert run(tmp_path, write(tmp_path)) == 130
    assert "the same command resumes it" in capsys.readouterr().err


SMALL = {"steps": 2, "questions": 4, "data.train_limit": 50, "data.test_limit": 8, "evaluation.samples": 2}


@pytest.mark.long
def test_a_killed_study_leaves_no_runs_behind_and_goes_on(tmp_path):
    study = write(tmp_path, settings=SMALL)
    places = ["--results", tmp_path / "results.jsonl", "--runs", tmp_path / "runs"]
    program = [sys.executable, "-m", "studies.run", study, *places]
    killed = subprocess.Popen(program, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: list((tmp_path / "runs").glob("*/metrics.jsonl")))  # a run is under way
    killed.kill()
    killed.wait()
    running = functools.partial(psutil.process_iter, ["cmdline"])
    wait_for(lambda: not any(str(tmp_path) in " ".join(one.info["cmdline"] or ()) for one in running()))
    again = ran(*program, cwd=ROOT, timeout=300)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "4/4" in again.stdout + again.stderr
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    found = ResultFile(tmp_path / "results.jsonl").by_key
    assert len(lines) == len(found) == 4
    for one in found.values():
        assert one.settings["steps"] == 2
        assert list(one.curves["step"]) == [0, 2]
        folder = tmp_path / "runs" / one.key
        assert {path.name for path in folder.iterdir()} <= {*KEPT, FINISHED, "in_use_by"}
        held_out = load_run(folder, "run").columns["test/pass_rate"]
        assert list(one.curves["pass_at_1"]) == pytest.approx(list(held_out[np.isfinite(held_out)]), rel=1e-4)
