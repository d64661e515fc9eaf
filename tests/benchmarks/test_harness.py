"""The harness: rows compute the same thing, slow is shown as slow, wrong as wrong, and memory as it is."""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.races import Races
from benchmarks.record import Machine, Record, read, summarize, write
from benchmarks.render import RESULTS, grids, main, markdown
from exgrpo.kernels import linear_policy_loss
from exgrpo.kernels.inputs import IGNORED
from exgrpo.kernels.timing import interleave, make_inputs, paired_ratio, peak_bytes
from exgrpo.tools.bench import ROWS, Result, measure
from exgrpo.tools.heads import (
    CROSS_ENTROPY,
    FORWARD,
    LOG_PROB,
    OPERATIONS,
    WITH_ENTROPY,
    Case,
    Floor,
    FullLogits,
    errors,
    exact,
    make_problem,
)
from tests.benchmarks.support import ENVIRONMENT

CPU = torch.device("cpu")
SMALL = (48, 64, 600)


def case(operation: str, dtype=torch.float32, active=1.0) -> Case:
    return Case(operation, *SMALL, dtype, active)


COMPILED = ("compiled", "Cut Cross-Entropy")
"""In the names of rows that torch's compiler makes, which takes seconds: `make test-long` has them."""


def compiles(row) -> bool:
    return any(name in row.name for name in COMPILED)


# Compiled rows differ by the compiler alone: one operation will do. Of others each operation is tried in one dtype.
CLAIMED = [
    pytest.param(
        *(row, operation, dtype),
        id=f"{row.name}-{operation}-{dtype}",
        marks=pytest.mark.long
        if compiles(row) or (operation == row.operations[0]) == (dtype == torch.bfloat16)
        else (),
    )
    for row in ROWS
    for operation in (row.operations if "compiled" not in row.name else [LOG_PROB])
    for dtype in (torch.float32, torch.bfloat16)
    if not isinstance(row, Floor)
]


@pytest.mark.parametrize(("row", "operation", "dtype"), CLAIMED)
def test_every_row_computes_the_operation(row, operation, dtype):
    if reason := row.missing(CPU):
        pytest.skip(reason)
    problem = make_problem(case(operation, dtype), CPU)
    truth = exact(case(operation, dtype), problem)
    plain = errors(case(operation, dtype), FullLogits(), problem, truth)
    assert not errors(case(operation, dtype), row, problem, truth).wrong(plain)


PARTLY = [
    pytest.param(
        *(row, operation),
        id=f"{row.name}-{operation}",
        marks=pytest.mark.long if compiles(row) or operation not in (LOG_PROB, CROSS_ENTROPY) else (),
    )
    for row in ROWS
    for operation in (FORWARD, LOG_PROB, CROSS_ENTROPY, WITH_ENTROPY)
    if operation in row.operations and "compiled" not in row.name and not isinstance(row, Floor)
]


@pytest.mark.parametrize(("row", "operation"), PARTLY)
def test_tokens_that_are_not_active_do_not_count(row, operation):
    """Whatever a row makes of them: what the active ones give is right, and the others have no gradient."""
    if reason := row.missing(CPU):
        pytest.skip(reason)
    some = case(operation, active=0.5)
    problem = make_problem(some, CPU)
    truth = exact(some, problem)
    assert not errors(some, row, problem, truth).wrong(errors(some, FullLogits(), problem, truth))
    if truth.gradients:
        assert (row.call(some, problem)().gradients[0][~problem.active] == 0).all()
        alone = make_problem(case(operation), CPU)
        assert not errors(some, row, alone, truth).gradient < 0.1  # all tokens together give something else


@pytest.mark.parametrize("active", [1.0, 0.7, 0.5])
def test_as_many_tokens_are_active_as_the_case_says(active):
    some = case(LOG_PROB, active=active)
    problem = make_problem(some, CPU)
    assert problem.active.sum() == some.active_tokens == round(active * SMALL[0])
    assert torch.equal(problem.target == IGNORED, ~problem.active)
    assert torch.equal(problem.advantage != 0, problem.active)
    assert ("active" in str(some)) == (active < 1)


class HalfTemperature(FullLogits):
    """A row with a mistake."""

    def __init__(self):
        super().__init__()
        self.name = "half temperature"

    def log_prob(self, hidden, weight, target):
        return super().log_prob(2 * hidden, weight, target)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_wrong_row_is_shown_as_wrong_with_its_error(operation):
    wrong = HalfTemperature()
    results = measure(case(operation), [Floor(), FullLogits(), wrong], CPU, 0.0)
    assert results[wrong.name].facts["wrong"]
    assert not results["full logits"].facts["wrong"]
    assert max(results[wrong.name].facts[key] or 0 for key in ("log_prob_error", "gradient_error")) > 0.01
    rows = [{"group": "g", "row": wrong.name, "median": 1.0, **results[wrong.name].facts}]
    assert "WRONG" in grids(rows)[0].lines[0]


