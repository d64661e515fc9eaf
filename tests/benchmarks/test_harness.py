"""The harness: rows compute the same thing, slow is shown as slow, wrong as wrong, and memory as it is."""

import re
from argparse import ArgumentTypeError
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import heads
from benchmarks.conftest import shape_of
from benchmarks.inputs import make_inputs
from benchmarks.measure import ROWS, measure
from benchmarks.memory import peak_bytes
from benchmarks.peers import PEERS
from benchmarks.record import read, write
from benchmarks.render import RESULTS, grids, main, markdown
from benchmarks.test_head import chosen
from benchmarks.timing import OURS, Budget, interleave, paired_ratio
from exgrpo.kernels import linear_policy_loss
from exgrpo.kernels.dispatch import BACKENDS
from exgrpo.kernels.inputs import IGNORED

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
SMALL = (48, 64, 600)
MORE = (torch.bfloat16, 1.0)


def case(operation: str, dtype=torch.float32, active=1.0) -> heads.Case:
    return heads.Case(operation, *SMALL, dtype, active)


# Rows that torch's compiler makes take seconds, and so does a second dtype: `make test-long` has them.
CLAIMED = [
    pytest.param(
        *(row, operation, dtype, active),
        id=f"{row.name}-{operation}-{dtype}-{active}",
        marks=pytest.mark.long
        if any(name in row.name for name in ("compiled", "Cut Cross-Entropy")) or (dtype, active) == MORE
        else (),
    )
    for row in ROWS
    for operation in (row.operations if "compiled" not in row.name else [heads.LOG_PROB])
    for dtype, active in ((torch.float32, 0.5), MORE)
    if not isinstance(row, heads.Floor)
]


@pytest.mark.parametrize(("row", "operation", "dtype", "active"), CLAIMED)
def test_every_row_computes_the_operation_and_tokens_that_are_not_active_do_not_count(row, operation, dtype, active):
    """Whatever a row makes of the others: what the active ones give is right, and the others have no gradient."""
    if reason := row.missing(CPU):
        pytest.skip(reason)
    if operation not in (heads.FORWARD, heads.LOG_PROB, heads.CROSS_ENTROPY, heads.WITH_ENTROPY):
        active = 1.0
    some = case(operation, dtype, active)
    problem = heads.make_problem(some, CPU)
    assert problem.active.sum() == some.active_tokens == round(active * SMALL[0])
    assert torch.equal(problem.target == IGNORED, ~problem.active)
    truth = heads.exact(some, problem)
    assert not heads.is_wrong(
        heads.errors(some, row, problem, truth), heads.errors(some, heads.FullLogits(), problem, truth)
    )
    if truth.gradients and active < 1:
        assert (row.call(some, problem)().gradients[0][~problem.active] == 0).all()


class Broken(heads.FullLogits):
    """A row that raises an error."""

    def __init__(self):
        super().__init__()
        self.name = "broken"

    def log_prob(self, hidden, weight, target):
        raise RuntimeError("no such kernel")


def test_a_row_that_fails_is_left_out_with_its_reason():
    results = measure(case(heads.POLICY_LOSS), [heads.FullLogits(), Broken()], CPU, Budget(0.0))
    assert results["broken"].failure == "RuntimeError: no such kernel"
    assert not results["broken"].seconds
    assert results["full logits"].seconds

    def broken():
        raise RuntimeError("no such kernel\nand so on")

    assert interleave({"broken": broken}, CPU, Budget(0.0)) == ({}, {"broken": "RuntimeError: no such kernel"})


def test_a_head_of_ones_own_is_measured_by_every_backend():
    options = SimpleNamespace(sizes="small", shape=[shape_of("16,8,60,float16"), shape_of("4,8,60")])
    rows = chosen(options)
    assert {(one.operation, one.tokens, one.width, one.vocabulary, one.dtype) for _, one, _ in rows} == {
        (operation, *shape)
        for operation in (heads.FORWARD, heads.POLICY_LOSS)
        for shape in ((16, 8, 60, torch.float16), (4, 8, 60, torch.bfloat16))
    }
    assert {f"{OURS} {name}" for name in BACKENDS} <= {row.name for _, _, row in rows}
    for wrong in ("16,8", "16,8,0", "16,8,60,float64", "16,8,60,"):
        with pytest.raises(ArgumentTypeError, match="is no head"):
            shape_of(wrong)


class HalfTemperature(heads.FullLogits):
    """A row with a mistake."""

    def __init__(self):
        super().__init__()
        self.name = "half temperature"

    def log_prob(self, hidden, weight, target):
        return super().log_prob(2 * hidden, weight, target)


@pytest.mark.parametrize("operation", heads.OPERATIONS)
def test_a_wrong_row_is_shown_as_wrong_with_its_error(operation):
    wrong = HalfTemperature()
    results = measure(case(operation), [heads.Floor(), heads.FullLogits(), wrong], CPU, Budget(0.0))
    assert results[wrong.name].facts["wrong"]
    assert not results["full logits"].facts["wrong"]
    assert max(results[wrong.name].facts.get(key, 0) for key in ("log_prob_error", "gradient_error")) > 0.01
    rows = [{"group": "g", "row": wrong.name, "median": 1.0, **results[wrong.name].facts}]
    assert "WRONG" in grids(rows)[0].lines[0]


