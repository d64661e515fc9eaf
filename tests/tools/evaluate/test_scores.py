"""Intervals against scipy and simulation, what answers lack, and the files and tables that tell it."""

import io
import json
import math
import re

import numpy as np
import pytest
from rich.console import Console
from scipy.stats import binomtest

from exgrpo.tools.evaluate.evaluation import AnswerFile, verdicts
from exgrpo.tools.evaluate.options import EvaluationOptions
from exgrpo.tools.evaluate.program import write
from exgrpo.train.common.records import Rollout
from exgrpo.train.common.step_batch import StepBatch
from exgrpo.train.config.options import RewardConfig
from exgrpo.train.data.questions import Question
from exgrpo.train.metrics.report.runs import load_run
from exgrpo.train.metrics.run_log import RunLog
from exgrpo.train.rollout.engine import Sampling
from exgrpo.train.run.validation import evaluate, metrics
from exgrpo.train.run.validation_scores import Verdict, effective_count, score, score_all, unasked, wilson
from tests.train.fakes import ScriptedEngine, question_set, rollout_worker
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