@pytest.mark.parametrize("active", [1.0, 0.5])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_floor_is_the_bare_products(operation, active):
    """Counted in FLOPs: 2TDV forward, 6TDV with the backward, T the active tokens."""
    from torch.utils.flop_counter import FlopCounterMode

    call = Floor().call(case(operation, active=active), make_problem(case(operation, active=active), CPU))
    with FlopCounterMode(display=False) as counter:
        call()
    tokens, width, vocabulary = SMALL
    assert counter.get_total_flops() == (2 if operation == "forward" else 6) * active * tokens * width * vocabulary


def test_no_row_can_win_by_leaving_tokens_out():
    """Clipped tokens and zero advantages would: there are (nearly) none."""
    problem = make_problem(Case("policy_loss", 512, 64, 2000, torch.float32), CPU)
    assert (problem.advantage.abs() >= 0.5).all()
    clipped = linear_policy_loss(*problem[:5]).clipped
    assert clipped.float().mean() < 0.01


@pytest.fixture
def taking(monkeypatch):
    """Makes calls that take so many seconds of a clock that only they move."""
    now = [0.0]
    monkeypatch.setattr("exgrpo.kernels.timing.time", SimpleNamespace(perf_counter=lambda: now[0]))

    def call_of(duration):
        def call():
            now[0] += duration

        return call

    return call_of


def test_a_slow_row_shows_up_as_slow(taking):
    seconds, failed = interleave({"floor": taking(0.5), "slow": taking(1.5)}, CPU, 16.0)
    assert not failed
    assert seconds == {"floor": [0.5] * 8, "slow": [1.5] * 8}  # as many rounds of two seconds as the budget allows
    assert paired_ratio(seconds["slow"], seconds["floor"]) == 3.0


def test_calls_in_a_row_are_one_turn_with_the_seconds_of_one_call(taking):
    count = 0
    half = taking(0.5)

    def call():
        nonlocal count
        count += 1
        half()

    seconds, _ = interleave({"row": call}, CPU, 0.0, in_a_row=4)
    assert seconds == {"row": [0.5] * 5}
    assert count == 4 * (1 + 5)  # with the warm-up


def test_rows_take_turns_and_each_goes_first():
    order = []
    calls = {name: (lambda name=name: order.append(name)) for name in "abc"}
    interleave(calls, CPU, 0.0)
    rounds = [order[i : i + 3] for i in range(3, len(order), 3)]  # after the warm-up
    assert len(rounds) == 5
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
    assert [names[0] for names in rounds] == ["a", "b", "c", "a", "b"]


def test_a_row_that_fails_says_why_and_the_others_go_on():
    def broken():
        raise ValueError("no such kernel")

    seconds, failed = interleave({"floor": int, "broken": broken}, CPU, 0.0)
    assert failed == {"broken": "ValueError: no such kernel"}
    assert len(seconds["floor"]) == 5


@pytest.mark.parametrize(
    ("row", "outcome"), [("a peer", pytest.skip.Exception), ("exgrpo torch", pytest.fail.Exception)]
)
def test_a_peer_that_raises_is_skipped_and_one_of_ours_fails(row, outcome):
    races = Races(ours="exgrpo torch")
    with pytest.raises(outcome, match="RuntimeError: broken"):
        races.run("group", row, lambda: {row: Result(failure="RuntimeError: broken")}, benchmark=None)


def test_rows_that_did_not_run_are_named_with_the_reason():
    races = Races(ours="exgrpo torch")
    absent = Result(reason="quack is not installed")
    races.results = {
        "one": {"floor": Result((1.0,)), "quack": absent, "trl": Result(failure="E: x")},
        "two": {"floor": Result((1.0,)), "quack": absent, "trl": Result((2.0,))},
    }
    assert races.left_out() == {"quack": ["quack is not installed"], "trl": ["one: E: x"]}


def test_no_group_begins_after_the_deadline():
    races = Races(ours="exgrpo torch", deadline=time.monotonic())
    with pytest.raises(pytest.skip.Exception, match="its time is up"):
        races.run("group", "floor", lambda: pytest.fail("it began"), benchmark=None)


def test_pairing_cancels_what_the_machine_does_to_a_whole_round():
    load = [1.0, 5.0, 1.0, 0.5, 9.0]
    assert paired_ratio([3 * x for x in load], load) == pytest.approx(3.0)


