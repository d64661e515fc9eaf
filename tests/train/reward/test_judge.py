"""The judge of the examples, before a server that stands in for a model."""

from pathlib import Path
from threading import Event

import pytest

from exgrpo.train.reward.pool import Grader
from tests.train.reward.conftest import grade
from tests.train.rollout.server.fake_server import FakeServer

JUDGE = Path(__file__).parents[3] / "examples" / "judge.py"
ROUTE = "v1/chat/completions"


def prompt_of(request):
    return request["messages"][0]["content"]


@pytest.fixture
def server():
    """It says what the answer in the prompt asks for."""
    fake, over = FakeServer(), Event()

    def says(request):
        answer = prompt_of(request).partition("<answer>\n")[2].partition("\n</answer>")[0]
        if answer == "slow":
            over.wait()
        again = [prompt_of(one) for one in fake.requests(ROUTE)].count(prompt_of(request)) > 1
        status = {"busy": 200 if again else 503, "refused": 401}.get(answer, 200)
        text = f"It says {answer}.\nScore: {answer}".replace("busy", "4")
        return status, b"<html>" if answer == "page" else {"choices": [{"message": {"content": text}}]}

    fake.answers[ROUTE] = says
    yield fake
    over.set()
    fake.close()


@pytest.fixture
def judge(server, tmp_path):
    """The place of the judge, whose server answers."""
    address = {"JUDGE_URL": f"{server.url}/v1", "JUDGE_API_KEY": "mine"}
    # The processes that grade may have begun with another environment.
    (tmp_path / "judge.py").write_text(f"import os\nos.environ.update({address})\n{JUDGE.read_text()}")
    return f"{tmp_path}/judge.py:score"


def test_the_judge_grades_and_what_goes_wrong_is_counted(judge, server):
    answers = ["10", "7.5", "<think>10</think> 0 ", "busy", "refused", "page", "11", "nothing"]
    with Grader(judge, workers=1, time_limit=120, concurrency=len(answers)) as grader:
        columns = {"question": "what?", "rubric": "be strict", "level": 3}
        grades = grade(grader, judge, [(answer, "gold", columns) for answer in answers])
    assert grades.reward == (1.0, 0.75, 0.0, 0.4, 0.0, 0.0, 0.0, 0.0)
    assert (grades.timed_out, grades.failed) == (0, 4)
    assert sum(failure.count for failure in grades.failures) == 4
    asked = server.requests(ROUTE)
    assert len(server.asked) == len(asked) == len(answers) + 1, "only the request to a busy server is sent again"
    assert {one["temperature"] for one in asked} == {0}
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer mine"}
    assert all(part in prompt_of(one) for one in asked for part in ("what?", "gold", "be strict"))


def test_a_judge_that_does_not_answer_in_time_is_counted(judge):
    with Grader(judge, workers=1, time_limit=1, concurrency=2) as grader:
        answers = [(response, "gold", {"question": "what?"}) for response in ("slow", "<think></think>slow")]
        grades = grade(grader, judge, answers)
    assert (grades.reward, grades.timed_out, grades.failed) == ((0.0, 0.0), 2, 0)
