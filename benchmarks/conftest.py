"""Options of the benchmarks, the description of the machine for every record, and the tables at the end."""

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
    *("exgrpo", "torch", "triton", "numpy", "transformers", "deepspeed", "liger-kernel", "cut-cross-entropy", "verl"),
    *("trl", "quack-kernels", "nvidia-cutlass-dsl", "vllm"),
)
GROUPS = pytest.StashKey[Groups]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sizes", choices=tuple(BUDGET), default="small", help="full: also the sizes of real models.")
    parser.addoption("--rounds", type=int, default=5, help="Number of steps of trainers.")
    parser.addoption("--in-a-row", type=int, default=1, help="Consecutive calls of a head in each round.")
    parser.addoption("--minutes", type=float, default=math.inf, help="Start no group after this time.")


@pytest.fixture(scope="session")
def sizes(request: pytest.FixtureRequest) -> str:
    return request.config.getoption("sizes")


@pytest.fixture(scope="session")
def rounds(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("rounds")


@pytest.fixture(scope="session")
def in_a_row(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("in_a_row")


@pytest.fixture
def real_steps(benchmark: Any) -> None:
    """Skip a benchmark of real training steps without --benchmark-only or without the trainer's packages."""
    if benchmark.disabled:
        pytest.skip("it runs real training steps for minutes: only with --benchmark-only")
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("the trainer is not installed: pip install '.[train]'")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def groups(request: pytest.FixtureRequest) -> Groups:
    return request.config.stash[GROUPS]


def pytest_configure(config: pytest.Config) -> None:
    config.stash[GROUPS] = Groups(
        ours=f"exgrpo {default_backend()}", deadline=time.monotonic() + 60 * config.getoption("minutes")
    )
    if config.getoption("benchmark_sort", None) is not None:
        config.option.benchmark_sort = "median"
        config.option.benchmark_columns = ["median", "iqr", "min", "rounds"]


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict) -> None:
    """Record device, threads and versions, and remove host name and kernel release."""
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
    output_json["left_out"] = config.stash[GROUPS].left_out()


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print tables with the columns that pytest-benchmark's own table lacks."""
    console = Console(file=terminalreporter._tw._file, width=150)
    for table in tables(config.stash[GROUPS].rows):
        console.print(table)
