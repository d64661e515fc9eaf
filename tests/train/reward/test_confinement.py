"""What grading processes cannot take from the machine, whatever an answer or a reward does."""

import os
import socket
import subprocess
import sys
import time

import pytest

from exgrpo.train.common.errors import GraderError, RewardError
from exgrpo.train.reward.names import is_own
from exgrpo.train.reward.pool import Grader
from tests.train.reward.conftest import grade

REWARDS = """
import os, resource, socket
kept = []

def takes(response, gold):
    return float(len(bytearray(int(response))) > 0)

def swallows(response, gold):
    try:
        return float(len(bytearray(int(response))) > 0)
    except MemoryError:
        return 0.25

def keeps(response, gold):
    kept.append(bytearray(100_000_000))
    return 1.0

def reaches(response, gold):
    try:
        socket.create_connection(("127.0.0.1", int(response)), 10).close()
    except OSError:
        return 0.0
    return 1.0

def says_much(response, gold):
    return {str(number).zfill(int(gold)): 1.0 for number in range(int(response))}

def limits(response, gold):
    with open(gold, "wb") as file:
        file.truncate(2**30)
        try:
            file.truncate(2**30 + 1)
        except OSError as error:
            longer = error.errno
    os.unlink(gold)
    core, _ = resource.getrlimit(resource.RLIMIT_CORE)
    return {"core": core, "longer": longer, "user": os.getuid(), "group": os.getgid()}
"""

WITHOUT_NETWORK = "import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare(0x50000000) != 0)"
"""The system lets a process leave the network: asked of the system in a process of its own."""


@pytest.fixture(scope="module")
def can_leave():
    return subprocess.run([sys.executable, "-c", WITHOUT_NETWORK], check=False).returncode == 0


def test_whose_a_reward_is(mine):
    assert is_own(f"{mine}:takes")
    assert is_own("exgrpo_rewards:mine")
    assert not any(
        map(is_own, ("math", "exgrpo.train.reward.grading:math_form", "exgrpo.train.data.tasks.countdown:reward"))
    )


def test_memory_is_bounded_in_a_call_and_what_is_kept_of_calls_does_not_pile_up(mine):
    """The bound of a call is what it takes beyond what is there, not what all of them take.

    Of three answers that keep 100 MB each the third one ends the process, which may keep 0.25 GiB.
    """
    takes, swallows, keeps = (f"{mine}:{name}" for name in ("takes", "swallows", "keeps"))

    def texts(*sizes):
        return [(str(size), "") for size in sizes]

    with Grader(takes, swallows, keeps, workers=1, time_limit=60, memory_gib=0.25) as grader:
        taken = grade(grader, takes, texts(1_000_000, 400_000_000, 2_000_000))
        swallowed = grade(grader, swallows, texts(*(200_000_000 + i for i in range(4)), 400_000_000))
        kept = grade(grader, keeps, texts(*range(9)))
    assert taken.failures[0].cause == "it needs more memory than the 0.25 GiB of reward.memory_gib"
    assert (taken.reward, taken.timed_out, taken.failed) == ((1.0, 0.0, 1.0), 0, 1)
    assert (swallowed.reward, swallowed.failed) == ((1.0,) * 4 + (0.25,), 0)
    (failure,) = kept.failures
    assert (failure.count, kept.failed, kept.reward) == (3, 3, (1.0, 1.0, 0.0) * 3)
    assert "died (it kept more memory than reward.memory_gib of the answers so far" in failure.cause


def test_what_a_process_sends_back_is_short(mine):
    with Grader(f"{mine}:says_much", workers=1, time_limit=60) as grader:
        assert grader.grade([("100", "200")]).reward == (100.0,)
        with pytest.raises(RewardError, match="returned more than 100 parts"):
            grader.grade([("101", "3")])
        with pytest.raises(RewardError, match="returned a part with a name of 201 characters"):
            grader.grade([("2", "201")])


def test_an_answer_that_makes_sympy_take_memory_is_worth_0():
    """Without a bound these take some 100 MB a second."""
    answers = ("(x+y+z+w)^{300}", "(x+y)^{100000}", "1+x^2")
    with Grader("math_no_think", workers=1, time_limit=120, memory_gib=0.1) as grader:
        grades = grader.grade([(rf"\boxed{{{answer}}}", "x^2+1") for answer in answers])
    assert (grades.reward, grades.timed_out) == ((0.0, 0.0, 1.0), 0)


def test_files_are_short_no_memory_is_written_and_the_user_is_the_same(mine, tmp_path, can_leave):
    for network in (True, False) if can_leave else (True,):
        with Grader(f"{mine}:limits", workers=1, time_limit=60, network=network) as grader:
            (parts,) = grader.grade([("", str(tmp_path / "file"))]).parts
        assert parts == {"core": 0, "longer": 27, "user": os.getuid(), "group": os.getgid()}  # 27: EFBIG


@pytest.fixture
def listening():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield str(server.getsockname()[1])


def test_own_rewards_reach_the_network_unless_they_are_not_to(mine, listening, can_leave):
    with Grader(f"{mine}:reaches", "math", workers=1, time_limit=60) as grader:
        assert grader.grade([(listening, "")]).reward == (1.0,)
        assert not grader.offline
    if not can_leave:
        with pytest.raises(GraderError, match="reward.network=false: this system lets no process leave the network"):
            Grader(f"{mine}:reaches", workers=1, time_limit=60, network=False)
        return
    with Grader(f"{mine}:reaches", workers=1, time_limit=60, network=False) as grader:
        assert grader.grade([(listening, "")]).reward == (0.0,)
        assert grader.offline


def test_rewards_of_the_package_have_no_network_where_the_system_allows(can_leave):
    with Grader("math", "exgrpo.train.data.tasks.countdown:reward", workers=2, time_limit=60) as grader:
        workers, own = grader._pool._pool_manager.worker_manager.workers, os.readlink("/proc/self/ns/net")
        deadline = time.monotonic() + 60  # each process leaves it when it begins, one after the other
        while own in (networks := {os.readlink(f"/proc/{pid}/ns/net") for pid in workers}) and can_leave:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert grader.offline == can_leave
    assert networks
    assert (os.readlink("/proc/self/ns/net") in networks) != can_leave
