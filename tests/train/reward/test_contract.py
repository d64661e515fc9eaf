"""What a reward may take and return: columns of the row, several answers in a call, named parts."""

import numpy as np
import pytest

from exgrpo.train.common.errors import DataError, RewardError
from exgrpo.train.reward.contract import worth
from exgrpo.train.reward.pool import Grader
from tests.train.reward.conftest import grade

REWARDS = """
import asyncio
import os
import time

from exgrpo.train.reward.contract import batched

def plain(response, gold):
    return 0.5

def row(response, gold, *, question, difficulty, bonus=0):
    return {"easy": 1, "hard": 2}[difficulty["level"]] * (response == question) + bonus

def whole_row(response, gold, **row):
    return len(row) if row["extra"] == [1, {"a": None}] else -1

def parts(response, gold):
    if response == "fails":
        raise KeyError("no")
    return {
        "none": {}, "text": {"right": "1", "form": 0}, "nan": {"right": float("nan"), "form": 0}, "number": 1.0,
        "other": {"right": 1.0}, "large": {"right": 9e5, "form": 0}, "key": {1: 2.0},
    }.get(response) or ({} if response == "none" else {"right": float(response == gold), "form": len(response)})

@batched(3)
def lists(responses, golds, *, weight):
    if "raise" in responses:
        raise ValueError("no")
    if "few" in responses:
        return [1.0]
    if "hang" in responses:
        time.sleep(60)
    return [len(responses) + 10 * w * (r == g) for r, g, w in zip(responses, golds, weight)]

class Together:
    def __init__(self):
        self.waiting = 0
        self.all_are_here = None

    async def __call__(self, response, gold, *, place=0):
        if response == "raise":
            raise SystemExit(3)
        if response == "hang":
            await asyncio.sleep(60)
        if response == "block":
            time.sleep(60)
        if response == "own":
            raise TimeoutError("of the judge")
        self.all_are_here = self.all_are_here or asyncio.Event()
        self.waiting += 1
        if self.waiting == int(gold):
            self.all_are_here.set()
        await self.all_are_here.wait()
        return float(response) + place

together = Together()

@batched(2)
async def both(responses, golds):
    return [1.0] * len(responses)
"""
NAMES = ("plain", "row", "whole_row", "parts", "lists", "together")


@pytest.fixture(scope="module")
def grader(mine):
    names = [f"{mine}:{name}" for name in NAMES]
    with Grader(*names, workers=1, time_limit=60, concurrency=4, parts={"form": 0.25}) as grader:
        yield grader


@pytest.fixture(scope="module")
def impatient(mine):
    with Grader(f"{mine}:lists", f"{mine}:together", workers=1, time_limit=1.0, concurrency=4) as grader:
        yield grader


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("both", "is asynchronous and batched: leave out one"),
        ("batched", "must take .response, gold., and columns of the row as keyword-only arguments"),
    ],
)
def test_a_reward_that_cannot_be_called_is_refused(mine, name, message):
    with pytest.raises(RewardError, match=message):
        Grader(f"{mine}:{name}", workers=1, time_limit=1)


def test_a_call_has_the_columns_of_its_row(grader, mine):
    easy, hard = ({"question": "x", "difficulty": {"level": level}, "unused": open} for level in ("easy", "hard"))
    grades = grade(
        grader, f"{mine}:row", [("x", "", easy), ("x", "", hard), ("y", "", hard), ("x", "", hard | {"bonus": 5})]
    )
    assert grades.reward == (1.0, 2.0, 0.0, 7.0)
    row = {"extra": [1, {"a": None}], "b": 2, "gold": "not by name"}
    assert grade(grader, f"{mine}:whole_row", [("x", "", row)]).reward == (2.0,)
    with pytest.raises(DataError, match="the row of 'q' has no column 'difficulty', which the reward .*mine.py:row'"):
        grade(grader, f"{mine}:row", [("x", "", {"question": "x"})])


def test_the_reward_is_the_weighted_sum_of_its_parts(grader, mine):
    grades = grade(grader, f"{mine}:parts", [("abcd", "abcd"), ("fails", ""), ("ab", "")])
    assert [failure.response for failure in grades.failures] == ["fails"]
    assert grades.reward == (1 + 0.25 * 4, 0.0, 0.25 * 2)
    assert grades.parts == ({"right": 1.0, "form": 4.0}, {}, {"right": 0.0, "form": 2.0})
    assert grade(grader, f"{mine}:plain", [("", "")]).parts == ()


