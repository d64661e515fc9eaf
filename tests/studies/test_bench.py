"""The referee on runs whose outcome is known: nothing changed, too many tokens, a collapse."""

from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

import studies.bench
import studies.run
from studies.bench import Options
from studies.results import ResultFile
from studies.statistics import welch
from studies.study import load_study
from tests.studies.plans import result, write

SEARCH = {"over": {"optimizer.lr": [1e-4, 2e-4, 4e-4]}, "trials": 3, "seeds": [100]}
ARMS = {
    "without": {"settings": {"experience.ratio": 0, "optimizer.lr": 2e-4}, "search": {"optimizer.passes": [1]}},
    "with": {"settings": {"optimizer.lr": 2e-4}},
}
RISE = (0.1, 0.2, 0.3)
RECIPE = "experience: {ratio: 0, mu: 0.25}\noptimizer.lr: 2.0e-4\nsteps: 7\n"


class Referee:
    """The command in a folder, with a protocol of its own and runs that come to what is asked for."""

    def __init__(self, folder, monkeypatch):
        self.folder = folder
        self.curve, self.tokens, self.ran = RISE, 100.0, []
        tasks = {name: {"recipes": [f"builtin:{name}"]} for name in ("countdown", "arithmetic")}
        changes = {"tasks": tasks, "arms": ARMS, "search": SEARCH, "seeds": [1, 2, 3, 4, 5]}
        protocol = write(folder, **changes, budget={"answers": 512, "evaluations": 2})
        self.study = load_study(protocol)
        monkeypatch.setattr(studies.bench, "PROTOCOL", protocol)
        monkeypatch.setattr(studies.run, "RESULTS", folder / "results.jsonl")
        monkeypatch.setattr(studies.run, "Run", self._run)
        monkeypatch.chdir(folder)
        (folder / "mine.yaml").write_text(RECIPE)

    def _run(self, planned, folder, core):
        self.ran.append(planned)
        outcome = self.result(planned, self.curve, self.tokens)
        nothing = {"stop": lambda: None, "tidy": lambda: None}
        return SimpleNamespace(planned=planned, core=core, result=lambda origin: outcome, **nothing)

    def result(self, planned, curve, tokens=100.0):
        """A run that differs from the others by its seed alone."""
        noise = np.random.default_rng(planned.seed).normal(scale=0.02)
        return result(planned.key, *(height + noise for height in curve), tokens=tokens)

    def stand(self, *tasks, arm="without", curve=RISE):
        """The runs of an arm on these tasks."""
        file = ResultFile(self.folder / "results.jsonl")
        study = self.study.only(tasks, [arm])
        while left := [run for run in study.known(self._height(file)) if run.key not in file.by_key]:
            file.add(self.result(left[0], curve))
        return file

    @staticmethod
    def _height(file):
        return lambda key: studies.run.height(file.by_key.get(key))

    def __call__(self, *options):
        return studies.run.main(["bench", "mine.yaml", *options])


@pytest.fixture
def referee(tmp_path, monkeypatch):
    return Referee(tmp_path, monkeypatch)


def test_a_method_that_does_nothing_is_equal_and_the_baseline_is_not_run_again(referee, capsys):
    standing = referee.stand("countdown", "arithmetic").by_key.keys()
    assert referee("--workers", "1") == 0
    shown = capsys.readouterr().out
    assert "Equal: no difference between mine and without that these runs can show: Pass@1 +0.000" in shown
    assert "collapsed" not in shown
    assert "times the tokens" not in shown
    assert {run.arm for run in referee.ran} == {"mine"}
    assert {run.seed for run in referee.ran} == {1, 2, 3, 4, 5, 100}
    assert not standing & {run.key for run in referee.ran}
    assert {run.config.steps for run in referee.ran} == {8}, "the recipe's own steps do not count"
    for ending in ("md", "svg", "jsonl"):
        assert (referee.folder / "runs" / "bench" / f"mine.{ending}").exists()
    assert "Equal: no difference" in (referee.folder / "runs" / "bench" / "mine.md").read_text()
    before = len(referee.ran)
    assert referee() == 0
    assert len(referee.ran) == before, "nothing is run twice"


