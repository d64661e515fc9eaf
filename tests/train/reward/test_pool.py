"""Rewards by name, and the processes that grade by them."""

import os
import time
from itertools import product

import pytest
from pebble.pool import process as of_pebble

from exgrpo.train.common.errors import RewardError
from exgrpo.train.reward import grading
from exgrpo.train.reward.names import beside, resolve_reward
from exgrpo.train.reward.pool import Grader
from tests.train.reward.conftest import grade

REWARDS = r"""
import ctypes, os, re, sys, time

def does(response, gold):
    exec(response)
    return 0.5

def same(response, gold):
    return response == gold

def nasty(response, gold):
    if response == "loop":
        while True:
            try:
                while True:
                    pass
            except BaseException:
                pass
    if response == "hang in C":
        re.match(r"(a+)+$", "a" * 50 + "b")
    if response == "exit":
        os._exit(3)
    if response == "segfault":
        ctypes.string_at(0)
    if response == "sys.exit":
        sys.exit(4)
    if response == "raise":
        raise KeyError("no such thing")
    return float(response == gold)

class Rude(float):
    def __repr__(self):
        raise ValueError("no")
    def __float__(self):
        raise ZeroDivisionError

class RudeError(Exception):
    def __str__(self):
        raise SystemExit(3)

def odd(response, gold):
    if response == "rude error":
        raise RudeError
    return {
        "none": None, "nan": float("nan"), "huger": 10**9000, "large": -1000001, "long": "x" * 100_000,
        "rude": Rude(2), "yes": True, "most": 1e6,
    }[response]

def imports_torch(response, gold):
    return "torch" in sys.modules or "deepspeed" in sys.modules

def slow_twice(response, gold):
    with open(gold, "a") as file:
        file.write("x")
    return 0.5

def one_argument(response):
    return 1.0

def same_form(response, gold):
    return float(response.islower())

nasty_form = 3

LIMIT = 3
"""


def worth(grades):
    """The grades without the keys of the solutions."""
    return grades.reward, grades.timed_out, grades.failed


@pytest.fixture(scope="module")
def grader(mine):
    names = [f"{mine}:{name}" for name in ("odd", "same", "slow_twice", "imports_torch")]
    with Grader(*names, workers=1, time_limit=30) as grader:
        yield grader


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("maths", "did you mean 'math'"),
        ("nothing alike", "math, math_no_think, 'package.module:function'"),
        ("exgrpo.train.reward.grading:math_nothink", "did you mean 'math_no_think'"),
        ("no_such_package.rewards:f", "cannot import no_such_package.rewards: ModuleNotFoundError"),
        ("{file}:samee", "did you mean 'same'"),
        ("{file}:LIMIT", "is not callable: it is a int"),
        ("{file}:one_argument", r"must take \(response, gold\)"),
        ("{folder}/broken.py:f", "cannot run .*broken.py: ZeroDivisionError"),
        ("{folder}/missing.py:f", "there is no file .*missing.py"),
    ],
)
def test_bad_names_are_clear_errors_here_and_at_construction(name, message, mine):
    (mine.parent / "broken.py").write_text("1 / 0")
    name = name.format(file=mine, folder=mine.parent)
    calls = [lambda: resolve_reward(name), lambda: Grader(name, workers=1, time_limit=5)]
    in_file = name.startswith((str(mine), "exgrpo."))  # what has nothing of this name has no form
    for call in calls if in_file else [*calls, lambda: beside(name, "form")]:
        with pytest.raises(ValueError, match=message):
            call()


def test_builtin_rewards_have_a_form_and_tell_whether_they_find_an_answer():
    forms = ["<think>hm</think>\\boxed{4}", "\\boxed{4}", "<think>hm</think>4"]
    found = ["<think>it is 5 .</think>nothing at all", "so \\boxed{4}", "<think>hm</think>it makes 4", "", "\\boxed{4"]
    expected = {
        "math_form": (forms, (1.0, 0.0, 0.0)),
        "math_no_think_form": (forms, (1.0, 1.0, 0.0)),
        "math_found": (found, (0.0, 0.0, 1.0, 0.0, 0.0)),
        "math_no_think_found": (found, (1.0, 1.0, 1.0, 0.0, 0.0)),
    }
    places = {name: f"exgrpo.train.reward.grading:{name}" for name in expected}
    with Grader(*places.values(), workers=1, time_limit=30) as grader:
        for name, (answers, right) in expected.items():
            reward, _, kind = name.rpartition("_")
            assert beside(reward, kind) == beside(f"exgrpo.train.reward.grading:{reward}", kind) == places[name]
            assert worth(grade(grader, places[name], [(answer, "5") for answer in answers])) == (right, 0, 0)


