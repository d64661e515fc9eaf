"""Sources of questions: arguments in their names, several of them in one set, each with its own reward."""

import re
import sys
import textwrap
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exgrpo.tools.evaluate.options import defaults as of_evaluation
from exgrpo.train.common.errors import ConfigError, DataError, ExgrpoError
from exgrpo.train.common.functions import module_names
from exgrpo.train.config.recipe import load_recipe, parse_args, to_yaml
from exgrpo.train.config.sources import settings_of
from exgrpo.train.data import tasks
from exgrpo.train.data.files import TASKS, from_hub, read_rows
from exgrpo.train.data.prompts import PromptFormat
from exgrpo.train.data.questions import Question, QuestionSet, joined
from exgrpo.train.data.selection import read_sources, reward_name
from exgrpo.train.reward.contract import Columns
from exgrpo.train.reward.names import DEFAULT
from exgrpo.train.run.startup_checks import check_startup
from tests.train.configs import configured

TASK = """
from types import SimpleNamespace
from typing import Literal

REWARD = "exgrpo_tests.rewards:score"

def generate(
    split, count, seed, low: int = 0, step: float = 1.0, words: tuple[str, ...] = (),
    form: Literal["short", "long"] = "short", free=None,
):
    given = repr((low, step, words, form, free))
    return [SimpleNamespace(question=f"{split} {i} {given}", answer=str(i)) for i in range(count)]
"""


@pytest.fixture
def task(tmp_path, monkeypatch):
    (tmp_path / "given.py").write_text(textwrap.dedent(TASK))
    monkeypatch.setattr(tasks, "__path__", [*tasks.__path__, str(tmp_path)])
    yield
    sys.modules.pop("exgrpo.train.data.tasks.given", None)


@pytest.mark.parametrize(
    ("query", "given"),
    [
        ("", "(0, 1.0, (), 'short', None)"),
        ("?low=3", "(3, 1.0, (), 'short', None)"),
        ("?step=2&form=long", "(0, 2.0, (), 'long', None)"),
        ("?words=[a,%20b]&low=-1", "(-1, 1.0, ('a', 'b'), 'short', None)"),
        ("?free=true", "(0, 1.0, (), 'short', True)"),
        ("?free=2026-01-02", "(0, 1.0, (), 'short', '2026-01-02')"),
        ("?words=[%2B]", "(0, 1.0, ('+',), 'short', None)"),
    ],
)
def test_arguments_reach_the_task(task, query, given):
    rows = read_rows(f"builtin:given{query}", split="test", limit=2, seed=0)
    assert [row.question for row in rows] == [f"test 0 {given}", f"test 1 {given}"]
    assert {(row.source, row.reward) for row in rows} == {(f"given{query}", "exgrpo_tests.rewards:score")}
    assert not from_hub(f"builtin:given{query}")
    assert "given" in module_names(TASKS, "generate"), "a new task is one new file"


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("?lwo=3", r"unknown argument 'lwo'; did you mean 'low'\? \(there is low, step, words, form, free\)"),
        ("?seed=3", r"unknown argument 'seed'.*\(there is low, "),
        ("?low=x", r"low: Input should be a valid integer \(got 'x'\)"),
        ("?low=1.5", "low: Input should be a valid integer"),
        ("?low=true", "low: Input should be a valid integer"),
        ("?low=", r"low: Input should be a valid integer \(got None\)"),
        ("?form=wide", "form: Input should be 'short' or 'long'"),
        ("?words=a", "words: Input should be a valid array"),
        ("?low", "arguments are written NAME=VALUE&NAME=VALUE: bad query field: 'low'"),
        ("?low=1&low=2", "the argument 'low' comes twice"),
        ("?low=[", "'low': not valid YAML"),
    ],
)
def test_bad_arguments_are_named(task, query, message):
    with pytest.raises(DataError, match=rf"^builtin:given{re.escape(query)}: {message}"):
        read_rows(f"builtin:given{query}", split="test", limit=2, seed=0)


def test_a_question_mark_in_a_pattern_of_files_begins_no_arguments(tmp_path):
    for name in ("a1", "a2", "b1"):
        (tmp_path / f"{name}.jsonl").write_text('{"question": "q", "answer": "1"}\n')
    rows = read_rows(str(tmp_path / "a?.jsonl"), split="train", limit=None, seed=0)
    assert [row.source for row in rows] == ["a1", "a2"]


def of_size(size, source, left_out=0):
    questions = [Question(i, (i,), f"{source} {i}", "1", source) for i in range(size + left_out)]
    return QuestionSet(tuple(questions[:size]), tuple(questions[size:]), beyond_limit=size)


def test_several_sources_become_one_set_with_indices_of_its_own():
    found = joined([of_size(3, "a", 1), of_size(2, "b"), of_size(1, "c", 2)])
    assert [(question.index, question.text) for question in found] == list(
        enumerate(["a 0", "a 1", "a 2", "b 0", "b 1", "c 0"])
    )
    assert [(question.index, question.source) for question in found.left_out] == [(0, "a"), (1, "c"), (2, "c")]
    assert (found.sizes, found.beyond_limit) == ((3, 2, 1), 6)
    alone = of_size(3, "a")
    assert joined([alone]) is alone
    assert alone.sizes == (3,)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 40))
