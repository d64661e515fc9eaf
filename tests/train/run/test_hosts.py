"""Runs on two hosts: the results of one, and hosts that die or are cut off."""

import re
import time

import pytest

from exgrpo.train.checkpoint.listing import survey
from tests.programs import wait_for
from tests.train import hosts
from tests.train.launch import MAIN, completed
from tests.train.run.test_run import SMALL, records, untimed

pytestmark = pytest.mark.skipif(hosts.missing() is not None, reason=str(hosts.missing()))

TIMEOUT = 1
"""Minutes for which a rank waits for another one."""
INSIDE = f'File "{MAIN}"'
"""In a traceback of the program; the launcher prints one of its own when a rank has failed."""


@pytest.fixture
def two():
    with hosts.Hosts(2) as made:
        yield made


@pytest.mark.long
def test_two_hosts_give_the_results_of_one(two, tmp_path):
    """With the defaults of a user."""
    first, second = two.torchrun(*SMALL, f"--output.folder={tmp_path / 'two'}")
    printed, _ = first.communicate(timeout=300)
    assert first.returncode == 0, printed
    assert second.wait(60) == 0, second.communicate()
    assert "on 2 x cpu" in printed
    completed(MAIN, *SMALL, f"--output.folder={tmp_path / 'one'}", ranks=2)
    assert untimed(tmp_path / "two" / "small") == untimed(tmp_path / "one" / "small")


def wait_for_a_checkpoint(folder, running):
    wait_for(lambda: folder.is_dir() and survey(folder)[0], of=running)


@pytest.mark.long
@pytest.mark.parametrize("lost", ["killed", "cut off"])
def test_a_host_that_is_gone_ends_the_run_in_time_and_one_host_goes_on(two, tmp_path, lost):
    """The other host says so in one line, leaves no process behind, and has lost no finished step."""
    long = [option for option in SMALL if not option.startswith("--steps")]
    options = (*long, "--checkpoint.every=1", f"--distributed.timeout_minutes={TIMEOUT}", f"--output.folder={tmp_path}")
    running = two.torchrun("--steps=200", *options)
    wait_for_a_checkpoint(tmp_path / "small", running)
    start = time.monotonic()
    if lost == "killed":
        two.kill(1)
    else:
        two.cut(1)
    printed, _ = running[0].communicate(timeout=240)
    # A rank notices a closed connection at once and a silent one after its time; then it gives its resources back.
    assert time.monotonic() - start < 60 * TIMEOUT + 60
    assert running[0].returncode != 0
    assert "another process of the run has ended or is not reached any more" in printed
    assert "go on with --resume auto" in printed
    assert INSIDE not in printed
    if lost == "cut off":
        running[1].communicate(timeout=240)
        assert running[1].returncode != 0
    assert two.processes(0) == []
    assert two.processes(1) == []
    (newest, *_), problems = survey(tmp_path / "small")
    assert problems == []
    steps = [record["step"] for record in records(tmp_path / "small")]
    assert newest.step >= max(steps) - 1
    completed(MAIN, "--resume", str(tmp_path / "small"), f"--steps={newest.step + 2}")


@pytest.mark.long
def test_the_hosts_that_are_left_go_on_by_themselves(two, tmp_path):
    """With the same questions, and without a step that was finished before."""
    long = [option for option in SMALL if not option.startswith("--steps")]
    options = (*long, "--checkpoint.every=1", "--resume=auto", f"--output.folder={tmp_path}")
    running = two.restarting("--steps=8", *options)
    wait_for_a_checkpoint(tmp_path / "small", running)
    two.kill(1)
    printed, _ = running[0].communicate(timeout=400)
    assert running[0].returncode == 0, printed
    assert "on 2 x cpu" in printed
    assert "on 1 x cpu" in printed
    assert INSIDE not in printed
    begun = re.search(r"going on with .* after step (\d+)", printed)
    assert begun
    assert int(begun[1]) >= 1
    assert [record["step"] for record in records(tmp_path / "small") if record["kind"] == "training"] == [*range(1, 9)]
    assert two.processes(0) == []