def test_a_user_reward_may_have_a_form(mine, monkeypatch):
    assert beside(f"{mine}:nasty", "form") is None  # nasty_form is no function
    assert beside(f"{mine}:odd", "form") is None
    monkeypatch.syspath_prepend(mine.parent)
    assert beside("mine:same", "form") == "mine:same_form"
    monkeypatch.chdir(mine.parent)
    form = beside("mine.py:same", "form")
    assert form == "mine.py:same_form"
    with Grader(form, "mine.py:same", workers=1, time_limit=5) as grader:
        assert grader.grade([("abc", "x"), ("ABC", "ABC")]).reward == (1.0, 0.0)
        assert grade(grader, "mine.py:same", [("a", "a"), ("a", "b")]).reward == (1.0, 0.0)


def test_a_reward_that_ends_its_process_while_loading_is_an_error_at_construction(tmp_path):
    (tmp_path / "dies.py").write_text("import os; os._exit(1)")
    with pytest.raises(RuntimeError, match=r"died while it loaded reward .*dies.py:f"):
        Grader(f"{tmp_path}/dies.py:f", workers=1, time_limit=5)


def test_a_process_that_dies_before_its_pool_takes_the_first_call_is_an_error_at_construction(tmp_path, monkeypatch):
    (tmp_path / "dies.py").write_text("import os; os._exit(1)")

    def too_late(manager):
        while manager.context.alive:
            time.sleep(0.01)

    monkeypatch.setattr(of_pebble, "task_scheduler_loop", too_late)
    with pytest.raises(RuntimeError, match=r"died while it loaded reward .*dies.py:f"):
        Grader(f"{tmp_path}/dies.py:f", workers=1, time_limit=5)


def test_grades_come_in_order_and_agree_with_the_function():
    answers = [(f"<think>{i}</think>\\boxed{{{i % 3}}}", "1") for i in range(20)]
    answers += [("\\boxed{1}", "1"), ("</think>", "1"), ("<think>a</think>\\boxed{\\frac{1}{2}}", "0.5")]
    with Grader("math", workers=2, time_limit=30) as grader:
        assert worth(grader.grade([])) == ((), 0, 0)
        expected = tuple(grading.math(response, gold) for response, gold in answers)
        assert worth(grader.grade(answers)) == (expected, 0, 0)
        assert 1.0 in expected


def test_equal_answers_are_graded_once_while_more_of_them_come(mine, tmp_path, grader):
    name, count = f"{mine}:slow_twice", tmp_path / "count"
    begun = grader.begin()
    begun.add("a", str(count), reward=name)
    while not count.exists():  # pytest's time limit ends a grader that waits for the end
        time.sleep(0.01)
    for response in "babab":
        begun.add(response, str(count), reward=name)
    assert worth(begun.finish()) == ((0.5,) * 6, 0, 0)
    assert count.read_text() == "xx"


def test_hangs_and_crashes_cost_only_their_own_answer(mine):
    nasty = ["loop", "hang in C", "exit", "segfault", "sys.exit", "raise"]
    answers = [(text, "gold") for text in nasty]
    for position in range(0, 30, 3):
        answers.insert(position, (str(position), str(position)))
    with Grader(f"{mine}:nasty", workers=2, time_limit=1.0) as grader:
        grades = grader.grade([*answers, ("loop", "gold")])
        assert grades.reward == (*(float(response == gold) for response, gold in answers), 0.0)
        assert (grades.timed_out, grades.failed) == (3, 4)
        line = 1 + REWARDS.splitlines().index('        raise KeyError("no such thing")')
        causes = {failure.cause: (failure.count, failure.response) for failure in grades.failures}
        assert causes == {
            "it took longer than reward.time_limit (1 s)": (3, "loop"),
            "the grading process died (exit code 3)": (1, "exit"),
            "the grading process died (exit code -11)": (1, "segfault"),
            f"SystemExit: 4 (mine.py, line {line - 2})": (1, "sys.exit"),
            f"KeyError: 'no such thing' (mine.py, line {line})": (1, "raise"),
        }


