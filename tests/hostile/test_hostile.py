"""The program of hostile input: what it plans, that it sees what is wrong, and a short run of it."""

import json
import random
import re
import subprocess
import sys

import pytest

from exgrpo.kernels import checks, operators
from exgrpo.train import command_line, plain, recipe
from exgrpo.train.data import files
from exgrpo.train.data import rows as data_rows
from exgrpo.train.errors import ConfigError
from exgrpo.train.reward.pool import Grader
from exgrpo.train.rollout.server import reply
from tests.hostile import answers, command_lines, models, programs, recipes, rewards, rows
from tests.hostile import kernels as kernel_calls
from tests.hostile.campaign import done
from tests.hostile.judge import Trial, judged
from tests.hostile.plan import SHARES, kept, kind_of, planned
from tests.hostile.planted import DEFECTS
from tests.hostile.worker import Plan
from tests.train.launch import environment
from tests.train.warm import ROOT

IN_PROCESS = {
    "recipes": recipes,
    "command_lines": command_lines,
    "rows": rows,
    "models": models,
    "answers": answers,
    "kernels": kernel_calls,
}


def test_the_plan_follows_from_the_seed_and_has_all_kinds():
    plan = [kind_of(3, number, SHARES) for number in range(3000)]
    assert plan == [kind_of(3, number, SHARES) for number in range(3000)]
    assert plan != [kind_of(4, number, SHARES) for number in range(3000)]
    assert set(plan) == set(SHARES)


@pytest.mark.parametrize("kind", ["recipes", "rows"])
def test_a_case_follows_from_its_number(tmp_path, kind):
    written = []
    for attempt in ("a", "b"):
        contents = []
        for number in range(len(kept()), len(kept()) + 20):
            folder = tmp_path / attempt / str(number)
            folder.mkdir(parents=True)
            _, trial = planned(5, number, folder, (kind,))
            content = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
            contents.append((trial.what, trial.expected, content))
        written.append(contents)
    assert written[0] == written[1]


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


def problems(module, folder, cases):
    """Those of the first cases of a kind, until there is one."""
    for number in range(cases):
        of_case = folder / str(number)
        of_case.mkdir()
        trial = module.drawn(random.Random(f"planted {number}"), of_case)
        if found := judged(trial).problems:
            return f"{trial.what}: {found}"
    return ""


def off(head, backend, found=operators.linear_log_prob):
    log_prob, entropy = found(head, backend)
    return log_prob + 0.01, entropy


BLIND = {
    "values of YAML are not counted": ("recipes", (plain, "_check", lambda value: None)),
    "a frame is not taken off": ("command_lines", (command_line, "_unframed", lambda message: message)),
    "names are not looked at": ("command_lines", (command_line, "known_keys", lambda model: [])),
    "JSON is read as it is": ("rows", (files.plain, "parse_json", json.loads)),
    "any answer is one": ("rows", (data_rows, "_gold_text", lambda value, key: str(value))),
    "rows are lost": ("rows", (rows, "read_rows", lambda *args, **given: files.read_rows(*args, **given)[1:])),
    "weights are not checked": ("models", (models, "check_weights", lambda model: None)),
    "log-probs may be positive": ("answers", (reply, "ROUNDING", 10.0)),
    "tokens have no bound": ("answers", (answers, "VOCABULARY", 10**6)),
    "targets are not checked": ("kernels", (checks, "target_range", lambda target, *given: (target, target == -100))),
    "log-probs are off": ("kernels", (operators, "linear_log_prob", off)),
}


@pytest.mark.parametrize("blindness", BLIND)
def test_a_defect_of_the_project_is_found(tmp_path, monkeypatch, blindness):
    kind, planted = BLIND[blindness]
    monkeypatch.setattr(*planted)
    if blindness == "tokens have no bound":  # the stand-in then sends ids that the model does not have
        monkeypatch.setattr(
            answers, "sensible", lambda found: "" if found.rollouts[0].response.max() < 100 else "wrong"
        )
    assert problems(IN_PROCESS[kind], tmp_path, 400)


def test_a_kept_case_finds_its_defect_again(tmp_path, monkeypatch):
    trial = kept()["recipe: a chain of bases"](tmp_path)
    assert judged(trial).problems == ()
    monkeypatch.setattr(recipe, "MOST_BASES", 10**9)
    (problem,) = judged(trial).problems
    assert "names none of" in problem


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


def test_hangs_ends_and_growth_are_found_and_the_program_goes_on(tmp_path):
    plan = Plan(0, ("planted",), str(tmp_path), 2.0)
    records = list(done(plan, range(len(DEFECTS) + 1), 1))
    for record, (name, (_, problem)) in zip(records, [*DEFECTS.items(), *DEFECTS.items()], strict=False):
        assert bool(record.problems) == bool(problem), name
        assert re.search(problem, "\n".join(record.problems), re.DOTALL), name
    assert records[-1].what == "sound"


def test_the_cases_that_found_a_defect_are_sound_now_and_so_is_a_short_plan(tmp_path):
    words = (sys.executable, "-m", "tests.hostile", "--seed=7", f"--folder={tmp_path}")
    for cases in (len(kept()) + 40, len(kept()) + 41):
        done = subprocess.run(
            [*words, f"--cases={cases}"], cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        lines = (tmp_path / "records_7.jsonl").read_text().splitlines()
        assert [json.loads(line)["case"] for line in lines] == list(range(cases))
    assert re.search(rf"all +│ {cases} ", done.stdout), done.stdout
