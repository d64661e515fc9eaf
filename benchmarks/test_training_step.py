"""A whole training step: exgrpo on-policy and with replay, against TRL's GRPOTrainer, by phase and with peak memory."""

import importlib.util
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.programs import ProgramError, answer_of
from benchmarks.timing import Result, Results, clock, paired_ratio, paired_spread
from benchmarks.workloads import Workload, workloads

Facts = dict[str, Any]
TRL, ON_POLICY, EXGRPO = "trl", "on-policy", "exgrpo"
VLLM, ON_POLICY_VLLM, TRL_VLLM = "exgrpo with vllm", "on-policy with vllm", "trl with vllm"
PLAIN, FP16 = "exgrpo with vllm, plain layers", "exgrpo with vllm in fp16"
ON_GPU = (ON_POLICY_VLLM, PLAIN, FP16, TRL_VLLM)
QUICK = (TRL, ON_POLICY, EXGRPO)
ROWS = (*QUICK, VLLM, *ON_GPU)
NEEDS = {TRL: ("trl", "trl==1.16.0"), **dict.fromkeys((VLLM, *ON_GPU), ("vllm", "vllm"))}
"""Further requirements by row: module and package."""
WITHOUT_REPLAY = {EXGRPO: ON_POLICY, **dict.fromkeys((VLLM, PLAIN, FP16), ON_POLICY_VLLM)}
"""The on-policy row with the same engine, by row."""


def missing(workload: Workload) -> dict[str, str]:
    """Return the rows that cannot run here, with the reason."""
    reasons = {} if workload.dtype == "bf16" else dict.fromkeys(ON_GPU, "it is measured on GPUs only")
    for row, (name, package) in NEEDS.items():
        if importlib.util.find_spec(name) is None:
            reasons.setdefault(row, f"{name} is not installed: pip install {package}")
    return reasons


def programs(workload: Workload, folder: Path) -> dict[str, tuple[str, list[str]]]:
    """Return module and options of each row's program, all with the same model, questions and sizes."""
    model, questions = workload.model(folder / "model"), folder / "questions.jsonl"
    workload.write_questions(questions)

    def ours(row: str, ratio: float, engine: str, **more: str) -> tuple[str, list[str]]:
        options = {"experience.ratio": ratio, "rollout.engine": engine, **more}
        return "benchmarks.training_step", workload.ours(model, questions, folder / row, **options)

    return {
        TRL: ("benchmarks.trl_step", workload.trl(model, questions, folder / TRL)),
        TRL_VLLM: ("benchmarks.trl_step", [*workload.trl(model, questions, folder / TRL_VLLM), "--vllm"]),
        ON_POLICY: ours(ON_POLICY, 0.0, "transformers"),
        EXGRPO: ours(EXGRPO, 0.5, "transformers"),
        VLLM: ours(VLLM, 0.5, "vllm"),
        ON_POLICY_VLLM: ours(ON_POLICY_VLLM, 0.0, "vllm"),
        PLAIN: ours(PLAIN, 0.5, "vllm", **{"policy.compile": "none"}),
        FP16: ours(FP16, 0.5, "vllm", **{"policy.dtype": "fp16"}),
    }


def seconds_of(steps: Sequence[Facts]) -> list[float]:
    return [step["seconds"] for step in steps]


def per_token(steps: Sequence[Facts]) -> list[float]:
    """Return the seconds per generated token: the programs draw answers of different lengths."""
    return [step["seconds"] / step["generated_tokens"] for step in steps]


def results(steps: dict[str, list[Facts]]) -> Results:
    rows = {}
    for name, of_row in steps.items():
        facts = {
            "phases": {p: statistics.median(step["phases"][p] for step in of_row) for p in of_row[0]["phases"]},
            "replayed": statistics.mean(step.get("replayed", 0) for step in of_row),
            "generated_tokens": statistics.mean(step["generated_tokens"] for step in of_row),
            "seconds_per_token": statistics.median(per_token(of_row)),
            "children_bytes": of_row[-1].get("children_bytes"),
        }
        if all("mismatch" in step for step in of_row):
            facts["mismatch"] = statistics.mean(step["mismatch"] for step in of_row)
        if shares := of_row[0].get("mfu"):
            facts["mfu"] = {p: statistics.median(step["mfu"].get(p, 0.0) for step in of_row) for p in shares}
        theirs = TRL_VLLM if name in (VLLM, *ON_GPU) and TRL_VLLM in steps else TRL
        if others := steps.get(theirs):
            facts["times_trl"] = paired_spread(seconds_of(of_row), seconds_of(others))
            facts["token_times_trl"] = paired_spread(per_token(of_row), per_token(others))
            facts["memory_times_trl"] = of_row[-1]["peak_bytes"] / others[-1]["peak_bytes"]
        if (without := WITHOUT_REPLAY.get(name)) in steps:
            facts["times_on_policy"] = paired_ratio(seconds_of(of_row), seconds_of(steps[without]))
        rows[name] = Result(tuple(seconds_of(of_row)), peak_bytes=of_row[-1]["peak_bytes"], facts=facts)
    return rows


def measure(workload: Workload, chosen: Sequence[str], folder: Path, rounds: int) -> Results:
    """Run the programs of the chosen rows one after the other."""
    rows = {row: Result(reason=reason) for row, reason in missing(workload).items() if row in chosen}
    steps: dict[str, list[Facts]] = {}
    for row, (module, options) in programs(workload, folder).items():
        if row not in chosen or row in rows:
            continue
        try:
            taken = answer_of(module, folder / f"{row}.json", *options, "--steps", str(workload.warmup + rounds))
        except ProgramError as error:
            if row not in NEEDS:
                raise
            rows[row] = Result(failure=str(error))
        else:
            steps[row] = taken[workload.warmup :]
    return rows | results(steps)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "workload" in metafunc.fixturenames:
        sizes = metafunc.config.getoption("sizes")
        chosen = workloads(sizes)
        metafunc.parametrize("workload", chosen, ids=[workload.name for workload in chosen])
        metafunc.parametrize("row", QUICK if sizes == "small" else ROWS)


@pytest.mark.usefixtures("real_steps")
@pytest.mark.timeout(10800)
@pytest.mark.benchmark(timer=clock)
def test_training_step(benchmark, groups, options, tmp_path, workload, row, request):
    chosen = [
        item.callspec.params["row"]
        for item in request.session.items
        if getattr(item, "callspec", None) and item.callspec.params.get("workload") == workload
    ]
    measured = partial(measure, workload, chosen, tmp_path, options.rounds)
    groups.report(f"training step: {workload.name}, one program after the other", row, measured, benchmark)
