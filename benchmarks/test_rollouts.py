"""Speed of generation: transformers, vLLM in the process, and a vLLM server on this machine."""

import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.programs import answer_of
from benchmarks.timing import Result, Results, clock, paired_ratio
from benchmarks.workloads import DEFAULT, Workload, workloads

TRANSFORMERS = "transformers"
ROWS = (TRANSFORMERS, "vllm", "server")


def results(numbers: dict[str, Any]) -> Results:
    """Return rows from the program's output; times are per token, since engines draw different answers."""
    rows = {name: Result(reason=reason) for name, reason in numbers["reasons"].items()}
    per_token = {name: [r["seconds"] / r["tokens"] for r in rounds] for name, rounds in numbers["rounds"].items()}
    for name, rounds in numbers["rounds"].items():
        facts = {
            key: statistics.median(of_round[key] for of_round in rounds)
            for key in ("tokens_per_second", "push", "wake", "sleep")
        }
        facts["weight_gap"] = numbers["gaps"][name]
        facts["times_transformers"] = paired_ratio(per_token[name], per_token[TRANSFORMERS])
        rows[name] = Result(tuple(of_round["seconds"] for of_round in rounds), facts=facts)
    return rows


def options_of(workload: Workload, dtype: str, rows: Sequence[str], folder: Path) -> list[str]:
    """Return the program's options."""
    questions = folder / "questions.jsonl"
    workload.write_questions(questions)
    options = workload.ours(workload.model(folder / "model"), questions, folder, **{"policy.dtype": dtype})
    return ["--rounds", "3", "--engines", *rows, *options]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "options_in" in metafunc.fixturenames:
        chosen = workloads(metafunc.config.getoption("sizes"))
        # Engines of real models share a GPU, without room for a server.
        dtypes, rows = (("fp32",), ROWS) if DEFAULT in chosen else (("bf16", "fp16", "fp32"), ROWS[:-1])
        cases = [(workload, dtype, row) for workload in chosen for dtype in dtypes for row in rows]
        values = [(f"{one.name}, {dtype}", partial(options_of, one, dtype, rows), row) for one, dtype, row in cases]
        metafunc.parametrize(("model", "options_in", "row"), values, ids=[f"{row}-{name}" for name, _, row in values])


@pytest.mark.usefixtures("real_steps")
@pytest.mark.timeout(3600)
@pytest.mark.benchmark(timer=clock)
def test_rollouts(benchmark, groups, tmp_path, model, options_in, row):
    def measure() -> Results:
        return results(answer_of("benchmarks.rollouts", tmp_path / "rounds.json", *options_in(tmp_path)))

    groups.report(f"rollouts: {model}", row, measure, benchmark)
