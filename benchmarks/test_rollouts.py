"""Speed of generation: transformers, vLLM in the process, and a vLLM server on this machine."""

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.measure import Result, Results
from benchmarks.programs import answer_of
from benchmarks.timing import CLOCK
from benchmarks.workloads import DEFAULT, Workload, workloads
from exgrpo.tools.timing import paired_ratio

TRANSFORMERS = "transformers"
ROWS = (TRANSFORMERS, "vllm", "server")


def results(numbers: dict[str, Any]) -> Results:
    """Return rows from the program's output; times are per token, since engines draw different answers."""
    rows = {name: Result(reason=reason) for name, reason in numbers["reasons"].items()}
    per_token = {name: [r["seconds"] / r["tokens"] for r in rounds] for name, rounds in numbers["rounds"].items()}
    for name, rounds in numbers["rounds"].items():
        facts = {
            key: statistics.median(of_round[key] for of_round in rounds)
            for key in ("tokens_per_second", "push", "wake", "sleep", "prefix_cache_hits")
        }
        facts["weight_gap"] = numbers["gaps"][name]
        facts["times_transformers"] = paired_ratio(per_token[name], per_token[TRANSFORMERS])
        rows[name] = Result(tuple(of_round["seconds"] for of_round in rounds), facts=facts)
    return rows


def engines(sizes: str) -> tuple[str, ...]:
    """Return the engines that fit beside each other: those of real models share a GPU, without room for a server."""
    return ROWS if DEFAULT in workloads(sizes) else ROWS[:-1]


def options_of(workload: Workload, dtype: str, sizes: str, folder: Path) -> list[str]:
    """Return the program's options."""
    questions = folder / "questions.jsonl"
    workload.write_questions(questions)
    options = workload.ours(workload.model(folder / "model"), questions, folder, **{"policy.dtype": dtype})
    return ["--rounds", "3", "--engines", *engines(sizes), *options]


def models(sizes: str) -> dict[str, Callable[[Path], list[str]]]:
    """Return functions from a folder to the program's options, by name of the model."""
    dtypes = ("fp32",) if DEFAULT in workloads(sizes) else ("bf16", "fp16", "fp32")
    return {
        f"{workload.name}, {dtype}": partial(options_of, workload, dtype, sizes)
        for workload in workloads(sizes)
        for dtype in dtypes
    }


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "options" in metafunc.fixturenames:
        sizes = metafunc.config.getoption("sizes")
        chosen = models(sizes)
        rows = engines(sizes)
        pairs = [(name, options, row) for name, options in chosen.items() for row in rows]
        metafunc.parametrize(("model", "options", "row"), pairs, ids=[f"{row}-{name}" for name, _, row in pairs])


@pytest.mark.usefixtures("real_steps")
@pytest.mark.timeout(3600)
@pytest.mark.benchmark(timer=CLOCK)
def test_rollouts(benchmark, groups, tmp_path, model, options, row):
    def measure() -> Results:
        return results(answer_of("benchmarks.rollouts", tmp_path / "rounds.json", *options(tmp_path)))

    groups.report(f"rollouts: {model}", row, measure, benchmark)
