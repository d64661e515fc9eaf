"""`exgrpo bench`: with torch alone, its record, and rows that are wrong or fail."""

import json

import pytest
import torch

from exgrpo.tools import bench
from exgrpo.tools.bench import FLOOR, PLAIN, LossInputs, full_logits, main, make_problem, measure, plain
from exgrpo.tools.timing import Shape
from tests.test_extras import HIDDEN, with_torch_alone

TINY = ("--tokens", "16", "--hidden", "8", "--vocabulary", "60", "--dtype", "fp32")
CPU = torch.device("cpu")


def test_with_torch_alone_it_leaves_rows_whose_gradients_are_right(tmp_path):
    options = (*TINY, "--output", tmp_path)
    done = with_torch_alone("exgrpo.tools.bench", *options, hidden=HIDDEN, TORCH_COMPILE_DISABLE="1")
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "bench.json").read_text())
    rows = {row["row"]: row for row in content["rows"]}
    assert {FLOOR, "exgrpo torch", PLAIN, f"{PLAIN}, compiled"} <= rows.keys()
    for name, row in rows.items():
        assert name in done.stdout
        assert not row["wrong"]
        # Rounding in fp32 is far below this.
        assert name == FLOOR or row["gradient_error"] < 1e-5
    ratios = sorted(a / b for a, b in zip(rows[FLOOR]["seconds"], rows[PLAIN]["seconds"], strict=True))
    median, low, high = rows[PLAIN]["floor_over_time"]
    assert ratios[0] <= low <= median <= high <= ratios[-1]


def test_a_row_with_wrong_gradients_is_named_and_one_that_fails_is_left_out():
    def halved(problem):
        return tuple(0.5 * gradient for gradient in plain(full_logits, problem))

    def broken(problem):
        raise RuntimeError("no such kernel")

    def right(problem):
        return plain(full_logits, problem)

    problem = make_problem(Shape(16, 8, 60), torch.float32, CPU)
    rows, failed = measure(problem, {PLAIN: right, "halved": halved, "broken": broken}, CPU, 0.0)
    assert {row["row"]: row["wrong"] for row in rows} == {FLOOR: False, PLAIN: False, "halved": True}
    assert next(row["gradient_error"] for row in rows if row["row"] == "halved") == pytest.approx(0.5, rel=1e-4)
    assert failed == {"broken": "RuntimeError: no such kernel"}
    assert "halved" in bench.table(rows)
    assert bench.table(rows).count("WRONG") == 1


def test_gradients_of_the_policy_loss_are_those_of_finite_differences():
    problem = make_problem(Shape(3, 4, 7), torch.float32, CPU).part(3, torch.float64)

    def loss(hidden, weight):
        ratio = (full_logits(hidden, weight, problem.target) - problem.old_log_prob).exp()
        clipped = ratio.clamp(0.8, 1.2) * problem.advantage
        return -torch.minimum(ratio * problem.advantage, clipped).mean()

    for place, gradient in enumerate(plain(full_logits, problem)):
        leaves = [x.detach().clone() for x in problem[:2]]
        leaves[place].view(-1)[5] += 1e-6
        above = loss(*leaves)
        leaves[place].view(-1)[5] -= 2e-6
        assert gradient.view(-1)[5].item() == pytest.approx((above - loss(*leaves)).item() / 2e-6, rel=1e-5, abs=1e-8)
    assert isinstance(problem, LossInputs)


def test_the_exit_status_is_1_where_a_backend_fails(tmp_path, monkeypatch, capsys):
    def failing(backend, problem):
        raise RuntimeError("its self-test failed")

    monkeypatch.setattr(bench, "fused", failing)
    monkeypatch.setattr(bench.torch, "compile", lambda function, **_: function)
    assert main([*TINY, "--output", str(tmp_path)]) == 1
    assert "no exgrpo torch: RuntimeError: its self-test failed" in capsys.readouterr().out


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main([*TINY, "--output", str(tmp_path / "file" / "x")]) == 2
    assert capsys.readouterr().err.startswith("error: --output: ")
