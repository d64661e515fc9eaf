"""What ships with the package is found by its name: a new task is one new file."""

import pytest

from exgrpo.train.common.functions import find_module
from exgrpo.train.data.files import TASKS
from exgrpo.train.reward.names import BUILTIN, resolve_reward


@pytest.mark.parametrize("name", BUILTIN)
def test_the_part_that_decides_has_the_grade_of_the_whole(name):
    reward = resolve_reward(name)
    for response in ("<think>5</think> it is \\boxed{4}", "\\boxed{4}", "the answer is 4", "", "</think>", "4"):
        part = BUILTIN[name](response)
        assert (0.0 if part is None else reward(part, "4")) == reward(response, "4")


@pytest.mark.parametrize("name", ["", "nothing", "files", "questions", "..pool", "math:math", "arithmetic.generate"])
def test_what_is_no_task_is_not_found(name):
    assert find_module(TASKS, name, "generate") is None
