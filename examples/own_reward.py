"""An own reward with a server: answers are run as code, in a process away from the training.

    python examples/own_reward.py &     # the server; it needs the standard library alone
    python -m exgrpo.train.main --recipe builtin:countdown --reward.function examples/own_reward.py:score

The task is to make a number from others, as in "Make 17 from 14, 5, 15, 13." The server runs the expression of an
answer and gives two parts: `right` (1 or 0) and `close` (up to 0.5, near the number). A reward of 1 or more is a
success, so only right answers are stored. metrics.jsonl has the mean of both parts, `reward_part/right` and
`reward_part/close`. The server prints how many answers it has graded, when it is stopped (Ctrl-C).

examples/judge.py asks a language model and tries again where it does not answer. Here the server is yours too, and the
same answer always has the same grade. An exception in the server is status 500: the answer counts as failed.

What to change next: the body of `grade`; a container around the server, where answers are whole programs (the check
for digits and signs is all that makes `eval` safe here); EXGRPO_GRADER for a server on another machine.
"""

import asyncio
import json
import os
import re
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PLACE = os.environ.get("EXGRPO_GRADER", "localhost:8123")


async def score(response, gold):
    """The parts of the reward: {"right": 1.0, "close": 0.5}."""
    body = json.dumps({"response": response, "gold": gold}).encode()
    return await asyncio.to_thread(lambda: json.load(urllib.request.urlopen(f"http://{PLACE}", body, timeout=5)))


def grade(response, gold):
    """Run the expression in the last box; `gold` is the number to make and the numbers to use."""
    target, *numbers = gold.split()
    expression = response.rpartition("\\boxed{")[2].rpartition("}")[0]
    if not re.fullmatch(r"[\d+*/() -]{1,60}", expression) or "**" in expression or "//" in expression:
        return {"right": 0.0, "close": 0.0}
    try:
        distance = abs(eval(expression, {"__builtins__": {}}) - int(target))
    except (SyntaxError, TypeError, ZeroDivisionError):
        return {"right": 0.0, "close": 0.0}
    all_used = sorted(re.findall(r"\d+", expression)) == sorted(numbers)
    return {"right": float(all_used and distance < 1e-9), "close": 0.5 / (1 + distance) if all_used else 0.0}


class Grader(BaseHTTPRequestHandler):
    """Answers each POST with the grade of what it sends."""

    def do_POST(self):
        """Read JSON, write JSON."""
        sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(grade(**sent)).encode())

    def log_message(self, *_):
        """No line for each request."""


if __name__ == "__main__":
    host, port = PLACE.rsplit(":", 1)
    print(f"grading at http://{PLACE}", flush=True)
    ThreadingHTTPServer((host, int(port)), Grader).serve_forever()
