"""Scores against enumeration: pass@k, distinct solutions, means over questions."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exgrpo.train.config.options import RewardConfig
from exgrpo.train.data.questions import QuestionSet
from exgrpo.train.rollout.engine import Sampling
from exgrpo.train.run.validation import evaluate
from exgrpo.train.run.validation_scores import Verdict, average, score, score_all
from tests.train.fakes import ScriptedEngine, ScriptedGrader, marked, question_set, rollout_worker

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
    overall, by_source = evaluate(
        rollout_worker(ScriptedEngine({0: 1.0, 1: 0.5, 2: 0.5})),
        QuestionSet(asked.questions, left_out),
        2,
        Sampling(8),
        seed=0,
        reward=PLAIN,
    )
    assert (overall.questions, overall.left_out) == (6, 3)
    assert overall.pass_rate == pytest.approx(2 / 6)
    assert overall.pass_at == {2: 0.5}
    assert {name: (s.questions, s.left_out, s.pass_rate) for name, s in by_source.items()} == {
        "a": (1, 1, 0.0),
        "b": (2, 2, 0.0),
        "fake": (3, 0, pytest.approx(2 / 3)),
    }
