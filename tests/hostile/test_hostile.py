"""The program of hostile input: it sees what is wrong, and a short run of it."""

import json
import re
import subprocess
import sys

import pytest

from exgrpo.kernels import checks, operators
from exgrpo.train.common import jsonl, plain
from exgrpo.train.common.errors import ConfigError
from exgrpo.train.config import command_line, recipe
from exgrpo.train.data import files
from exgrpo.train.data import rows as data_rows
from exgrpo.train.reward.pool import Grader
from exgrpo.train.rollout.server import reply
from tests.hostile import answers, models, programs, rewards, rows
from tests.hostile.__main__ import SHARES, done
from tests.hostile.judge import Trial, judged
from tests.hostile.planted import DEFECTS
from tests.hostile.worker import Plan, ProblemError, Summary, check, judge
from tests.train.launch import environment
from tests.train.warm import ROOT


def fails(error):
    def call():
        raise error

    return call


@pytest.mark.parametrize(
    ("trial", "problem"),
    [
        (Trial("", lambda: 1, "right"), None),
        (Trial("", fails(ConfigError("steps: no")), "refused", ("steps",)), None),
        (Trial("", fails(ConfigError("\x1b[2J")), "refused"), None),
        (Trial("", fails(TypeError("steps: no")), "refused", errors=(TypeError,)), None),
        (Trial("", lambda: 1, "refused"), "is taken, and it is wrong"),
        (Trial("", lambda: 1, wrong=lambda result: f"{result} instead of 2"), "1 instead of 2"),
        (Trial("", lambda: 1, wrong=lambda result: 1 / 0), "cannot be judged"),
        (Trial("", fails(ConfigError("no")), "right"), "is refused, and it is right"),
        (Trial("", fails(ConfigError("no")), "refused", ("steps",)), "names none of"),
        (Trial("", fails(ConfigError("")), "refused"), "without a word"),
        (Trial("", fails(ConfigError("a\nerror: b")), "refused"), "not one error"),
        (Trial("", fails(ConfigError("a\n" * 20)), "refused"), "of 21 lines"),
        (Trial("", fails(ConfigError("Traceback (most recent call last)")), "refused"), "a traceback"),
        (Trial("", fails(TypeError("\x1b[2J")), "refused", errors=(TypeError,)), "with the characters"),
        (Trial("", fails(TypeError("x" * 9000)), "refused", errors=(TypeError,)), "of 9008 characters"),
        (Trial("", fails(ConfigError("----- no")), "refused"), "the frame"),
        (Trial("", fails(KeyError("steps")), "refused"), "a defect: .*KeyError"),
        (Trial("", fails(SystemExit(2)), "refused"), "a defect: .*SystemExit"),
        (Trial("", fails(MemoryError())), "a defect: .*MemoryError"),
    ],
)
def test_a_case_is_one_clear_error_or_the_right_result(trial, problem):
    problems = judged(trial).problems
    assert bool(problems) == (problem is not None)
    assert problem is None or any(re.search(problem, found, re.DOTALL) for found in problems)


def off(head, backend, found=operators.linear_log_prob):
    log_prob, entropy = found(head, backend)
    return log_prob + 0.01, entropy


BLIND = {
    "values of YAML are not counted": ("recipes", (plain, "_check", lambda value: None)),
    "chains of recipes have no end": ("recipes:_chain", (recipe, "MOST_BASES", 10**9)),
    "a frame is not taken off": ("command_lines", (command_line, "_unframed", lambda message: message)),
    "names are not looked at": ("command_lines", (command_line, "known_keys", lambda model: [])),
    "JSON is read as it is": ("rows", (jsonl.parsed, "__defaults__", (json.loads,))),
    "any answer is one": ("rows", (data_rows, "_gold_text", lambda value, key: str(value))),
    "rows are lost": ("rows", (rows, "read_rows", lambda *args, **given: files.read_rows(*args, **given)[1:])),
    "weights are not checked": ("models", (models, "check_weights", lambda model: None)),
    "log-probs may be positive": ("answers", (reply, "ROUNDING", 10.0)),
    "tokens have no bound": ("answers", (answers, "VOCABULARY", 10**6)),
    "targets are not checked": ("kernels", (checks, "target_range", lambda target, *given: (target, target == -100))),
    "log-probs are off": ("kernels", (operators, "linear_log_prob", off)),
}


@pytest.mark.long
@pytest.mark.parametrize("blindness", BLIND)
def test_a_defect_of_the_project_is_found(tmp_path, monkeypatch, blindness):
    kind, planted = BLIND[blindness]
    monkeypatch.setattr(*planted)
    if blindness == "tokens have no bound":  # the stand-in then sends ids that the model does not have
        wrong = lambda found: "" if found.rollouts[0].response.max() < 100 else "wrong"  # noqa: E731
        monkeypatch.setattr(answers, "sensible", wrong)
    with pytest.raises(ProblemError):
        check(kind, 400, 0, tmp_path / "files", judge, shrink=False)


def test_a_defect_of_grading_is_found(tmp_path, monkeypatch):
    trial = rewards.trial("no reward", rewards.source("return None"), tmp_path, expected="refused")
    assert judged(trial).problems == ()
    monkeypatch.setattr(Grader, "check", lambda *given: None)
    assert judged(trial).problems == ("is taken, and it is wrong",)


@pytest.mark.parametrize(
    ("status", "text", "wrong"),
    [
        (2, "error: no\n", ""),
        (2, "error: no\nerror: no\n", "not one error"),
        (1, "error: no\n", "exit status 1"),
        (2, "Traceback (most recent call last):\nKeyError\n", "not one error.*a traceback"),
        (0, "", "not one error.*exit status 0"),
    ],
)
def test_a_program_that_does_not_say_what_is_wrong_is_found(status, text, wrong):
    found = programs.told(subprocess.CompletedProcess([], status, "", text))
    assert re.search(wrong, found, re.DOTALL)
    assert bool(found) == bool(wrong)


@pytest.mark.parametrize("name", DEFECTS)
def test_hangs_ends_and_growth_are_found(tmp_path, name):
    result = done(Plan(f"planted:{name}", 1, 0, str(tmp_path), 2.0))
    assert isinstance(result, Summary) if name == "sound" else re.search(DEFECTS[name][1], result, re.DOTALL)


@pytest.mark.long
def test_a_short_run_finds_nothing(tmp_path):
    words = (sys.executable, "-m", "tests.hostile", "--seed=7", "--cases=40", f"--folder={tmp_path}")
    run = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert all(re.search(rf"{kind} +│ [1-9]", run.stdout) for kind in SHARES), run.stdout
