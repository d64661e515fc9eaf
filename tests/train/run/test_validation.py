"""The evaluations of a run against plain rules: their numbers, the best one, the end by patience, the way back."""

import json
import re
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from exgrpo.train.common.errors import ConfigError
from exgrpo.train.config.options import held_out_sets
from exgrpo.train.config.recipe import parse_args
from exgrpo.train.run import validation as module
from exgrpo.train.run.startup_checks import check_startup
from exgrpo.train.run.validation import Evaluator, check_best
from exgrpo.train.run.validation_scores import Verdict, score, score_all
from tests.train.configs import configured
from tests.train.fakes import ScriptedEngine, question_set, rollout_worker

ROOT = Path(__file__).parents[3]
QUESTIONS = 8
HARD = {"source": "builtin:colouring", "samples": 4, "temperature": 0.6}
LESS_IS_BETTER = r"(/error|/?truncated|/?without_\w+|/low|/high)$"


def evaluator(metric="hard/pass_rate", patience=None, engine=None, **sets) -> Evaluator:
    config = configured(
        {"evaluation": {"patience": patience, "sets": {"hard": HARD, **sets}}, "checkpoint": {"best": metric}}
    )
    questions = dict.fromkeys(held_out_sets(config), question_set(QUESTIONS))
    return Evaluator(config, questions, rollout_worker(engine or ScriptedEngine({})))


def take(of: Evaluator, step: int, right: int) -> None:
    """The evaluation after so many steps, in which so many of the questions are answered right."""
    verdicts = [Verdict("source", str(question), question < right) for question in range(QUESTIONS)]
    with patch.object(module, "evaluate", return_value=(score_all(verdicts), score(verdicts))):
        of.evaluate(step)


@given(st.lists(st.integers(0, QUESTIONS), min_size=1, max_size=8), st.integers(1, 3), st.integers(0, 7))
def test_the_best_is_the_first_highest_and_patience_ends_after_it_also_when_the_run_is_continued(rights, patience, cut):
    of = evaluator(patience=patience)
    for step, right in enumerate(rights):
        if step == cut:
            state = json.loads(json.dumps(of.state(), allow_nan=False))
            of = evaluator(patience=patience)
            of.restore(state)
        take(of, step, right)
        best = rights.index(max(rights[: step + 1]))
        assert (of.best.step, of.best.value) == (best, rights[best] / QUESTIONS)
        assert of.improved == (best == step)
        assert of.exhausted == (step - best >= patience)
        assert not of.is_due(step)
        assert of.is_due(step + 1)
    first, last = rights[0] / QUESTIONS, rights[-1] / QUESTIONS
    assert of.changes()[1] == f"held-out Pass@1 on hard: before {first:.3f}, after {last:.3f} ({last - first:+.3f})"


def test_what_was_best_by_another_number_does_not_count():
    of, other = evaluator(patience=1), evaluator("test/pass_rate", patience=1)
    take(of, 0, 3)
    other.restore(of.state())
    assert (other.best, other.exhausted) == (None, False)


def test_every_set_is_asked_as_it_says_and_its_numbers_are_those_that_can_decide():
    engine = ScriptedEngine(dict.fromkeys(range(QUESTIONS), 0.5))
    of = evaluator(engine=engine, easy={"source": ["a.jsonl"]})
    found, sentences = of.evaluate(20)
    assert [set(call.values()) for call in engine.calls] == [{1}, {4}, {1}]
    assert sentences[1].startswith("held-out Pass@1 on hard after 20 steps: 0.500 (95 %: ")
    assert found["hard/pass_rate"] == 0.5
    assert found["hard/pass_at/2"] == pytest.approx(1 - 1 / 6)  # of two right among four, one pair has none
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    of_sets = [name for name in found if name.startswith("hard/")]
    assert all(
        f"`{re.sub(r'[0-9]+', 'K', name.removesuffix('fake')).replace('hard', 'NAME')}`" in page for name in of_sets
    )
    deciding = [name for name in found if not re.search(LESS_IS_BETTER, name) and "evaluation" not in name]
    with pytest.raises(ConfigError) as error:
        check_best(evaluator("pass_rate", easy={"source": "a.jsonl"}).config, of.questions)
    problem, _, names = str(error.value).rpartition(": ")
    assert problem == "checkpoint.best: 'pass_rate' is none of the numbers of this run"
    assert sorted(names.split(", ")) == sorted(set(deciding) - {"step"})
    check_best(of.config, of.questions)


def test_a_set_has_the_options_of_the_evaluation_that_it_leaves_out(tmp_path):
    path = tmp_path / "recipe.yaml"
    values = {"policy": {"path": "m"}, "data": {"train": "t", "test": "d", "test_limit": 5, "test_split": "dev"}}
    path.write_text(yaml.safe_dump({**values, "evaluation": {"top_p": 0.9, "sets": {"hard": HARD}}}))
    test, hard = held_out_sets(parse_args([f"--recipe={path}"])).values()
    assert (test.source, test.split, test.limit, test.samples, test.temperature) == (("d",), "dev", 5, 1, 1.0)
    assert (hard.source, hard.split, hard.limit) == (("builtin:colouring",), "dev", 5)
    assert (hard.samples, hard.temperature, hard.top_p) == (HARD["samples"], 0.6, 0.9)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"evaluation.sets.test.source": "a"}, "the set 'test' needs another name"),
        ({"evaluation.sets": {"a/b": HARD}}, r"evaluation.sets.a/b.\[key\]"),
        ({"evaluation.sets.a.samples": 2}, "evaluation.sets.a.source is missing"),
        ({"evaluation.patience": 2}, "evaluation.patience needs checkpoint.best"),
        ({"evaluation": {"patience": 2, "every": None}, "checkpoint.best": "x"}, "and evaluation.every"),
        ({"checkpoint.best": "x", "data.test": None}, "checkpoint.best needs held-out questions: set data.test"),
    ],
)
def test_what_cannot_be_is_refused_before_training(values, message):
    with pytest.raises(ConfigError, match=message):
        check_startup(configured(values), None)


def test_the_example_of_the_documentation_is_a_recipe(tmp_path):
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"((?:    .*\n)*    evaluation:\n(?:    .*\n)+)", page)
    (tmp_path / "recipe.yaml").write_text("".join(line[4:] + "\n" for line in text.splitlines()))
    config = parse_args(["--recipe=builtin:arithmetic", f"--recipe={tmp_path / 'recipe.yaml'}"])
    assert len(held_out_sets(config)) > 1
    assert config.checkpoint.best
    assert config.output.export_every
