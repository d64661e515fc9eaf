"""Before training: answers that cannot earn a reward stop the run, all others do not."""

import dataclasses
import re

import pytest

from exgrpo.train.preflight import QUESTIONS, preflight
from exgrpo.train.rollout import Finished, Sampling
from tests.train.configs import configured
from tests.train.fakes import ScriptedEngine, ScriptedGrader, answerer, question_set
from tests.train.launch import MAIN, launch
from tests.train.test_run import SMALL

REWARD = """
def score(response, gold):
    return 0.0

def score_form(response, gold):
    return float("boxed" in response)

def formless(response, gold):
    return 0.0
"""


class CuttingEngine(ScriptedEngine):
    """Cuts all answers but those to the first `whole` questions."""

    whole = 0

    def generate(self, requests):
        for answer in super().generate(requests):
            rollout = dataclasses.replace(answer.rollout, finished=answer.request < self.whole)
            yield Finished(answer.request, answer.sample, rollout)


def result(tmp_path, *, rewards=None, form=None, whole=40, count=40, name="score"):
    """A preflight on scripted answers: rewards and texts by the number of the question."""
    (tmp_path / "reward.py").write_text(REWARD)
    engine = CuttingEngine(dict.fromkeys(range(count), 0.0))
    engine.whole = whole
    asked = answerer(engine)
    rewards = rewards or {}
    asked.grader = ScriptedGrader(lambda text: rewards.get(int(text.split()[0]) - 100, 0.0))
    if form:
        asked.decode = lambda ids: f"{ids[0]} " + ("boxed" if ids[0] - 100 in form else "plain")
    config = configured({"reward": {"function": f"{tmp_path}/reward.py:{name}"}})
    return preflight(config, asked, question_set(count).questions, Sampling(max_tokens=8)), config


def test_it_counts_what_became_of_one_answer_to_each_of_the_first_questions(tmp_path):
    found, config = result(tmp_path, rewards={0: 1.0, 5: 1.0, 39: 1.0}, form={0, 1, 5, 39}, whole=30)
    assert (found.answers, found.finished, found.formed, found.right) == (QUESTIONS, 30, 3, 2)
    assert str(found) == "preflight: of 32 answers 30 are finished, 3 have the form that the reward needs, 2 are right"
    assert found.problem(config) is None


def test_fewer_questions_are_no_problem_and_a_reward_without_a_form_is_not_judged_by_one(tmp_path):
    found, config = result(tmp_path, count=3, name="formless")
    assert str(found) == "preflight: of 3 answers 3 are finished, 0 are right"
    assert found.problem(config) is None, "hard questions may need more answers than one"


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (
            {"whole": 0, "form": {0}},
            r"all 32 answers were cut at rollout.max_tokens \(80\), .*raise rollout.max_tokens",
        ),
        ({"form": {-1}}, r"none of 32 answers has the form .*reward.py:score needs: ask for it in data.prompt_format"),
    ],
)
def test_what_cannot_earn_a_reward_is_named_with_the_remedy(tmp_path, options, cause):
    found, config = result(tmp_path, **options)
    problem = found.problem(config)
    assert re.search(cause, problem)
    assert repr(found.example) in problem


@pytest.mark.parametrize("rewards", [{3: 1.0}, {3: 0.2}])
def test_one_answer_that_earns_something_is_enough(tmp_path, rewards):
    found, config = result(tmp_path, rewards=rewards, form={-1}, whole=0)
    assert found.problem(config) is None


@pytest.mark.parametrize("preflight", ["stop", "warn", "off"])
def test_a_run_whose_answers_are_all_cut(tmp_path, preflight):
    arguments = ("--steps=1", "--rollout.max_tokens=3", f"--preflight={preflight}", f"--output.folder={tmp_path}")
    done = launch(MAIN, *SMALL, *arguments)
    cut = "32 answers were cut at rollout.max_tokens (3)"
    assert done.returncode == (2 if preflight == "stop" else 0), done.stdout + done.stderr
    assert (cut in done.stderr) == (preflight == "stop")
    assert (f"warning: all {cut}" in done.stdout) == (preflight == "warn")
    assert ("preflight: of 32 answers 0 are finished" in done.stdout) == (preflight != "off")
    assert "Traceback" not in done.stderr
