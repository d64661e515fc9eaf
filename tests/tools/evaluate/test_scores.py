"""Scores against enumeration, intervals against scipy and simulation, and the files and tables that tell them."""

import dataclasses
import io
import itertools
import json
import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from scipy.stats import binomtest

from exgrpo.tools.evaluate.__main__ import write
from exgrpo.tools.evaluate.evaluation import AnswerFile, verdicts
from exgrpo.tools.evaluate.options import EvaluationOptions
from exgrpo.train.common.records import Rollout
from exgrpo.train.common.step_batch import StepBatch
from exgrpo.train.config.options import RewardConfig
from exgrpo.train.data.questions import Question, QuestionSet
from exgrpo.train.metrics.report.runs import load_run
from exgrpo.train.metrics.run_log import RunLog
from exgrpo.train.rollout.engine import Sampling
from exgrpo.train.run.validation import evaluate, metrics
from exgrpo.train.run.validation_scores import Verdict, average, effective_count, score, score_all, unasked, wilson
from tests.train.fakes import ScriptedEngine, ScriptedGrader, marked, question_set, rollout_worker
from tests.train.metrics.test_training_numbers import documented


@pytest.mark.parametrize(("right", "count"), [(0, 1), (0, 8), (8, 8), (3, 8), (212, 512), (999, 1000)])
def test_the_interval_is_scipys(right, count):
    expected = binomtest(right, count).proportion_ci(0.95, method="wilson")
    assert wilson(right / count, count) == pytest.approx((expected.low, expected.high), abs=1e-12)


def drawn(rights) -> list[Verdict]:
    return [Verdict("s", str(i), right) for i, of_question in enumerate(rights) for right in of_question]


@pytest.mark.parametrize(
    ("rights", "count"),
    [
        # One answer per question: as many as there are questions.
        ([[True], [False], [True], [True]], 4),
        # All answers to a question alike: again that many.
        ([[True] * 8, [False] * 8, [True] * 8], 3),
        # Questions that are all the same: the answers are independent.
        ([[True, False]] * 5, 10),
        # The spread says nothing.
        ([[False] * 4] * 8, 8),
        ([[True] * 4] * 8, 8),
        ([[True, False, True, True]], 1),
    ],
)
def test_questions_bound_what_several_answers_tell(rights, count):
    rates = np.array([np.mean(of_question) for of_question in rights])
    assert effective_count(rates, sum(map(len, rights))) == pytest.approx(count)
    found = score_all(drawn(rights))
    assert (found.low, found.high) == pytest.approx(wilson(float(rates.mean()), count))
    assert found.high - found.low > 0.05


@pytest.mark.parametrize(("alpha", "beta"), [(0.3, 0.3), (2.0, 6.0), (50.0, 50.0)])
def test_the_interval_covers_the_rate_of_all_questions_in_about_95_of_100_cases(alpha, beta):
    rng, truth, covered = np.random.default_rng(0), alpha / (alpha + beta), 0
    for _ in range(2000):
        rates = rng.binomial(4, rng.beta(alpha, beta, 40)) / 4
        low, high = wilson(float(rates.mean()), effective_count(rates, 160))
        covered += low <= truth <= high
    assert 0.93 <= covered / 2000 <= 0.98


def test_fractions_are_of_the_given_answers():
    given = [
        Verdict("a", "q", False, finished=False, formed=False, found=True),
        Verdict("a", "q", True, finished=True, formed=True, found=True),
        Verdict("a", "r", False, finished=True, formed=False, found=False),
        Verdict("a", "r", False, finished=True, formed=False, found=True),
        Verdict("b", "q", True),
    ]
    scores = score([*given, *unasked("a", "s", 2), *unasked("c", "t", 1)])
    found = {name: (s.truncated, s.without_form, s.without_answer) for name, s in scores.items()}
    assert found == {"a": (0.25, 0.75, 0.25), "b": (0.0, None, None), "c": (None, None, None)}


def test_scores_are_valid_json(tmp_path):
    console = Console(file=io.StringIO(), width=80)
    write(score([Verdict("one", "q", True, True, True, False), Verdict("two", "q", False)]), tmp_path, console)

    def refuse(constant):
        raise AssertionError(constant)

    saved = json.loads((tmp_path / "scores.json").read_text(), parse_constant=refuse)["sources"]
    assert saved["one"]["standard_error"] is None
    assert (saved["one"]["without_form"], saved["two"]["without_form"]) == (0.0, None)
    assert "0.207 to 1.000" in console.file.getvalue()


def test_an_interrupted_evaluation_knows_which_answers_were_cut(tmp_path):
    options = EvaluationOptions(model="m", data={"test": ("d",)})
    asked = [("question", "gold")] * 2
    file = AnswerFile(tmp_path, options, [asked])
    rollouts = [Rollout(np.array([3], np.int32), finished=finished) for finished in (True, False)]
    batch = StepBatch.from_rollouts([0], [2], rollouts)
    batch.fill(text=["text"] * 2, reward=[1.0] * 2, key=[5] * 2)
    file.append(0, [Question(0, (1,), "question", "gold", "s")], batch)
    again = AnswerFile(tmp_path, options, [asked])
    assert again.done == {0}
    found = list(verdicts(list(again.records()), [True, False], [None, None], 1.0))
    assert [(one.finished, one.formed, one.found) for one in found] == [(True, True, None), (False, False, None)]
    assert [one.key for one in found] == [5, 5]
    assert AnswerFile(tmp_path, options, [[("edited", "gold")] * 2]).done == set()