def test_what_a_reward_does_to_its_process_harms_no_other_answer(mine):
    harmless = [
        *("print('x' * 10**6)", "sys.stdout.close()", "sys.stderr = None", "os.chdir('/')", "os.environ.clear()"),
        *("os.fork() or os._exit(0)", "sys.setrecursionlimit(50_000)", "import builtins; builtins.print = None"),
        *("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)", "import gc; gc.disable()", "os.umask(0)"),
        "import subprocess; subprocess.Popen(['sleep', '3'])",
    ]
    fatal = [
        *("raise KeyboardInterrupt", "raise GeneratorExit", "raise BaseException", "raise MemoryError", "os.abort()"),
        *("raise ValueError('\\ud800' * 10**6)", "os.kill(os.getpid(), 9)", "os.closerange(3, 256)", "undefined"),
    ]
    answers = [answer for pair in zip(harmless, [*fatal, *fatal[:3]], strict=True) for answer in pair]
    with Grader(f"{mine}:does", workers=1, time_limit=20) as grader:
        grades = grader.grade([(answer, "") for answer in answers])
    assert worth(grades) == ((0.5, 0.0) * len(harmless), 0, len(harmless))


def test_expressions_that_hang_math_verify_are_killed():
    answers = [(f"\\boxed{{{text}}}", "5") for text in ("9^{9^{9^9}}", "5", "10^{10^{10}}")]
    with Grader("math_no_think", workers=2, time_limit=1.0) as grader:
        assert grader.grade(answers).reward == (0.0, 1.0, 0.0)
        assert worth(grader.grade([("\\boxed{5}", "5")])) == ((1.0,), 0, 0)


def test_grading_goes_on_when_idle_processes_are_killed(mine):
    with Grader(f"{mine}:same", workers=2, time_limit=5) as grader:
        for pause in (0.0, 0.5, 0.0):  # the pool notices before the next call, or during it
            for pid in list(grader._pool._pool_manager.worker_manager.workers):
                os.kill(pid, 9)
            time.sleep(pause)
            grades = grader.grade([(str(i), str(i)) for i in range(50)])
            assert sum(grades.reward) >= 48  # an answer may have been in the hands of a killed process
        both = grader.begin(), grader.begin()
        for i, grading_begun in product(range(40), both):
            grading_begun.add(str(i), str(i))
        for pid in list(grader._pool._pool_manager.worker_manager.workers):
            os.kill(pid, 9)
        assert sum(sum(grading_begun.finish().reward) for grading_begun in both) >= 78


@pytest.mark.parametrize(
    ("response", "shown"),
    [
        ("none", r"None \(NoneType\)"),
        ("nan", r"nan \(float\)"),
        ("huger", r".*int.*"),
        ("large", r"-1000001 \(int\)"),
        ("long", r"'xxx.*xxx' \(str\)"),
        ("rude", r"<.*Rude.*> \(Rude\)"),
    ],
)
def test_what_is_no_reward_is_one_line_that_names_function_question_and_value(response, shown, grader):
    grading_begun = grader.begin()
    grading_begun.add(response, "gold", "what is\nthis? " + "x" * 10_000)
    message = (
        rf"mine.py:odd' returned {shown} for an answer to 'what is\\nthis\? x.*: a reward is a finite number from "
    )
    with pytest.raises(RewardError, match=message) as error:
        grading_begun.finish()
    assert len(str(error.value)) < 1000
    assert "\n" not in str(error.value)
    with pytest.raises(RewardError, match="to 'gold': a reward is"):
        grader.grade([(response, "gold")])


def test_what_an_exception_cannot_say_is_left_out_and_other_numbers_are_rewards(grader):
    grades = grader.grade([("rude error", ""), ("yes", ""), ("most", "")])
    assert worth(grades) == ((0.0, 1.0, 1e6), 0, 1)
    assert grades.failures[0].cause.startswith("RudeError: <RudeError that cannot be printed> (mine.py, line ")


def test_grading_processes_import_no_trainer_and_own_rewards_see_the_whole_response(mine, grader):
    assert grade(grader, f"{mine}:imports_torch", [("a", "b")]).reward == (0.0,)
    answers = [("", ""), ("a</think>b", "b"), (" a", "a")]
    assert grade(grader, f"{mine}:same", answers).reward == (1.0, 0.0, 0.0)


def test_close_twice():
    grader = Grader("math", workers=1, time_limit=5)
    grader.close()
    grader.close()
    with pytest.raises(ValueError, match="closed"):
        grader.grade([("a", "b")])
