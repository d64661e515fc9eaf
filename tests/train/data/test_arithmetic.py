"""The default run's problems, their worked solutions, and the tokenizer and model that ship with the package."""

from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exgrpo.train.data.tasks import split_of_key
from exgrpo.train.data.tasks.arithmetic import LEVELS, _canonical, generate, worked_solution
from exgrpo.train.reward import grading

SPLITS = ("pretrain", "train", "test")


@pytest.mark.parametrize("split", SPLITS)
def test_answers_are_right_and_problems_differ(split):
    problems = generate(split, 600, seed=3)
    assert len({problem.expression for problem in problems}) == 600
    assert {problem.level for problem in problems} == set(LEVELS)
    for problem in problems:
        assert problem.expression in problem.question
        assert int(problem.answer) == eval(problem.expression, {"__builtins__": {}}) >= 0
        assert split_of_key(_canonical(problem.expression)) == split


def test_the_default_problems_stay_those_that_the_shipped_model_was_made_from():
    digest = sha256()
    for split in SPLITS:
        for seed in (0, 7):
            problems = [(p.question, p.answer, p.expression, p.level) for p in generate(split, 1000, seed)]
            digest.update(repr(problems).encode())
    assert digest.hexdigest() == "bad2743232b521c8fbee582cc1c65d87ea804c355b3f21d1b006b5a0736d19db"


def test_a_greater_difficulty_has_higher_levels():
    levels = [[p.level for p in generate("train", 400, 3, difficulty=difficulty)] for difficulty in (1, 2, 3, 4)]
    means = [sum(of_difficulty) / 400 for of_difficulty in levels]
    assert means == sorted(means)
    assert [set(of_difficulty) for of_difficulty in levels] == [{1, 2}, set(LEVELS), set(LEVELS), {3, 4}]


@given(st.integers(0, 10_000))
def test_worked_solutions_are_right_and_those_with_slips_follow_from_them(seed):
    (problem,) = generate("train", 1, seed=seed)
    solution = worked_solution(problem.expression)
    assert grading.math(solution, problem.answer) == 1.0
    for column in solution.removeprefix("<think>").split("</think>")[0].replace("; ", ", ").split(", "):
        left, _, right = column.split(": ")[-1].partition(" = ")
        assert eval(left, {"__builtins__": {}}) == int(right)
    # A slip in every column shows in some column, whatever becomes of the result.
    assert worked_solution(problem.expression, lambda: True) != solution