def test_in_training_the_same_numbers_are_written_and_reported(tmp_path):
    (tmp_path / "reward.py").write_text(
        "def score(response, gold):\n    return 1.0\n\n\n"
        "def score_form(response, gold):\n    return float(response.split()[1] == '7')\n"
    )
    reward = RewardConfig(function=f"{tmp_path}/reward.py:score", workers=1)
    asked = rollout_worker(ScriptedEngine({0: 1.0, 1: 0.0, 2: 0.5}))
    overall, by_source = evaluate(asked, question_set(3, reward.function), 2, Sampling(8), seed=0, reward=reward)
    assert (overall.truncated, overall.without_form, overall.without_answer) == (0.0, 0.5, None)
    numbers = metrics(overall, by_source)
    assert (numbers["held_out/low"], numbers["held_out/high"]) == (overall.low, overall.high)
    assert math.isnan(numbers["held_out/without_answer"])
    assert {re.sub(r"^test/f.*", "test/", re.sub("[0-9]+", "K", name)) for name in numbers} <= documented()
    # The two right answers to question 0 are different texts.
    assert numbers["distinct_at/2"] == overall.distinct_at[2] == 1.0
    assert numbers["distinct_at/2/error"] == overall.distinct_at_error[2] == pytest.approx(1 / math.sqrt(3))
    assert numbers["pass_at/2/error"] == overall.pass_at_error[2] == pytest.approx(1 / 3)
    log = RunLog(tmp_path)
    log.metrics("evaluation", {"step": 0, **numbers})
    log.close()
    columns = load_run(tmp_path, "run").columns
    assert columns["held_out/without_form"].tolist() == [0.5]


PLAIN = RewardConfig(function="tests.train.fakes:marked")
"""Has no functions beside it."""
VERDICTS = st.lists(st.booleans(), min_size=1, max_size=7)


@given(st.lists(st.lists(st.integers(-1, 3), min_size=4, max_size=9), min_size=1, max_size=6))
def test_scores_at_k_are_means_over_questions_with_their_standard_errors(questions):
    verdicts = [Verdict("s", str(i), key >= 0, key=abs(key)) for i, keys in enumerate(questions) for key in keys]
    found = score(verdicts)["s"]
    assert list(found.distinct_at) == list(found.pass_at)
    for k in found.distinct_at:
        subsets = [list(itertools.combinations(keys, k)) for keys in questions]
        distinct = [np.mean([len(set(subset) - {-1}) for subset in of_question]) for of_question in subsets]
        one = [np.mean([max(subset) >= 0 for subset in of_question]) for of_question in subsets]
        for values, mean, error in (
            (distinct, found.distinct_at[k], found.distinct_at_error[k]),
            (one, found.pass_at[k], found.pass_at_error[k]),
        ):
            assert mean == pytest.approx(np.mean(values))
            expected = np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else None
            assert error == (expected if expected is None else pytest.approx(expected, abs=1e-12))
        assert found.distinct_at[k] >= found.pass_at[k] - 1e-12


@given(st.lists(st.tuples(st.sampled_from("ab"), VERDICTS), min_size=1, max_size=8))
def test_scores_are_means_over_questions(questions):
    verdicts = [Verdict(source, str(i), right) for i, (source, rights) in enumerate(questions) for right in rights]
    scores = score(verdicts)
    for source in {source for source, _ in questions}:
        rates = [np.mean(rights) for name, rights in questions if name == source]
        assert scores[source].questions == len(rates)
        assert scores[source].pass_rate == pytest.approx(np.mean(rates))
        if len(rates) > 1:
            assert scores[source].standard_error == pytest.approx(np.std(rates, ddof=1) / len(rates) ** 0.5)
    assert score_all(verdicts).pass_rate == pytest.approx(np.mean([np.mean(rights) for _, rights in questions]))
    assert average(scores) == pytest.approx(np.mean([s.pass_rate for s in scores.values()]))


@pytest.mark.parametrize(("success", "pass_rate"), [(0.4, 1.0), (0.9, 0.5), (1.0, 0.0)])
def test_in_training_an_answer_is_right_by_the_threshold(success, pass_rate):
    asked = rollout_worker(ScriptedEngine({0: 1.0, 1: 0.0}))
    asked.grader = ScriptedGrader(lambda text: 0.9 if marked(text) else 0.5)
    reward = PLAIN.model_copy(update={"success": success})
    overall, _ = evaluate(asked, question_set(2), 2, Sampling(8), seed=0, reward=reward)
    assert overall.pass_rate == pass_rate


def test_in_training_questions_that_were_left_out_are_wrong():
    asked = question_set(3)
    left_out = tuple(
        dataclasses.replace(q, text=f"long {q.index}", source=s) for q, s in zip(asked, "abb", strict=True)
    )
    worker = rollout_worker(ScriptedEngine({0: 1.0, 1: 0.5, 2: 0.5}))
    questions = QuestionSet(asked.questions, left_out)
    overall, by_source = evaluate(worker, questions, 2, Sampling(8), seed=0, reward=PLAIN)
    assert (overall.questions, overall.left_out) == (6, 3)
    assert overall.pass_rate == pytest.approx(2 / 6)
    assert overall.pass_at == {2: 0.5}
    assert {name: (s.questions, s.left_out, s.pass_rate) for name, s in by_source.items()} == {
        "a": (1, 1, 0.0),
        "b": (2, 2, 0.0),
        "fake": (3, 0, pytest.approx(2 / 3)),
    }
