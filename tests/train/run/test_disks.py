"""Disks that are full at random moments of a run, and disks that cannot be written at its start."""

import os
import random
import re
import shutil
import subprocess

import pytest

from exgrpo.train.checkpoint.listing import survey
from tests.train.launch import MAIN, completed, launch
from tests.train.run.test_run import SMALL, untimed

OPTIONS = (*SMALL, "--checkpoint.every=1", "--preflight=off", "--resume=auto")
MIB = 2**20

pytestmark = pytest.mark.long


@pytest.fixture
def disk(tmp_path):
    """The folder of a file system of 64 MiB, which only root can mount."""
    root = tmp_path / "disk"
    root.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(root)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted: {mounted.stderr.strip()}")
    yield root
    subprocess.run(["umount", "--lazy", str(root)], check=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The metrics of a run that has all it needs, and the bytes that it leaves."""
    folder = tmp_path_factory.mktemp("whole")
    completed(MAIN, *OPTIONS, f"--output.folder={folder}")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return untimed(folder / "small"), size


def check_refused(folder, reason):
    """That a run ends with one line that names a file there and the reason."""
    done = launch(MAIN, *OPTIONS, f"--output.folder={folder}")
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if "error: " in line]
    assert len(errors) == 1, done.stderr
    assert str(folder) in errors[0]
    assert re.search(reason, errors[0])
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("seed", range(3))
def test_a_run_goes_on_with_what_it_had_saved_to_the_end_of_one_that_nothing_has_stopped(disk, whole, seed):
    metrics, size = whole
    free = round(random.Random(seed).uniform(0.02, 0.9) * size) + MIB // 4
    with (disk / "filled").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(disk).free - free)
    check_refused(disk, "No space left on device|GB are free.* Free space there and start again with --resume auto")
    found, problems = survey(disk / "small")
    assert problems == []
    (disk / "filled").unlink()
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    check_refused(disk, "cannot be written")
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    done = completed(MAIN, *OPTIONS, f"--output.folder={disk}")
    assert not found or f"after step {found[0].step}" in done.stdout
    assert untimed(disk / "small") == metrics