@pytest.mark.parametrize("mebibytes", [40, 200])
def test_peak_memory_of_a_known_allocation(mebibytes):
    def allocate():
        held = torch.ones(mebibytes << 18)
        return held[:1].clone()

    allocate()
    # Right to a few pages and what the interpreter does meanwhile; freed before the call ends, so a peak.
    assert peak_bytes(allocate, CPU) == pytest.approx(mebibytes << 20, abs=4 << 20)


@pytest.mark.parametrize("shape", [(512, 64, 1000), (256, 256, 8000), (128, 512, 32000)])
def test_inputs_are_as_sharp_as_a_language_model(shape):
    inputs = make_inputs(*shape, torch.float32, CPU)
    again = make_inputs(*shape, torch.float32, CPU)
    assert all(torch.equal(a, b) for a, b in zip(inputs, again, strict=True))
    entropy = inputs.entropy.double()
    assert 0.4 < entropy.mean() < 0.8
    assert entropy.median() < 0.3
    assert entropy.quantile(0.99) > 2
    log_prob = torch.log_softmax((inputs.hidden @ inputs.weight.T).double(), -1)
    assert torch.allclose(-(log_prob.exp() * log_prob).sum(-1), entropy, atol=1e-3)
    # Targets are sampled: their mean surprise is the mean entropy, within four standard errors.
    surprise = -log_prob.gather(-1, inputs.target[:, None]).squeeze(-1)
    assert abs(surprise.mean() - entropy.mean()) < 4 * surprise.std() / len(surprise) ** 0.5


BENCH = [sys.executable, "-m", "pytest", "benchmarks", "-p", "no:cacheprovider", "-q"]
ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_the_command_writes_a_record_that_becomes_a_page(tmp_path):
    record = tmp_path / "record.json"
    done = subprocess.run(
        [*BENCH, "--benchmark-only", f"--benchmark-json={record}", "-k", "advantages"],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "time / ours" in done.stdout
    loaded = json.loads(record.read_text())
    assert "node" not in loaded["machine_info"]
    assert torch.__version__.startswith(loaded["machine_info"]["versions"]["torch"])  # a build may add "+cu130"
    small = summarize(loaded)
    slow = next(row for row in small.rows if row["row"] == "a loop over groups")
    assert slow["times_ours"] > 1
    stats = next(b for b in loaded["benchmarks"] if b["extra_info"]["row"] == "a loop over groups")["stats"]
    assert slow["median"] == statistics.median(stats["data"])
    assert slow["iqr"] == stats["iqr"]
    assert main([str(record), "--output", str(tmp_path / "results")]) == 0
    written = {path.suffix: path for path in (tmp_path / "results").iterdir()}
    assert set(written) == {".json", ".md"}  # these groups have no plot
    assert written[".md"].read_text() == markdown(small) == markdown(read(written[".json"]))
    assert "a loop over groups" in written[".md"].read_text()
    assert written[".json"].stat().st_size < record.stat().st_size / 4


FACTS = {
    "row": "exgrpo cpu",
    "median": 1 / 3,
    "iqr": 0.1,
    "peak_bytes": 123_456_789,
    "replayed": 0,
    "phases": {"a": 2 / 3},
}


def a_record(rows):
    machine = Machine("cpu", "a processor", "AVX512", 2, "3.11.7", {"torch": "2.13.0"})
    return Record("2026-11-21", "0123456789abcdef", False, machine, rows)


def test_a_record_is_read_as_it_was_written_to_nine_digits(tmp_path):
    written = a_record(
        [{"group": "g", **FACTS, "log_prob_error": None, "wrong": False}, {"group": "h", **FACTS, "wrong": True}]
    )
    write(written, tmp_path / "record.json")
    again = read(tmp_path / "record.json")
    facts = {**FACTS, "median": 0.333333333, "phases": {"a": 0.666666667}}
    assert again == a_record([{"group": "g", **facts}, {"group": "h", **facts, "wrong": True}])
    assert markdown(again) == markdown(written)
    lines = (tmp_path / "record.json").read_text().splitlines()
    assert ['"row"' in line for line in lines].count(True) == 2  # a line for each row


def test_records_in_the_repository_are_their_pages(tmp_path):
    records = sorted(RESULTS.glob("*_*.json"))
    assert records
    for record in records:
        assert record.with_suffix(".md").read_text() == markdown(read(record))
        write(read(record), tmp_path / record.name)
        assert (tmp_path / record.name).read_text() == record.read_text()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"benchmarks": []}', '{"machine": {}, "rows": []}'])
def test_a_file_that_is_no_record_is_refused(text, tmp_path, capsys):
    (tmp_path / "other.json").write_text(text)
    assert main([str(tmp_path / "other.json"), "--output", str(tmp_path / "results")]) == 2
    assert "other.json is no record of these benchmarks" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()