def test_the_first_questions_are_of_all_sources(sizes, count):
    questions = joined([of_size(size, str(i)) for i, size in enumerate(sizes)])
    first = questions.first(count)
    assert len(first) == min(count, sum(sizes))
    given = [[q.text for q in first if q.source == str(i)] for i in range(len(sizes))]
    for i, (texts, size) in enumerate(zip(given, sizes, strict=True)):
        assert texts == [f"{i} {j}" for j in range(len(texts))]
        assert len(texts) == size or len(texts) >= max(map(len, given)) - 1
    assert [q.index for q in first] == sorted(q.index for q in first)


@pytest.mark.parametrize(
    ("brought", "of_source", "for_all", "expected"),
    [
        ("", None, None, DEFAULT),
        ("math", None, None, "math"),
        ("math", "a.py:f", None, "a.py:f"),
        ("math", "a.py:f", "b.py:f", "b.py:f"),
        ("", None, "b.py:f", "b.py:f"),
    ],
)
def test_a_question_has_the_reward_of_all_else_its_sources_else_the_default(
    tmp_path, brought, of_source, for_all, expected
):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "1 + 1", "answer": "2"}\n')
    source = "builtin:arithmetic" if brought else str(path)
    own = [{"source": source, "reward": of_source}] if of_source else []
    data = {"train": [source], "train_limit": 1, "test": None, "sources": own}
    config = configured({"data": data, "reward": {"function": for_all}})
    ((row,),) = read_sources(config, [source], lambda name: Columns(), split="train", limit=1, seed=0)
    assert row.reward == reward_name(config, source) == expected


def of_two(tmp_path, *settings):
    """A run on two sources, of which single ones have settings."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text('{"question": "1 + 1", "answer": "2", "level": 3}\n')
    (tmp_path / "mine.py").write_text("def score(response, gold, *, level):\n    return level\n")
    train = [str(tmp_path / f"{name}.jsonl") for name in ("a", "b")]
    own = [{"source": f"{tmp_path}/{source}.jsonl", **values} for source, values in settings]
    return configured({"data": {"train": train, "train_limit": None, "test": None, "sources": own}})


def test_a_source_may_have_a_reward_a_prompt_format_and_stop_strings_of_its_own(tmp_path):
    mine = f"{tmp_path}/mine.py:score"
    config = of_two(tmp_path, ("b", {"reward": mine, "prompt_format": "{question}?", "stop": ["a", "b"]}))
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_recipe(tmp_path / "config.yaml") == config
    with ExitStack() as resources:
        a, b = (row for (row,) in check_startup(config, resources).train)
        assert [(row.reward, row.columns) for row in (a, b)] == [(DEFAULT, {}), (mine, {"level": 3})]
    for options in (config.data, of_evaluation([tmp_path / "config.yaml"]).data):
        texts = [PromptFormat.from_source(source, options).prompt_format for source in config.data.train]
        assert texts == [config.data.prompt_format, "{question}?"]
        assert [settings_of(source, options.sources).stop for source in config.data.train] == [None, ("a", "b")]


@pytest.mark.parametrize(
    ("of_run", "own", "common"),
    [
        (["a", "c"], {"b": ["b", "a"]}, ("a",)),
        (["a", "c"], {}, ("a", "c")),
        ([], {"b": ["b"]}, ()),
        (["a"], {"b": []}, ()),
        (["a"], {"a": ["c", "b"], "b": ["b", "c"]}, ("c", "b")),
    ],
)
def test_stop_strings_of_every_source_are_those_of_the_model(tmp_path, of_run, own, common):
    config = of_two(tmp_path, *((name, {"stop": stop}) for name, stop in own.items()))
    rollout = config.rollout.model_copy(update={"stop": tuple(of_run)})
    assert config.model_copy(update={"rollout": rollout}).common_stop == common


def test_the_reward_for_all_questions_is_that_of_every_source(tmp_path):
    config = of_two(tmp_path, ("b", {"reward": f"{tmp_path}/mine.py:score"}))
    config = config.model_copy(update={"reward": config.reward.model_copy(update={"function": "math"})})
    with ExitStack() as resources:
        assert all(row.columns == {} for (row,) in check_startup(config, resources).train)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([("c", {})], "data.sources has settings of '.*c.jsonl', and the sources of this run are '.*a.jsonl"),
        ([("a", {}), ("a", {})], "data.sources has settings of '.*a.jsonl' twice"),
        ([("a", {"prompt_format": "{q}"})], "has the field {q}"),
    ],
)
def test_settings_of_sources_that_cannot_be(tmp_path, settings, message):
    with pytest.raises(ExgrpoError, match=message), ExitStack() as resources:
        check_startup(of_two(tmp_path, *settings), resources)


@pytest.mark.parametrize("option", ["data.sources", "evaluation.sets", "evaluation.sets.hard.samples"])
def test_settings_of_sources_and_sets_are_for_recipes(option):
    with pytest.raises(ConfigError, match=f"^--{option}: data.sources and evaluation.sets are for recipes only"):
        parse_args([f"--{option}", "x"])
