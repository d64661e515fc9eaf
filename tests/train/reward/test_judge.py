"""The judge of the examples, before a server that stands in for a model."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import ClassVar

import pytest

from exgrpo.train.reward.pool import Grader
from tests.train.reward.conftest import grade

JUDGE = Path(__file__).parents[3] / "examples" / "judge.py"


class Model(BaseHTTPRequestHandler):
    """Says what the answer in the prompt asks for."""

    seen: ClassVar[list[dict]] = []
    over = Event()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["messages"][0]["content"]
        answer = prompt.partition("<answer>\n")[2].partition("\n</answer>")[0]
        again = sum(prompt == one["prompt"] for one in self.seen)
        self.seen.append({"path": self.path, "key": self.headers["Authorization"], "prompt": prompt, **body})
        if answer == "slow":
            self.over.wait()
            return
        status = {"busy": 200 if again else 503, "refused": 401}.get(answer, 200)
        reply = {"choices": [{"message": {"role": "assistant", "content": f"It says {answer}.\nScore: {answer}"}}]}
        text = "<html>" if answer == "page" else json.dumps(reply).replace("busy", "4")
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def judge(tmp_path):
    """The place of the judge, whose server answers."""
    Model.seen, Model.over = [], Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
    thread = Thread(target=server.serve_forever)
    thread.start()
    address = {"JUDGE_URL": f"http://127.0.0.1:{server.server_port}/v1", "JUDGE_API_KEY": "mine"}
    # The processes that grade may have begun with another environment.
    (tmp_path / "judge.py").write_text(f"import os\nos.environ.update({address})\n{JUDGE.read_text()}")
    yield f"{tmp_path}/judge.py:score"
    Model.over.set()
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_judge_grades_and_what_goes_wrong_is_counted(judge):
    answers = ["10", "7.5", "<think>10</think> 0 ", "busy", "refused", "page", "11", "nothing"]
    with Grader(judge, workers=1, time_limit=120, concurrency=len(answers)) as grader:
        columns = {"question": "what?", "rubric": "be strict", "level": 3}
        grades = grade(grader, judge, [(answer, "gold", columns) for answer in answers])
    assert grades.reward == (1.0, 0.75, 0.0, 0.4, 0.0, 0.0, 0.0, 0.0)
    assert (grades.timed_out, grades.failed) == (0, 4)
    assert sum(failure.count for failure in grades.failures) == 4
    assert len(Model.seen) == len(answers) + 1, "only the request to a busy server is sent again"
    assert {(one["path"], one["key"], one["temperature"]) for one in Model.seen} == {
        ("/v1/chat/completions", "Bearer mine", 0)
    }
    assert all(all(part in one["prompt"] for part in ("what?", "gold", "be strict")) for one in Model.seen)


def test_a_judge_that_does_not_answer_in_time_is_counted(judge):
    with Grader(judge, workers=1, time_limit=1, concurrency=2) as grader:
        answers = [(response, "gold", {"question": "what?"}) for response in ("slow", "<think></think>slow")]
        grades = grade(grader, judge, answers)
    assert (grades.reward, grades.timed_out, grades.failed) == ((0.0, 0.0), 2, 0)
