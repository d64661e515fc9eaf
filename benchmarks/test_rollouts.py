"""What generates faster: transformers, vLLM in the process, or a vLLM server on this machine?"""

import statistics
from typing import Any

import pytest

from benchmarks.programs import QUIET, ROOT, answer_of
from benchmarks.races import Result, Results
from benchmarks.timing import CLOCK, paired_ratio
from benchmarks.workloads import DEFAULT, SMOLLM2, smollm2

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
    """Rows from the program's answer; engines draw different answers, so their times per token are compared."""
    rows = {name: Result(reason=reason) for name, reason in numbers["reasons"].items()}
    per_token = {name: [r["seconds"] / r["tokens"] for r in rounds] for name, rounds in numbers["rounds"].items()}
    for name, rounds in numbers["rounds"].items():
        facts = {
            key: statistics.median(of_round[key] for of_round in rounds)
            for key in ("tokens_per_second", "push", "prefix_cache_hits")
        }
        facts["times_transformers"] = paired_ratio(per_token[name], per_token[TRANSFORMERS])
        rows[name] = Result(tuple(of_round["seconds"] for of_round in rounds), facts=facts)
    return rows


@pytest.mark.usefixtures("real_steps")
@pytest.mark.timeout(3600)
@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize("model", [DEFAULT.name, SMOLLM2.name])
@pytest.mark.parametrize("row", ROWS)
def test_rollouts(benchmark, races, tmp_path, model, row):

    def measure() -> Results:
        options = []
        if model == SMOLLM2.name:
            values = {**SMOLLM2_OPTIONS, "policy.path": str(smollm2(tmp_path / "model"))}
            options = [part for name, value in values.items() for part in (f"--{name}", value)]
        return results(answer_of("benchmarks.rollouts", tmp_path / "rounds.json", *options, *QUIET))

    races.run(f"rollouts: {model}", row, measure, benchmark)
