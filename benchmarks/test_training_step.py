"""A whole training step: exgrpo on-policy and with replay, against TRL's GRPOTrainer, by phase and with its memory."""

import importlib.util
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.timing import CLOCK
from benchmarks.turns import Program, ProgramError, Turn, command, take_turns
from benchmarks.workloads import Workload, workloads
from exgrpo.kernels.timing import paired_ratio, paired_spread
from exgrpo.tools.bench import Result, Results

TRL, ON_POLICY, EXGRPO = "trl", "on-policy", "exgrpo"
VLLM, ON_POLICY_VLLM = "exgrpo with vllm", "on-policy with vllm"
COMPILED, FP16 = "exgrpo with vllm, compiled layers", "exgrpo with vllm in fp16"
ON_GPU = (ON_POLICY_VLLM, COMPILED, FP16)
"""Rows that a GPU alone has."""
ROWS = (TRL, ON_POLICY, EXGRPO, VLLM, *ON_GPU)
NEEDS = {TRL: ("trl", "trl==1.16.0"), **dict.fromkeys((VLLM, *ON_GPU), ("vllm", "vllm"))}
"""What only some rows need: a module, and what to install."""
WITHOUT_REPLAY = {EXGRPO: ON_POLICY, **dict.fromkeys((VLLM, COMPILED, FP16), ON_POLICY_VLLM)}
"""The row with the same engine that a row's time is compared with."""


def missing(workload: Workload) -> dict[str, str]:
    """The rows that cannot run here, with the reason."""
    lacking = {
        row: f"{name} is not installed: pip install {package}"
        for row, (name, package) in NEEDS.items()
        if importlib.util.find_spec(name) is None
    }
    of_gpus = {} if workload.dtype == "bf16" else dict.fromkeys(ON_GPU, "it is compared on a GPU")
    return {**lacking, **of_gpus}


def commands(workload: Workload, folder: Path) -> dict[str, list[str]]:
    """The program of each row. All have the same model, questions and sizes."""
    model, questions = workload.model(folder / "model"), folder / "questions.jsonl"
    workload.write_questions(questions)

    def ours(row: str, ratio: float, engine: str, **more: str) -> list[str]:
        options = {"experience.ratio": ratio, "rollout.engine": engine, **more}
        return command("benchmarks.training_step", *workload.ours(model, questions, folder / row, **options))

    return {
        TRL: command("benchmarks.trl_step", *workload.trl(model, questions, folder / TRL)),
        ON_POLICY: ours(ON_POLICY, 0.0, "transformers"),
        EXGRPO: ours(EXGRPO, 0.5, "transformers"),
        VLLM: ours(VLLM, 0.5, "vllm"),
        ON_POLICY_VLLM: ours(ON_POLICY_VLLM, 0.0, "vllm"),
        COMPILED: ours(COMPILED, 0.5, "vllm", **{"policy.compile": "inductor"}),
        FP16: ours(FP16, 0.5, "vllm", **{"policy.dtype": "fp16"}),
    }


def compared(turns: Sequence[Turn], others: Sequence[Turn], name: str) -> dict[str, object]:
    """Time, time per generated token and memory of one row, over those of another."""
    seconds, of_others = [turn.seconds for turn in turns], [turn.seconds for turn in others]
    tokens, of_other_tokens = [per_token(turn) for turn in turns], [per_token(turn) for turn in others]
    return {
        f"times_{name}": paired_spread(seconds, of_others),
        f"token_times_{name}": paired_spread(tokens, of_other_tokens),
        f"memory_times_{name}": peak_bytes(turns[-1]) / peak_bytes(others[-1]),
    }


def per_token(turn: Turn) -> float:
    """Seconds of a step by the tokens that were generated in it: the programs draw answers of different lengths."""
    return turn.seconds / turn.facts["generated_tokens"]


def results(turns: dict[str, list[Turn]]) -> Results:
    """The rows from their turns."""
    rows = {}
    for name, of_row in turns.items():
        facts = {
            "phases": {p: statistics.median(t.facts["phases"][p] for t in of_row) for p in of_row[0].facts["phases"]},
            "replayed": statistics.mean(turn.facts.get("replayed", 0) for turn in of_row),
            "generated_tokens": statistics.mean(turn.facts["generated_tokens"] for turn in of_row),
            "seconds_per_token": statistics.median(map(per_token, of_row)),
            "children_bytes": None if "device_bytes" in of_row[0].facts else of_row[-1].peak.children,
            "tokens_per_second": statistics.median(1 / per_token(turn) for turn in of_row),
        }
        if all("mismatch" in turn.facts for turn in of_row):
            facts["mismatch"] = statistics.mean(turn.facts["mismatch"] for turn in of_row)
        if "mfu" in of_row[0].facts:
            shares = of_row[0].facts["mfu"]
            facts["mfu"] = {p: statistics.median(turn.facts["mfu"].get(p, 0.0) for turn in of_row) for p in shares}
        if TRL in turns:
            facts |= compared(of_row, turns[TRL], "trl")
        if (without := WITHOUT_REPLAY.get(name)) in turns:
            facts["times_on_policy"] = paired_ratio([t.seconds for t in of_row], [t.seconds for t in turns[without]])
        rows[name] = Result(tuple(turn.seconds for turn in of_row), peak_bytes=peak_bytes(of_row[-1]), facts=facts)
    return rows


def peak_bytes(turn: Turn) -> int:
    """Memory of a program until a turn: of its GPU where it uses one, else of its processes."""
    return turn.facts.get("device_bytes", turn.peak.total)


def measure(workload: Workload, chosen: Sequence[str], folder: Path, rounds: int) -> Results:
    """Steps of the chosen programs in turn, all of them in memory at once; or one program after the other."""
    rows = {row: Result(reason=reason) for row, reason in missing(workload).items()}
    wanted = {row: one for row, one in commands(workload, folder).items() if row in chosen and row not in rows}
    turns: dict[str, list[Turn]] = {}
    for group in [wanted] if workload.together else [{row: one} for row, one in wanted.items()]:
        with ExitStack() as running:
            programs = {}
            for row, of_row in group.items():
                try:
                    programs[row] = running.enter_context(Program(of_row, folder / f"{row}.log"))
                except ProgramError as error:
                    if row not in NEEDS:
                        raise
                    rows[row] = Result(failure=str(error))
            if programs:
                turns |= take_turns(programs, workload.warmup, rounds)
    return rows | results(turns)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The workloads of this machine."""
    if "workload" in metafunc.fixturenames:
        chosen = workloads(metafunc.config.getoption("sizes"))
        metafunc.parametrize("workload", chosen, ids=[workload.name for workload in chosen])


@pytest.mark.usefixtures("real_steps")
@pytest.mark.timeout(10800)
@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize("row", ROWS)
def test_training_step(benchmark, races, rounds, tmp_path, workload, row, request):
    chosen = [
        item.callspec.params["row"]
        for item in request.session.items
        if getattr(item, "callspec", None) and item.callspec.params.get("workload") == workload
    ]
    order = "" if workload.together else ", one program after the other"
    group = f"training step: {workload.name}{order}"
    races.run(group, row, lambda: measure(workload, chosen, tmp_path, rounds), benchmark)
