"""What ships with the package is found by its name: a new task is one new file."""

import sys
import textwrap

import pytest

from exgrpo.train.common.functions import ASSETS, DEFAULT_TASK, find_module, model_names, module_names
from exgrpo.train.config.recipe import DEFAULT_RUN
from exgrpo.train.data import tasks
from exgrpo.train.data.files import TASKS, read_rows
from exgrpo.train.reward.names import BUILTIN, DEFAULT, resolve_reward


@pytest.fixture
def new_file(tmp_path, monkeypatch):
    """Adds a file to a package without a change to anything else."""

    def add(package, name, text):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
        added.append(f"{package.__name__}.{name}")

    added = []
    yield add
    for name in added:
        sys.modules.pop(name, None)


def test_a_new_task_is_one_new_file(new_file):
    new_file(
        tasks,
        "counting",
        """
        from types import SimpleNamespace

        def generate(split, count, seed):
            return [SimpleNamespace(question=f"{split} {seed + i}?", answer=str(seed + i)) for i in range(count)]
        """,
    )
    rows = read_rows("builtin:counting", split="test", limit=2, seed=5)
    assert [(row.question, row.gold, row.source) for row in rows] == [
        ("test 5?", "5", "counting"),
        ("test 6?", "6", "counting"),
    ]
    assert {row.reward for row in rows} == {DEFAULT}
    assert module_names(TASKS, "generate") == ["arithmetic", "colouring", "countdown", "counting"]


@pytest.mark.parametrize("name", BUILTIN)
def test_the_part_that_decides_has_the_grade_of_the_whole(name):
    reward = resolve_reward(name)
    for response in ("<think>5</think> it is \\boxed{4}", "\\boxed{4}", "the answer is 4", "", "</think>", "4"):
        part = BUILTIN[name](response)
        assert (0.0 if part is None else reward(part, "4")) == reward(response, "4")


@pytest.mark.parametrize("name", ["", "nothing", "files", "questions", "..pool", "math:math", "arithmetic.generate"])
def test_what_is_no_task_is_not_found(name):
    assert find_module(TASKS, name, "generate") is None


def test_the_default_run_lies_beside_its_model():
    assert DEFAULT_TASK in model_names()
    assert DEFAULT_RUN.is_file()
    assert DEFAULT_RUN.parent == ASSETS / DEFAULT_TASK
