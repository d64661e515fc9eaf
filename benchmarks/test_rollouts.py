"""Speed of generation: transformers, vLLM in the process, and a vLLM server on this machine."""

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.measure import Result, Results
from benchmarks.programs import QUIET, ROOT, answer_of
from benchmarks.timing import CLOCK
from benchmarks.workloads import DEFAULT, SMOLLM2, Workload, smollm2, workloads
from exgrpo.tools.timing import paired_ratio

TRANSFORMERS = "transformers"
ROWS = (TRANSFORMERS, "vllm", "server")
SMOLLM2_OPTIONS = {
    "recipe": str(ROOT / "exgrpo" / "assets" / "arithmetic" / "recipe.yaml"),
    "questions": "4",
    "rollout.samples": "4",
    "rollout.max_tokens": "48",
    "rollout.batch_tokens": "4096",
    "data.max_prompt_tokens": "96",
    "data.train_limit": "2000",
    "policy.dtype": "bf16",
}


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


def of_smollm2(folder: Path) -> list[str]:
    """Return the options of SmolLM2, unpacked into a folder."""
    values = {**SMOLLM2_OPTIONS, "policy.path": str(smollm2(folder / "model"))}
    return [*(part for name, value in values.items() for part in (f"--{name}", value)), *QUIET]


def of_workload(workload: Workload, dtype: str, folder: Path) -> list[str]:
    """Return the options of a workload. Its engines share one GPU, which leaves no room for a server."""
    questions = folder / "questions.jsonl"
    workload.write_questions(questions)
    options = workload.ours(workload.model(folder / "model"), questions, folder, **{"policy.dtype": dtype})
    return ["--rounds", "3", "--engines", TRANSFORMERS, "vllm", *options]


def models(sizes: str) -> dict[str, Callable[[Path], list[str]]]:
    """Return functions from a folder to the program's options, by name of the model."""
    if workloads(sizes) == (DEFAULT, SMOLLM2):
        return {DEFAULT.name: lambda _: list(QUIET), SMOLLM2.name: of_smollm2}
    return {
        f"{workload.name}, {dtype}": partial(of_workload, workload, dtype)
        for workload in workloads(sizes)
        for dtype in ("bf16", "fp16", "fp32")
    }


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "options" in metafunc.fixturenames:
        chosen = models(metafunc.config.getoption("sizes"))
        rows = ROWS if DEFAULT.name in chosen else ROWS[:-1]
        pairs = [(name, options, row) for name, options in chosen.items() for row in rows]
        metafunc.parametrize(("model", "options", "row"), pairs, ids=[f"{row}-{name}" for name, _, row in pairs])


@pytest.mark.usefixtures("real_steps")
@pytest.mark.timeout(3600)
@pytest.mark.benchmark(timer=CLOCK)
def test_rollouts(benchmark, groups, tmp_path, model, options, row):
    def measure() -> Results:
        return results(answer_of("benchmarks.rollouts", tmp_path / "rounds.json", *options(tmp_path)))

    groups.report(f"rollouts: {model}", row, measure, benchmark)
