"""Disks that are full, or fail and are read only from then on, at random moments of a run."""

import random
import re
import time

import pytest

from exgrpo.train.checkpoint.listing import survey
from tests.train import disks
from tests.train.disks import MIB, Disk
from tests.train.launch import MAIN, Ranks, launch
from tests.train.run.test_run import SMALL, untimed

OPTIONS = (*SMALL, "--checkpoint.every=1", "--preflight=off", "--resume=auto")
SEEDS = range(3)

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def disk_or_skip(tmp_path_factory):
    if reason := disks.missing(tmp_path_factory.mktemp("probe")):
        pytest.skip(reason)


@pytest.fixture
def disk(disk_or_skip, tmp_path):
    with Disk(tmp_path, 64) as mounted:
        yield mounted


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The metrics of a run that has all it needs, its seconds and the bytes that it leaves."""
    folder = tmp_path_factory.mktemp("whole")
    begun = time.monotonic()
    done = launch(MAIN, *OPTIONS, f"--output.folder={folder}")
    assert done.returncode == 0, done.stderr
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return untimed(folder / "small"), time.monotonic() - begun, size


def check_told(done, folder, reason=""):
    """That the end was one line that names a file there and the reason."""
    errors = [line for line in done.stderr.splitlines() if "error: " in line]
    assert len(errors) == 1, done.stderr
    assert str(folder) in errors[0]
    assert re.search(reason, errors[0])
    assert "Traceback" not in done.stderr


def check_goes_on(folder, newest, whole):
    """That a run continues with what it had saved, to the end of one that nothing has stopped."""
    done = launch(MAIN, *OPTIONS, f"--output.folder={folder}")
    assert done.returncode == 0, done.stderr
    assert newest is None or f"after step {newest}" in done.stdout
    assert untimed(folder / "small") == whole


def newest_step(run):
    found, problems = survey(run)
    assert problems == []
    return found[0].step if found else None


@pytest.mark.parametrize("seed", SEEDS)
def test_a_disk_that_is_full(disk, whole, seed):
    metrics, _, size = whole
    disk.leave(round(random.Random(seed).uniform(0.02, 0.9) * size) + MIB // 4)
    done = launch(MAIN, *OPTIONS, f"--output.folder={disk.root}")
    assert done.returncode == 2, done.stderr
    check_told(
        done, disk.root, "No space left on device|GB are free.* Free space there and start again with --resume auto"
    )
    newest = newest_step(disk.root / "small")
    disk.make_room()
    check_goes_on(disk.root, newest, metrics)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_disk_that_fails(disk, whole, seed):
    metrics, seconds, _ = whole
    running = Ranks(MAIN, *OPTIONS, f"--output.folder={disk.root}")
    deadline = time.monotonic() + 120
    while not (disk.root / "small" / "checkpoints").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(random.Random(seed).uniform(0, 0.1) * seconds)
    assert running.running()
    disk.fail()
    done = running.finish()
    assert done.returncode == 2, done.stderr
    check_told(done, disk.root, "Read-only file system|Input/output error")
    again = launch(MAIN, *OPTIONS, f"--output.folder={disk.root}")
    assert again.returncode == 2
    check_told(again, disk.root)
    disk.repair()
    check_goes_on(disk.root, newest_step(disk.root / "small"), metrics)
