"""A reward of your own with a server: the expressions of answers are computed in a separate process.

    python examples/own_reward.py &     # the server; it needs only the standard library
    python exgrpo/train/main.py --recipe builtin:countdown --reward.function examples/own_reward.py:score

The task is to make a number from others, as in "Make 17 from 14, 5, 15, 13." The server computes the expression of
an answer and gives two parts: `right` (1 or 0) and `close` (up to 0.5, near the number). A reward of 1 or more is a
success, so only right answers are stored. The server prints its address. The run prints the reward of each step, and
metrics.jsonl has the mean of both parts, `reward_part/right` and `reward_part/close`.

examples/judge.py queries a language model and repeats failed requests. Here the server is yours, and the same answer
always has the same grade. If the server fails, the answer counts as failed (metric `reward_failed`).

What to change next: the body of `grade`; EXGRPO_GRADER=HOST:PORT for a server on another machine; a server in a
container, where answers are programs that must run.
"""

import ast
import asyncio
import json
import operator
import os
import re
import urllib.request
from fractions import Fraction
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PLACE = os.environ.get("EXGRPO_GRADER", "localhost:8123")
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy cannot reach this machine's servers
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


async def score(response: str, gold: str) -> dict[str, float]:
    """Return the parts of the reward: {"right": 1.0, "close": 0.5}."""
    body = json.dumps({"response": response, "gold": gold}).encode()
    return await asyncio.to_thread(lambda: json.load(DIRECT.open(f"http://{PLACE}", body, timeout=60)))


def grade(response: str, gold: str) -> dict[str, float]:
    """Grade the expression in the last box; `gold` is the number to make and the numbers to use."""
    target, *numbers = gold.split()
    expression = response.rpartition("\\boxed{")[2].rpartition("}")[0].strip()
    try:
        distance = abs(value(ast.parse(expression[:100], mode="eval").body) - int(target))
    except (SyntaxError, ValueError, ZeroDivisionError):
        return {"right": 0.0, "close": 0.0}
    if sorted(re.findall(r"\d+", expression)) != sorted(numbers):
        return {"right": 0.0, "close": 0.0}
    return {"right": float(distance == 0), "close": float(0.5 / (1 + distance))}


def value(node: ast.expr) -> Fraction:
    """Evaluate a parsed expression. Only whole numbers and four operators are allowed, so no other code runs."""
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value(node.left), value(node.right))
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    raise ValueError("not allowed")


class Grader(BaseHTTPRequestHandler):
    """Answers each POST with the grade of its content."""

    def do_POST(self) -> None:
        """Read JSON, write JSON."""
        sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(grade(**sent)).encode())

    def log_message(self, *_: object) -> None:
        """Log nothing."""


if __name__ == "__main__":
    host, port = PLACE.rsplit(":", 1)
    print(f"grading at http://{PLACE}", flush=True)
    ThreadingHTTPServer.request_queue_size = 128  # all answers of a step come at once
    ThreadingHTTPServer((host, int(port)), Grader).serve_forever()
