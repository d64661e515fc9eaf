"""Several rewards in one grader, and the keys by which answers of one solution are known."""

from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exgrpo.train.common.distributed import ALONE
from exgrpo.train.common.errors import RewardError
from exgrpo.train.config.options import RewardConfig
from exgrpo.train.reward.form import Graded, tell
from exgrpo.train.reward.pool import Grader
from exgrpo.train.reward.worker import hashed
from tests.train.reward.conftest import grade

REWARDS = """
def total(response, gold):
    if response == "fails":
        raise KeyError("no")
    return float(eval(response) == int(gold))

def total_key(response, gold):
    if response == "1+2":
        return ""
    if response == "wrong type":
        return 3
    return "+".join(sorted(response.replace(" ", "").split("+")))

def total_form(response, gold):
    return float("+" in response)

def anything(response, gold):
    return 0.25

def lasting(response, gold):
    import time
    time.sleep(60)

def misused(response, gold):
    return 1.0

def misused_key(response, gold):
    return 3

def failing(response, gold):
    return 1.0

def failing_key(response, gold):
    raise ValueError("no key")
"""


@pytest.fixture(scope="module")
def grader(mine):
    own = (f"{mine}:{name}" for name in ("total", "anything", "misused"))
    with Grader("math", "math_no_think", *own, workers=1, time_limit=30) as grader:
        yield grader


def test_each_answer_is_graded_by_the_reward_that_is_named(grader, mine):
    total, thought = f"{mine}:total", "<think>1+3</think>4"
    answers = [("1+3", "4", total), ("1+3", "5", total), ("1+3", "4", "math"), (thought, "4", "math")]
    answers += [("1+3", "4", f"{mine}:anything"), (thought, "4", None)]
    grading = grader.begin()
    for response, gold, reward in answers:
        grading.add(response, gold, reward=reward)
    assert grading.finish().reward == (1.0, 0.0, 0.0, 1.0, 0.25, 1.0)


def test_a_message_names_the_reward_at_fault(grader, mine):
    grades = grade(grader, f"{mine}:total", [("fails", "1")])
    assert grades.key == (0,)
    assert "mine.py:total' failed on an answer" in str(grades.failures[0])
    message = r"mine.py:misused' returned the key 3 \(int\) for an answer to 'q': a key is a text"
    with pytest.raises(RewardError, match=message):
        grade(grader, f"{mine}:misused", [("1", "1")])


def test_answers_that_differ_in_form_only_have_one_key(grader, mine):
    pairs = [("1+3", "4"), ("3 + 1", "4"), ("2+2", "4"), ("1+3", "9"), ("1+2", "3")]
    keys = grade(grader, f"{mine}:total", pairs).key
    assert keys == (hashed("1+3"), hashed("1+3"), hashed("2+2"), hashed("1+3"), 0)


def test_without_a_key_function_the_key_is_of_the_part_that_decides(grader, mine):
    answers = ["<think>a</think>so \\boxed{4}", "<think>b</think>it is \\boxed{4}.", "\\boxed{4}", "</think>\\boxed{5}"]
    first, second, none, other = grade(grader, "math", [(answer, "4") for answer in answers]).key
    assert first == second != other
    assert none == 0 not in (first, other)
    keys = grade(grader, f"{mine}:anything", [(response, "") for response in (" a\n", "a", "b", " \n")]).key
    assert keys == (hashed("a"), hashed("a"), hashed("b"), 0)


def test_what_takes_too_long_or_fails_has_no_key(mine):
    with Grader(f"{mine}:lasting", f"{mine}:failing", workers=1, time_limit=0.5) as grader:
        late, failed = (grade(grader, f"{mine}:{name}", [("a", "a")]) for name in ("lasting", "failing"))
    assert (late.reward, late.key, late.timed_out, late.failed) == ((0.0,), (0,), 1, 0)
    assert (failed.reward, failed.key, failed.timed_out, failed.failed) == ((0.0,), (0,), 0, 1)
    assert "took longer than reward.time_limit (0.5 s)" in late.failures[0].cause
    assert "no key" in failed.failures[0].cause


@given(st.text(min_size=1))
def test_a_key_is_63_bits_of_a_hash_and_never_0(text):
    top = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
    assert 0 < hashed(text) < 2**63
    assert hashed(text) == top // 2


def test_forms_are_told_by_the_reward_of_each_answer(mine):
    answers = [Graded("1+1", "2", f"{mine}:total"), Graded("2", "2", f"{mine}:total")]
    answers += [Graded("2", "2", f"{mine}:anything"), Graded("\\boxed{2}", "2", "math_no_think")]
    config = RewardConfig(workers=1, time_limit=30)
    assert tell("form", config, answers, ALONE) == [True, False, None, True]
    assert tell("found", config, answers[:3], ALONE) == [None] * 3
    assert tell("form", config, [], ALONE) == []
