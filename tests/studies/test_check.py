"""Doing runs again."""

from types import SimpleNamespace

import numpy as np
import pytest

import studies.check
from studies.check import gap
from studies.results import ResultFile
from studies.study import load_study
from tests.studies.plans import result, write


@pytest.fixture
def again(tmp_path, monkeypatch):
    """A study whose results are there, and what its runs come to this time."""
    path, heights = write(tmp_path), {}
    study, file = load_study(path), ResultFile(tmp_path / "r.jsonl")
    for run in study.known(lambda key: None):
        heights[run.key] = 0.123456789 * (run.seed + 1)
        file.add(result(run.key, 0.1, heights[run.key]))

    def scripted(planned, folder, core):
        assert folder.is_dir()
        return SimpleNamespace(result=lambda origin: result(planned.key, 0.1, heights[planned.key]))

    monkeypatch.setattr(studies.check, "Run", scripted)
    return SimpleNamespace(
        heights=heights,
        main=lambda *options: studies.check.main([str(path), "--results", str(tmp_path / "r.jsonl"), *options]),
    )


def test_equal_runs_are_equal(again, capsys):
    assert again.main("--runs", "4") == 0
    assert capsys.readouterr().out.count("none") == 4


def test_a_run_that_came_to_something_else_is_named(again, capsys):
    again.heights.update({key: height * 2 for key, height in list(again.heights.items())[:1]})
    assert again.main("--runs", "4") == 2
    told = capsys.readouterr()
    assert "error: 1 of 4 runs came to something else" in told.err
    assert "0.5" in told.out
    assert told.out.count("none") == 3


def test_without_results_there_is_nothing_to_check(tmp_path, capsys):
    assert studies.check.main([str(write(tmp_path)), "--results", str(tmp_path / "none.jsonl")]) == 2
    assert "has no run of" in capsys.readouterr().err


def test_the_gap_is_the_largest_relative_difference_of_what_is_not_timed():
    before = result("a", 0.1, 0.2)
    assert gap(before, before)[0] == 0
    after = result("a", 0.1, 0.2)
    after.curves["seconds"][:] = 7
    assert gap(before, after)[0] == 0
    after.curves["train/entropy"] = np.array([np.nan, 2.0])
    assert gap(before, after) == (0.5, "train/entropy")
    after.curves["train/entropy"] = np.array([1.0, 1.0])  # where there was none
    assert gap(before, after)[0] == np.inf
    after.curves["step"] = np.arange(3.0)
    assert gap(before, after)[0] == np.inf
    assert gap(result("a", 0.12345), result("a", 0.12346))[0] == 0, "they may be the same, rounded apart"
    tokens = [result("a", 0.1, 0.2, tokens=spent) for spent in (1e6, 1e6 + 1)]
    assert gap(*tokens)[0] == pytest.approx(1e-6), "the file has whole numbers as they are"
