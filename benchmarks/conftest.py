"""Options of the benchmarks, the description of the machine for every record, progress, and the tables at the end."""

import importlib.util
import logging
import math
import os
import platform
import re
import time
from argparse import ArgumentTypeError, Namespace
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks.heads import default_backend
from benchmarks.render import RESULTS, tables
from benchmarks.timing import LOG, Budget, Groups

VERSIONS = (
    *("exgrpo", "torch", "triton", "numpy", "transformers", "deepspeed", "liger-kernel", "cut-cross-entropy", "verl"),
    *("trl", "nvidia-cutlass-dsl", "vllm"),
)
GROUPS = pytest.StashKey[Groups]()
QUICK = ("test_head.py", "test_training_step.py")
"""Files that run by default; the others if they are named, or with `--sizes full`."""
BUDGETS = {"tiny": Budget(0.0), "small": Budget(4.0, least=3, patience=3.0), "full": Budget(20.0)}
"""By `--sizes`, on a CPU."""
GPU_SHARE = 0.25  # of the seconds on a GPU, whose calls are shorter and steadier
SIZES = "small: in four minutes on two cores; full: all files, operations, dtypes, real models; tiny: to try them out."
SHAPE = (
    "A head of your own for test_head.py, by every row that can run: tokens, width, vocabulary, and float32, bfloat16"
    " (the default) or float16; several times for several heads."
)


def shape_of(words: str) -> tuple[Any, ...]:
    """Parse T,D,V or T,D,V,DTYPE."""
    found = re.fullmatch(r"([1-9]\d*),([1-9]\d*),([1-9]\d*)(?:,(float32|bfloat16|float16))?", words)
    if found is None:
        raise ArgumentTypeError(f"{words!r} is no head, such as 512,896,32000,float32")
    *sizes, dtype = found.groups()
    return *map(int, sizes), getattr(torch, dtype or "bfloat16")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sizes", choices=tuple(BUDGETS), default="small", help=SIZES)
    parser.addoption("--shape", action="append", type=shape_of, metavar="T,D,V[,DTYPE]", help=SHAPE)
    parser.addoption("--rounds", type=int, default=3, help="Number of steps of trainers.")
    parser.addoption("--in-a-row", type=int, default=1, help="Consecutive calls of a head in each round.")
    parser.addoption("--minutes", type=float, default=math.inf, help="Start no group after this time.")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    name = collection_path.name
    named = any(name in argument for argument in config.args)
    left_out = name.startswith("test_") and name not in QUICK and not named
    return True if left_out and config.getoption("sizes") == "small" else None


@pytest.fixture(scope="session")
def options(request: pytest.FixtureRequest) -> Namespace:
    """Return the values of `pytest_addoption`."""
    return request.config.option


@pytest.fixture(autouse=True)
def timed(benchmark: Any) -> None:
    """Skip benchmarks that would not be timed."""
    if benchmark.disabled:
        pytest.skip("timings alone are measured here: run it without --benchmark-disable and without pytest-xdist")


@pytest.fixture
def real_steps() -> None:
    """Skip a benchmark of real training steps without the trainer's packages."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("the trainer is not installed: pip install '.[train]'")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def budget(options: Namespace, device: torch.device) -> Budget:
    """Return the budget of a group of heads."""
    found, share = BUDGETS[options.sizes], GPU_SHARE if device.type == "cuda" else 1.0
    return replace(found, seconds=share * found.seconds, in_a_row=options.in_a_row)


@pytest.fixture(scope="session")
def groups(request: pytest.FixtureRequest) -> Groups:
    return request.config.stash[GROUPS]


def pytest_configure(config: pytest.Config) -> None:
    deadline = time.monotonic() + 60 * config.getoption("minutes")
    config.stash[GROUPS] = Groups(f"exgrpo {default_backend()}", deadline)
    progress = Progress(config)
    LOG.addHandler(progress)
    LOG.setLevel(logging.INFO)
    config.add_cleanup(lambda: LOG.removeHandler(progress))
    config.option.reportchars = "fE"  # the tables name the rows that did not run
    config.option.disable_warnings = True
    config.option.benchmark_quiet = True
    if config.getoption("benchmark_only", False) and config.getoption("benchmark_json", None) is None:
        config.option.benchmark_json = RESULTS / "latest.json"


class Progress(logging.Handler):
    """The group that is measured, a line each."""

    def __init__(self, config: pytest.Config) -> None:
        super().__init__()
        self.plugins: Any = config.pluginmanager

    def emit(self, record: logging.LogRecord) -> None:
        reporter = self.plugins.get_plugin("terminalreporter")
        reporter.showfspath = False
        with self.plugins.get_plugin("capturemanager").global_and_fixture_disabled():
            reporter.write_line(record.getMessage())


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Print no letter for rows that ran or cannot run: the progress has the line."""
    if report.failed:
        return None
    return report.outcome if report.when == "call" or report.skipped else "", "", ""


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict) -> None:
    """Record device, threads and versions, and remove host name and kernel release."""
    for name in ("node", "release"):
        machine_info.pop(name, None)
    machine_info["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    machine_info["threads"] = torch.get_num_threads()
    machine_info["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
    machine_info["python"] = platform.python_version()
    machine_info["versions"] = {}
    for name in VERSIONS:
        with suppress(metadata.PackageNotFoundError):
            machine_info["versions"][name] = metadata.version(name)


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_json(config: pytest.Config, output_json: dict) -> None:
    output_json["left_out"] = config.stash[GROUPS].left_out()


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the tables, and the rows that did not run."""
    found = config.stash[GROUPS]
    console = Console(file=terminalreporter._tw._file, width=150, highlight=False)
    for table in tables(found.rows):
        console.print("", table)
    lines = [f"Not measured: {row}: {'; '.join(reasons)}" for row, reasons in found.left_out().items()]
    if record := config.getoption("benchmark_json", None):
        record = os.path.relpath(record)
        lines.append(f"All numbers: {record}; `python -m benchmarks.render {record}` makes tables of them.")
    for line in lines:
        console.print(line, markup=False)
