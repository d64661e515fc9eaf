"""The file of results."""

import numpy as np
import pytest

from exgrpo.train.common.errors import OutputError
from exgrpo.train.metrics.report.runs import load_run
from studies.results import ResultFile, curves_of
from tests.studies.plans import result
from tests.tools.report.pages import make_run


def test_a_result_comes_back(tmp_path):
    given = result("a", 0.123456789, 0.2, seed=3)
    file = ResultFile(tmp_path / "deep" / "runs.jsonl")
    file.add(given)
    (found,) = ResultFile(file.path).by_key.values()
    assert found.settings == {"evaluation.samples": 8, "seed": 3}
    assert {name: getattr(found, name) for name in ("commit", "date", "processor", "versions")} == {
        name: getattr(given, name) for name in ("commit", "date", "processor", "versions")
    }
    for name, curve in given.curves.items():
        np.testing.assert_allclose(found.curves[name], curve, rtol=5e-5)  # five digits are kept
        np.testing.assert_array_equal(file.by_key["a"].curves[name], found.curves[name])


def test_what_a_killed_program_did_not_finish_gives_way(tmp_path):
    path = tmp_path / "runs.jsonl"
    ResultFile(path).add(result("a", 0.1))
    whole = path.read_bytes()
    for rest in (whole[:-1], whole[: len(whole) // 2], b"\xff\xff"):
        path.write_bytes(whole + rest)
        file = ResultFile(path)
        assert list(file.by_key) == ["a"]
        file.add(result("b", 0.2))
        file.add(result("c", 0.3))
        assert list(ResultFile(path).by_key) == ["a", "b", "c"]


@pytest.mark.parametrize("line", ["{", "[]", '{"key": "a"}'])
def test_a_damaged_line_is_named(tmp_path, line):
    path = tmp_path / "runs.jsonl"
    path.write_text(f"{result('a', 0.1).to_line()}\n{line}\n")
    with pytest.raises(OutputError, match="line 2 is no result"):
        ResultFile(path)


def test_curves_are_costs_scores_and_means_between_evaluations(tmp_path):
    run = make_run(
        tmp_path / "run",
        [
            {"step": 0, "kind": "evaluation", "test/pass_rate": 0.1, "pass_at/4": 0.3, "distinct_at/4": 0.5},
            {"step": 1, "kind": "training", "generated_tokens": 10, "gradient_tokens": 4, "seconds": 2, "entropy": 1.0},
            {"step": 2, "kind": "training", "generated_tokens": 30, "gradient_tokens": 5, "seconds": 3, "entropy": 2.0},
            {"step": 2, "kind": "evaluation", "test/pass_rate": 0.2, "pass_at/4": 0.4, "distinct_at/4": 0.6},
            {"step": 3, "kind": "training", "generated_tokens": 60, "gradient_tokens": 6, "seconds": 4, "entropy": 4.0},
            {"step": 3, "kind": "evaluation", "test/pass_rate": 0.3, "pass_at/4": 0.5, "distinct_at/4": 0.7},
        ],
    )
    curves = curves_of(load_run(run, "run").columns, 4)
    expected = {
        "step": [0, 2, 3],
        "pass_at_1": [0.1, 0.2, 0.3],
        "pass_at_k": [0.3, 0.4, 0.5],
        "distinct_at_k": [0.5, 0.6, 0.7],
        "generated_tokens": [0, 30, 60],
        "gradient_tokens": [0, 9, 15],
        "seconds": [0, 5, 9],
        "train/entropy": [np.nan, 1.5, 4.0],
        "train/retired": [np.nan] * 3,
    }
    for name, values in expected.items():
        np.testing.assert_allclose(curves[name], values, err_msg=name)