@pytest.mark.parametrize(
    ("response", "message"),
    [
        ("none", "returned no parts for an answer to 'q': a reward is a finite number"),
        ("text", r"returned '1' \(str\) as its part 'right' for an answer"),
        ("nan", r"returned nan \(float\) as its part 'right' for an answer"),
        ("key", r"returned 2.0 \(float\) as its part 1 for an answer"),
        ("number", "returned no parts for an answer to 'q': it returned 'form, right' before, and a reward has the"),
        ("other", "returned 'right' for an answer to 'q': it returned 'form, right' before"),
    ],
)
def test_parts_that_are_none(grader, mine, response, message):
    grade(grader, f"{mine}:parts", [("a", "")])
    with pytest.raises(RewardError, match=message):
        grade(grader, f"{mine}:parts", [(response, "")])


@pytest.mark.parametrize(
    ("weights", "response", "message"),
    [
        ({"from": 2.0}, "a", "reward.parts has a weight of 'from', and the parts of the rewards are form, right"),
        ({"right": 2.0}, "large", r"returned parts with the weighted sum 1.8e\+06 for an answer"),
    ],
)
def test_weights_that_cannot_be(mine, weights, response, message):
    with (
        Grader(f"{mine}:parts", workers=1, time_limit=5, parts=weights) as grader,
        pytest.raises(RewardError, match=message),
    ):
        grade(grader, f"{mine}:parts", [(response, "")])


def test_a_batched_reward_gets_lists(grader, mine):
    answers = [(str(i), str(i % 2), {"weight": i}) for i in range(4)]
    # Three in the first call, one in the last; only 0 and 1 are right.
    assert grade(grader, f"{mine}:lists", answers).reward == (3.0, 3.0 + 10, 3.0, 1.0)
    others = [("a", "", {"weight": 0}), ("b", "", {"weight": 0}), ("c", "", {"weight": 0})]
    bad = [*others, ("raise", "", {"weight": 0}), ("d", "", {"weight": 0})]
    assert (found := grade(grader, f"{mine}:lists", bad)).reward == (3.0, 3.0, 3.0, 0.0, 0.0)
    assert (found.failed, found.timed_out) == (2, 0)
    with pytest.raises(RewardError, match="returned 1 rewards for 2 answers for an answer to 'q': a batched reward"):
        grade(grader, f"{mine}:lists", [*others[:1], ("few", "", {"weight": 0})])


def test_a_batch_that_hangs_costs_its_own_answers(impatient, mine):
    answers = [(response, "", {"weight": 0}) for response in ("hang", "a", "b", "c")]
    found = grade(impatient, f"{mine}:lists", answers)
    assert (found.reward, found.timed_out) == ((0.0, 0.0, 0.0, 1.0), 3)


def test_asynchronous_calls_are_in_flight_together(grader, mine):
    """Each of them waits until all four have begun."""
    answers = [(str(i), "4", {"place": 10 * i}) for i in range(4)]
    assert grade(grader, f"{mine}:together", answers).reward == (0.0, 11.0, 22.0, 33.0)


def test_an_asynchronous_call_that_fails_or_takes_too_long_costs_only_its_answer(impatient, mine):
    found = grade(impatient, f"{mine}:together", [("hang", "", {}), ("raise", "", {}), ("own", "", {}), ("8", "1", {})])
    assert (found.reward, found.timed_out, found.failed) == ((0.0, 0.0, 0.0, 8.0), 1, 2)


def test_what_blocks_the_process_is_killed(impatient, mine):
    found = grade(impatient, f"{mine}:together", [*(("block", str(i), {}) for i in range(4)), ("2", "1", {})])
    assert (found.reward, found.timed_out) == ((0.0,) * 4 + (2.0,), 4)


def test_what_numpy_compares_is_a_reward():
    assert [worth(np.isclose(1, other), {}).reward for other in (1, 2)] == [1.0, 0.0]
    assert worth(np.isclose([1, 2], 1), {}).misuse