def test_it_is_held_against_the_preset_too(referee, monkeypatch, capsys):
    monkeypatch.setattr(studies.bench, "PRESET", "with")
    referee.stand("countdown", "arithmetic")
    referee.stand("countdown", arm="with", curve=(0.1, 0.3, 0.5))
    referee.curve = (0.1, 0.3, 0.4)
    assert referee() == 0
    shown = capsys.readouterr().out
    assert "Better: mine is above without: Pass@1 +0.100" in shown
    assert "Worse: mine is below with: Pass@1 -0.100" in shown
    assert {run.task for run in referee.ran} == {"countdown"}, "the preset has no runs of the other task"
    assert {run.arm for run in referee.ran} == {"mine"}


def test_one_that_generates_more_or_less_than_it_says_is_told(referee, capsys):
    """And gains nothing by it; without runs of the baseline there is no verdict."""
    assert referee() == 2
    assert "has no complete runs of without" in capsys.readouterr().err
    referee.stand("countdown")
    referee.tokens = 30.0
    assert referee("--name", "less") == 0
    shown = capsys.readouterr().out
    assert "it generated 0.30 of the tokens that it was given, and is compared up to there: --asks 0.3" in shown
    # Twice the tokens, and the same height for the same tokens: what comes after the budget is higher.
    referee.curve, referee.tokens = (0.1, 0.3, 0.5), 200.0
    assert referee() == 0
    shown = capsys.readouterr().out
    assert "On countdown it generated 2.00 times the tokens that it was given: its steps ask more than --asks" in shown
    assert "Equal: " in shown
    referee.curve = (0.1, 0.4, 0.7)
    assert referee("--name", "good") == 0
    assert "Better: good is above without: Pass@1 +0.100" in capsys.readouterr().out


def test_one_that_collapses_is_seen(referee, capsys):
    referee.stand("countdown")
    referee.curve = (0.1, 0.4, 0.05)
    assert referee() == 0
    shown = capsys.readouterr().out
    assert "On countdown 5 of 5 runs collapsed: their Pass@1 ends below 50% of its highest value." in shown
    assert "Worse: mine is below without" in shown


def test_quick_takes_three_learning_rates_and_tasks_that_stand(referee, monkeypatch, capsys):
    monkeypatch.setattr(studies.bench, "QUICK", ("countdown",))
    referee.stand("countdown", "arithmetic")
    assert referee("--quick") == 0
    assert {run.task for run in referee.ran} == {"countdown"}
    assert {run.config.optimizer.lr for run in referee.ran if run.seed == 100} == {1e-4, 2e-4, 4e-4}
    assert referee("--plan") == 0
    assert "of 16 runs are done" in capsys.readouterr().out


def test_functions_and_own_values_are_taken_and_a_foreign_option_is_refused(referee, capsys):
    referee.stand("countdown")
    (referee.folder / "own.py").write_text(
        "from exgrpo.train.replay import Priority\n\n\n"
        "def first(candidates, options):\n    return Priority(0 * candidates.count)\n"
    )
    (referee.folder / "mine.yaml").write_text("optimizer.lr: 3.0e-4\n")
    method = studies.bench.method_of(Options(method=("mine.yaml", "own.py:first")), referee.folder)
    assert method == {"optimizer.lr": 3e-4, "experience.prioritise": f"{referee.folder}/own.py:first"}
    assert studies.run.main(["bench", "mine.yaml", "own.py:first"]) == 0
    assert 3e-4 in {run.config.optimizer.lr for run in referee.ran}
    for text, name in (("policy.path: elsewhere", "policy.path"), ("evaluation.temperature: 0.1", "evaluation.temp")):
        (referee.folder / "mine.yaml").write_text(text)
        assert referee("--name", "other") == 2
        assert f"leave out {name}" in capsys.readouterr().err
    assert referee("--name", "with") == 2
    assert "the protocol has an arm of this name" in capsys.readouterr().err


def test_the_intervals_of_a_verdict_are_those_of_welch_and_hold_what_they_say():
    rng = np.random.default_rng(0)
    ours, theirs = rng.normal(1, 2, size=5), rng.normal(0, 1, size=7)
    found = welch([ours], [theirs], 0.95)
    expected = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    missed = [welch(*([rng.normal(size=5) for _ in range(2)] for _ in "ab"), 0.975).excludes(0) for _ in range(1000)]
    assert np.mean(missed) < 0.035
    assert welch([np.ones(5)], [np.ones(5)], 0.95).excludes(0) is False
    assert str(welch([np.ones(4)], [np.zeros(5)], 0.95)) == "1.000"
