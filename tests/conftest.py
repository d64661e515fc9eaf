"""Fixtures and hooks for all tests."""

import gc
import os
import signal
from pathlib import Path

# Before torch is imported; programs that tests start have it, too. Several files are tested at a time, and a run's bits
# depend on its number of threads, which would depend on what else the machine does.
os.environ["OMP_NUM_THREADS"] = "1"
# Servers of the tests are on this machine, whatever proxies there are; the name in small letters is read first.
os.environ["no_proxy"] = f"localhost,127.0.0.1,{os.environ.get('no_proxy') or os.environ.get('NO_PROXY', '')}"
os.environ.pop("FORCE_COLOR", None)  # rich would take every file for a terminal
os.environ.setdefault("EXGRPO_SERVER_TOKEN", "of-the-tests-alone")  # no rollout server makes one in the user's home

import pytest
import torch
from hypothesis import settings

from tests.train import warm

# A busy machine is no failure. What is drawn is the same in every run but those with --long: a change is not held up by
# what it did not touch, and new draws, and more of them, are tried every night.
settings.register_profile("same", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("new", deadline=None, max_examples=200)

SLOW = (
    *("benchmarks", "docs", "examples", "integrations", "test_extras.py", "test_packaging.py"),
    *("train/reward/test_grading.py", "train/rollout/server/test_engine.py", "tools/report"),
    *("tools/test_", "train/data/test_gym.py", "train/data/test_tasks.py"),
    *(f"train/replay/test_{name}.py" for name in ("memory", "rules_of_memory", "sampling")),
    *(f"train/run/test_{name}" for name in ("clock", "disks", "hosts")),
    *(f"kernels/test_{name}.py" for name in ("autograd", "backend_self_test", "backend_choice", "combinations")),
    *(f"kernels/test_{name}.py" for name in ("compiled", "cpu_fused", "cpu_passes", "cpu_sanitized", "cuda_compiles")),
    *(f"kernels/test_{name}.py" for name in ("cuda_fused", "extension", "memory")),
    *(f"kernels/test_{name}.py" for name in ("threads", "vocab_group")),
)
"""Files and folders that take more than about five seconds each, besides those that start programs."""


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="run those tests, too, that take some minutes each")


def pytest_configure(config):
    # A shell without jobs starts what is in its background with interrupts ignored, and programs would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    settings.load_profile("new" if config.getoption("--long") else "same")
    if not hasattr(config, "workerinput"):  # of a process that this one starts
        warm.begin()


def pytest_collection():
    """Look for garbage only among what tests make: passing over all modules takes a second each time."""
    gc.disable()


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(config, items):
    """Files whose tests start programs come first: they take minutes, and one that came last would run alone."""
    items.sort(key=lambda item: not starts_programs(item))
    if not config.getoption("--long"):
        for item in items:
            if "long" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="it takes some minutes: pytest --long runs it"))
    here = Path(__file__).parent
    for item in items:
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker(pytest.mark.drawn)
        path = item.path.relative_to(here).as_posix()
        if starts_programs(item) or path.startswith(SLOW):
            item.add_marker(pytest.mark.slow)


def starts_programs(item):
    return any(hasattr(item.module, name) for name in ("launch", "launch_module", "completed"))


@pytest.fixture(autouse=True)
def one_environment():
    """`map` of datasets in several processes leaves a copy in the place of os.environ, and rich reads the first one."""
    before = os.environ
    yield
    os.environ = before  # noqa: B003  # the object itself


@pytest.fixture
def one_thread():
    """Use one thread, which is faster for tiny models."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
