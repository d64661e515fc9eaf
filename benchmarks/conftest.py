"""Options, the machine that is written into every record, and the table at the end."""

import importlib.util
import math
import platform
import time
from importlib import metadata
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks.heads import default_backend
from benchmarks.render import tables
from benchmarks.timing import BUDGET, Groups

VERSIONS = (
    "exgrpo",
    "torch",
    "triton",
    "numpy",
    "transformers",
    "deepspeed",
    "liger-kernel",
    "cut-cross-entropy",
    "verl",
    "trl",
    "quack-kernels",
    "nvidia-cutlass-dsl",
    "vllm",
)


GROUPS = pytest.StashKey[Groups]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The sizes of the heads, and the time to spend."""
    parser.addoption("--sizes", choices=tuple(BUDGET), default="small", help="full: models' real sizes as well.")
    parser.addoption("--rounds", type=int, default=5, help="Steps of trainers.")
    parser.addoption("--in-a-row", type=int, default=1, help="Calls of a head one after another in each round.")
    parser.addoption("--minutes", type=float, default=math.inf, help="Begin no group after so many minutes.")


@pytest.fixture(scope="session")
def sizes(request: pytest.FixtureRequest) -> str:
    """What --sizes says."""
    return request.config.getoption("sizes")


@pytest.fixture(scope="session")
def rounds(request: pytest.FixtureRequest) -> int:
    """What --rounds says."""
    return request.config.getoption("rounds")


@pytest.fixture(scope="session")
def in_a_row(request: pytest.FixtureRequest) -> int:
    """What --in-a-row says."""
    return request.config.getoption("in_a_row")


@pytest.fixture
def real_steps(benchmark: Any) -> None:
    """Skip a benchmark that takes real steps of the trainer if none can be taken, or without --benchmark-only."""
    if benchmark.disabled:
        pytest.skip("it takes real steps, for minutes: only with --benchmark-only")
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("the trainer is not installed: pip install '.[train]'")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """A GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def groups(request: pytest.FixtureRequest) -> Groups:
    """The groups measured so far."""
    return request.config.stash[GROUPS]


def pytest_configure(config: pytest.Config) -> None:
    """Rows in order of their medians; what they lack is in the tables of ours."""
    config.stash[GROUPS] = Groups(
        ours=f"exgrpo {default_backend()}", deadline=time.monotonic() + 60 * config.getoption("minutes")
    )
    if config.getoption("benchmark_sort", None) is not None:
        config.option.benchmark_sort = "median"
        config.option.benchmark_columns = ["median", "iqr", "min", "rounds"]


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict) -> None:
    """Device, threads and versions; the host's name and kernel are nobody's business."""
    for name in ("node", "release"):
        machine_info.pop(name, None)
    machine_info["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    machine_info["threads"] = torch.get_num_threads()
    machine_info["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
    machine_info["python"] = platform.python_version()
    machine_info["cuda"] = torch.version.cuda
    versions = {}
    for name in VERSIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    machine_info["versions"] = versions


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_json(config: pytest.Config, output_json: dict) -> None:
    """Rows that did not run are named with the reason."""
    output_json["left_out"] = config.stash[GROUPS].left_out()


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """What pytest-benchmark's table has no columns for."""
    console = Console(file=terminalreporter._tw._file, width=150)
    for table in tables(config.stash[GROUPS].rows):
        console.print(table)
