"""The number of threads that a process computes with, and where it comes from."""

import os
import subprocess
import sys
import time
from statistics import median

import psutil
import pytest

from exgrpo.train.common import threads as module
from exgrpo.train.common.threads import choose, look, quota
from tests.train.launch import launch

FOUR = set(range(4))
SPIN = "import os\nos.sched_setaffinity(0, {%d})\nwhile True: pass"


@pytest.fixture
def unnamed(monkeypatch, tmp_path):
    """No variable, no control group and no load says anything."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(module, "quota", lambda: None)
    monkeypatch.setattr(module, "look", lambda _: 0.0)
    return monkeypatch


@pytest.mark.parametrize(
    ("processes", "others", "expected"),
    [
        ([FOUR], 0.0, 4),
        ([FOUR], 0.4, 4),
        ([FOUR], 0.6, 3),
        ([FOUR], 1.9, 2),
        ([FOUR], 4.0, 1),  # at least one
        ([FOUR, FOUR], 0.0, 2),
        ([FOUR, FOUR], 1.0, 1),
        ([FOUR] * 8, 0.0, 1),
        ([{0, 1}, {2, 3}], 0.0, 2),  # a launcher has given each its own
    ],
)
def test_free_processors_are_shared_by_the_processes_that_may_use_them(unnamed, processes, others, expected):
    unnamed.setattr(module, "look", lambda _: others)
    assert choose(None, None, processes).count == expected


def test_what_is_asked_for_is_taken_whatever_is_free(unnamed):
    of_run = [{0, 1}]
    unnamed.setenv("OMP_NUM_THREADS", "3,2")
    assert str(choose(None, None, of_run)) == "3 threads in each process: OMP_NUM_THREADS"
    assert str(choose(5, None, of_run)) == "5 threads in each process: distributed.threads"
    for nothing in ("", "0", "-1", "many"):
        unnamed.setenv("OMP_NUM_THREADS", nothing)
        assert choose(None, None, of_run).count == 2


def test_a_run_that_goes_on_has_its_number_or_says_that_it_has_another(unnamed):
    of_run = [FOUR]
    assert choose(None, 3, of_run).count == 3
    moved = choose(None, 16, of_run)  # to a machine with fewer processors
    assert moved.count == 4
    assert "the run began with 16" in moved.why
    asked = choose(2, 3, of_run)
    assert asked.count == 2
    assert "the run began with 3" in asked.why
    assert "began" not in choose(3, 3, of_run).why


def test_the_quota_of_a_container_limits_the_number(unnamed):
    for limit, expected in ((0.5, 1), (2.5, 2), (9.0, 4)):
        unnamed.setattr(module, "quota", lambda limit=limit: limit)
        found = choose(None, None, [FOUR])
        assert found.count == expected
        assert ("with a quota of" in found.why) == (limit < 4)


def test_quotas_of_a_control_group_and_of_the_groups_above(tmp_path):
    membership = tmp_path / "membership"
    for name, text in {
        "two/cpu.max": "max 100000",
        "two/outer/cpu.max": "150000 100000",
        "two/outer/inner/cpu.max": "400000 100000",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    for root, groups, expected in (
        ("two", "0::/outer/inner\n", 1.5),
        ("two", "0::/\n", None),
        ("two", "0::/of/the/host/which/is/not/seen/here\n", None),
        ("two", "0::/outer/gone\n", 1.5),
        ("two", "1:cpu:/outer\n", None),  # of version 1
        ("nowhere", "0::/\n", None),
    ):
        membership.write_text(groups)
        assert quota(tmp_path / root, membership) == expected
    assert quota(tmp_path, tmp_path / "no such file") is None


def test_a_program_that_spins_is_a_load_of_its_processor():
    processor = min(os.sched_getaffinity(0))
    process = subprocess.Popen([sys.executable, "-c", SPIN % processor])
    try:
        there = psutil.Process(process.pid)
        while there.cpu_times().user < 0.1:
            time.sleep(0.05)
        assert median(look({processor}) for _ in range(5)) > 0.5  # whoever else is there, the processor is busy
    finally:
        process.kill()
        process.wait()
    assert look(set()) == 0.0


def test_every_process_computes_with_what_is_asked_for(tmp_path, monkeypatch):
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys, torch\nfrom exgrpo.train.common.distributed import start\n"
        "world = start(5, int(sys.argv[-1]) or None)\n"
        "same = world.threads.count == torch.get_num_threads()\n"
        "os.write(1, f'{same} {torch.get_num_threads()} {world.threads.why}\\n'.encode())  # whole lines of each rank\n"
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    for asked, expected in (("0", "True 3 OMP_NUM_THREADS"), ("4", "True 4 distributed.threads")):
        done = launch(program, asked, ranks=2)
        assert done.stdout.splitlines() == [expected] * 2, done.stderr