@pytest.mark.parametrize("active", [1.0, 0.5])
@pytest.mark.parametrize("operation", heads.OPERATIONS)
def test_the_floor_is_the_bare_products(operation, active):
    """Counted in FLOPs: 2TDV forward, 6TDV with the backward, T the active tokens."""
    from torch.utils.flop_counter import FlopCounterMode

    call = heads.Floor().call(case(operation, active=active), heads.make_problem(case(operation, active=active), CPU))
    with FlopCounterMode(display=False) as counter:
        call()
    tokens, width, vocabulary = SMALL
    assert counter.get_total_flops() == (2 if operation == "forward" else 6) * active * tokens * width * vocabulary


def test_no_row_can_win_by_leaving_tokens_out():
    """Clipped tokens and zero advantages would: there are (nearly) none."""
    problem = heads.make_problem(heads.Case("policy_loss", 512, 64, 2000, torch.float32), CPU)
    assert (problem.advantage.abs() >= 0.5).all()
    clipped = linear_policy_loss(*problem[:5]).clipped
    assert clipped.float().mean() < 0.01


@pytest.fixture
def taking(monkeypatch):
    """Makes calls that take so many seconds of a clock that only they move."""
    now = [0.0]
    monkeypatch.setattr("benchmarks.timing.time", SimpleNamespace(perf_counter=lambda: now[0]))

    def call_of(duration):
        def call():
            now[0] += duration

        return call

    return call_of


def test_a_slow_row_shows_up_as_slow(taking):
    seconds, failed = interleave({"floor": taking(0.5), "slow": taking(1.5)}, CPU, Budget(16.0))
    assert not failed
    assert seconds == {"floor": [0.5] * 8, "slow": [1.5] * 8}  # as many rounds of two seconds as the budget allows
    assert paired_ratio(seconds["slow"], seconds["floor"]) == 3.0


def test_a_call_without_patience_for_it_is_timed_once(taking):
    calls = {"fast": taking(0.5), "slow": taking(3.0)}
    seconds, _ = interleave(calls, CPU, Budget(0.0, least=4, patience=5.0))
    assert seconds == {"fast": [0.5] * 4, "slow": [3.0]}
    assert paired_ratio(seconds["slow"], seconds["fast"]) == 6.0


class Compiled(heads.FullLogits):
    """A row that refuses to run uncompiled."""

    def log_prob(self, hidden, weight, target):
        return torch.compile(heads.full_logits, backend="eager", fullgraph=True, dynamic=False)(hidden, weight, target)


def test_every_case_may_compile_anew():
    row = Compiled()
    with torch._dynamo.config.patch(recompile_limit=1):
        for tokens in (16, 24, 32):
            found = measure(heads.Case(heads.FORWARD, tokens, 8, 60, torch.float32), [row], CPU, Budget(0.0))[row.name]
            assert not found.failure
            assert len(found.seconds) == 5


def test_rows_take_turns_and_each_goes_first():
    order = []
    calls = {name: (lambda name=name: order.append(name)) for name in "abc"}
    interleave(calls, CPU, Budget(0.0))
    rounds = [order[i : i + 3] for i in range(3, len(order), 3)]  # after the warm-up
    assert len(rounds) == 5
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
    assert [names[0] for names in rounds] == ["a", "b", "c", "a", "b"]


@pytest.mark.parametrize("mebibytes", [40, 200])
def test_peak_memory_of_a_known_allocation(mebibytes):
    def allocate():
        held = torch.ones(mebibytes << 18)
        return held[:1].clone()

    allocate()
    # Right to a few pages and what the interpreter does meanwhile; freed before the call ends, so a peak.
    assert peak_bytes(allocate, CPU) == pytest.approx(mebibytes << 20, abs=4 << 20)


@pytest.mark.parametrize("shape", [(512, 64, 1000), (256, 256, 8000)])
def test_inputs_are_as_sharp_as_a_language_model(shape):
    hidden, weight, target = inputs = make_inputs(*shape, torch.float32, CPU)
    again = make_inputs(*shape, torch.float32, CPU)
    assert all(torch.equal(a, b) for a, b in zip(inputs, again, strict=True))
    log_prob = torch.log_softmax((hidden @ weight.T).double(), -1)
    entropy = -(log_prob.exp() * log_prob).sum(-1)
    assert 0.4 < entropy.mean() < 0.8
    assert entropy.median() < 0.3
    assert entropy.quantile(0.99) > 2
    # Targets are sampled: their mean surprise is the mean entropy, within four standard errors.
    surprise = -log_prob.gather(-1, target[:, None]).squeeze(-1)
    assert abs(surprise.mean() - entropy.mean()) < 4 * surprise.std() / len(surprise) ** 0.5


def test_records_in_the_repository_are_their_pages(tmp_path):
    records = sorted(RESULTS.glob("*_*.json"))
    assert records
    for record in records:
        assert record.with_suffix(".md").read_text() == markdown(read(record))
        write(read(record), tmp_path / record.name)
        assert (tmp_path / record.name).read_text() == record.read_text()


@pytest.mark.parametrize("text", ["", "[]", '{"machine": {}, "rows": []}'])
def test_a_file_that_is_no_record_is_refused(text, tmp_path, capsys):
    (tmp_path / "other.json").write_text(text)
    assert main([str(tmp_path / "other.json"), "--output", str(tmp_path / "results")]) == 2
    assert "other.json is no record of these benchmarks" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


def test_the_versions_of_peers_are_those_that_make_installs():
    pinned = re.findall(r"^(?:GPU_)?PEERS := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert len(pinned) == 2
    assert {peer.requirement for peer in PEERS if peer.requirement} <= set(" ".join(pinned).split())
