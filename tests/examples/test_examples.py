"""examples/ as a user starts them, each in a process of its own; the sizes of runs are smaller."""

import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from exgrpo.train.common.functions import load_function
from exgrpo.train.data.tasks import countdown
from exgrpo.train.replay import Candidates
from tests.programs import python
from tests.train.launch import environment, free_port

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMITS = ("--questions=8", "--rollout.samples=4", "--data.train_limit=8", "--data.test_limit=8")
SMALL = ("--recipe", "builtin:countdown", *LIMITS, "--preflight=off")
"""All questions are asked in every step, so that stored answers are soon replayed more than once."""


def printed(folder, *command, **also):
    """What a program prints, started in an empty folder."""
    return python(*command, cwd=folder, env={**environment(), **also}, timeout=500)


def columns(output):
    """The numbers of the lines of steps, by name."""
    rows = [dict(re.findall(r"(\w+) +([\d.]+)", line)) for line in output.splitlines() if line.startswith("step")]
    return {name: [float(row[name]) for row in rows] for name in rows[0]}


def training(folder, *options, **also):
    """The lines of metrics of the steps of a run."""
    printed(folder, "-m", "exgrpo.train.main", *SMALL, "--output.name", "run", *options, **also)
    lines = map(json.loads, (folder / "runs" / "run" / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "training"]


def test_the_bare_loop_learns(tmp_path):
    found = columns(printed(tmp_path, EXAMPLES / "bare_loop.py"))
    # Guesses are right with a probability of 1/64. A printed share is of at least 224 answers: its standard deviation
    # is below 0.034, so that of the mean of three is below 0.02. A model that learns nothing does not reach 0.2.
    assert found["reward"][0] < 0.1
    assert np.mean(found["reward"][-3:]) > 0.2
    assert found["replayed"][0] == 0
    assert found["replayed"][-1] > 0.5
    assert found["entropy"][0] == pytest.approx(np.log(4), abs=0.05)
    assert found["entropy"][-1] < found["entropy"][0]


@pytest.mark.long
def test_the_trainer_of_trl_replays(tmp_path):
    pytest.importorskip("trl", reason="trl is not installed")
    found = columns(printed(tmp_path, EXAMPLES / "trl_replay.py"))
    assert len(found["step"]) == 6
    # The shipped model solves about a third of these questions; 32 answers have a standard deviation of 0.09.
    assert 0.1 < np.mean(found["reward"]) < 0.9
    # Half of four questions have one replayed answer each, and only one has where only one has a success.
    assert found["replayed"][0] == 0
    assert {*found["replayed"][1:]} <= {0.0, 0.03, 0.06}
    assert found["replayed"][-1] == 0.06
    assert found["stored"][-1] > found["stored"][0]


def test_the_functions_of_the_own_method_prefer_and_forget():
    functions = [
        load_function(f"{EXAMPLES / 'own_method.py'}:{name}", "example", ValueError)
        for name in ("hard_and_rare", "worn_out")
    ]
    candidates = Candidates.of(
        9, question=np.arange(4), count=np.array([1.0, 3.0, 1.0, 1.0]), replays=np.array([0, 0, 1, 2])
    )
    priority, expired = (function(candidates, None) for function in functions)
    assert priority.log_weight.tolist() == [-1, -3, -2, -3]
    assert expired.rows.tolist() == [False, False, False, True]


@pytest.mark.long
def test_a_run_takes_the_own_method(tmp_path):
    place = EXAMPLES / "own_method.py"
    method = ["--experience.prioritise", f"{place}:hard_and_rare", "--experience.expire", f"{place}:worn_out"]
    steps = training(tmp_path, "--steps", "8", *method)
    times = [step["replayed_times_max"] for step in steps if step["replayed"]]
    assert len(times) >= 5
    assert max(times) == 2  # eight questions: without `worn_out` the same answers are replayed in most steps


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_head_memory_shows_time_and_memory_saved(tmp_path, dtype):
    # More logits of answers than one chunk holds: the fused loss has one chunk of them in float32 at a time and, on a
    # processor that does not multiply 16-bit numbers into float32, a 16-bit copy of its gradients. Both together are
    # less than all of them. A narrow head: on such a processor the products of all logits are slow.
    sizes = ["--tokens", "1024", "--hidden", "8", "--vocabulary", "48000", "--dtype", dtype, "--device", "cpu"]
    told = printed(tmp_path, EXAMPLES / "head_memory.py", *sizes)
    full, fused = (int(re.search(rf"{name} +[\d,]+ ms +([\d,]+) MiB", told)[1]) for name in ("full logits", "fused"))
    assert full > 1024 * 48000 * 4 / 2**20 > fused  # one matrix of logits in float32
    assert float(re.search(r"at most (\S+)\. ", told)[1]) < (1e-4 if dtype == "float32" else 0.1)


@contextmanager
def served():
    """The place of a server of grades."""
    place = f"localhost:{free_port()}"
    server = subprocess.Popen(
        [sys.executable, EXAMPLES / "own_reward.py"],
        env={**os.environ, "EXGRPO_GRADER": place},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout.readline() == f"grading at http://{place}\n"
        yield place
    finally:
        server.kill()
        server.communicate()


@pytest.mark.long
def test_a_run_is_graded_by_the_server(tmp_path):
    with served() as place:
        steps = training(
            tmp_path, "--steps", "3", "--reward.function", f"{EXAMPLES / 'own_reward.py'}:score", EXGRPO_GRADER=place
        )
    assert [step["reward_failed"] for step in steps] == [0, 0, 0]
    for step in steps:
        right, close = step["reward_part/right"], step["reward_part/close"]
        assert step["reward"] == pytest.approx(right + close)
        assert right == pytest.approx(step["pass_rate"])
        assert right / 2 <= close <= 0.5
    assert sum(step["reward_part/right"] for step in steps) > 0


@pytest.mark.parametrize(
    ("expression", "close"),
    [
        ("(3 + 5) * 8 - 9", 0.5),
        ("9 + 8 * 5 + 3", 0.125),  # 52 is 3 away
        ("3 + 5 + 8", 0),
        ("(3 + 5) * 8 - 9 = 55", 0),
        ("3 / (5 - 5) + 8 + 9", 0),
        ("__import__('os')", 0),
    ],
)
def test_the_server_grades_as_the_reward_of_the_task(expression, close):
    grade = load_function(f"{EXAMPLES / 'own_reward.py'}:grade", "example", ValueError)
    response, gold = f"\\boxed{{{expression}}}", "55 3 5 8 9"
    assert grade(response, gold) == {"right": countdown.reward(response, gold), "close": close}
