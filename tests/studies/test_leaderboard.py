"""The leaderboard: what it says of runs whose outcome is known, and which entries it refuses."""

import json
from dataclasses import replace

import pytest

import studies.leaderboard
import studies.run
from studies.leaderboard import ENTRIES, PAGE, PROGRAM, page
from studies.results import ResultFile
from studies.run import RESULTS
from studies.study import key_of_settings, settings_of
from tests.studies.test_bench import Referee


class Board(Referee):
    """A referee whose runs have the settings that a line of results has, and the leaderboard of its protocol."""

    def result(self, planned, curve, tokens=100.0):
        run = super().result(planned, curve, tokens)
        run.curves["step"] *= planned.config.steps / run.curves["step"][-1]
        settings = json.loads(json.dumps(settings_of(planned.config)))
        return replace(run, settings=settings, date="2026-01-0" + "13"[planned.arm == "mine"])

    def rows(self):
        """The rows of the page, by method."""
        assert studies.run.main(["leaderboard", "--entries", "runs/bench", "--output", "page.md"]) == 0
        lines = (self.folder / "page.md").read_text().splitlines()
        cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
        return {of[0]: dict(zip(cells[0], of, strict=True)) for of in cells}


@pytest.fixture
def board(tmp_path, monkeypatch):
    monkeypatch.setattr(studies.leaderboard, "OLDER", ())
    board = Board(tmp_path, monkeypatch)
    board.stand("countdown")
    return board


def test_the_committed_page_is_what_the_committed_results_give():
    assert PAGE.read_text() == page(ResultFile(RESULTS), ENTRIES), f"the results have changed: {PROGRAM}"


def test_an_entry_that_changes_nothing_is_equal_and_a_higher_one_is_better(board, capsys):
    assert list(board.rows()) == ["method", "---", "without"]
    assert board() == 0
    board.curve = (0.1, 0.4, 0.7)
    (board.folder / "mine.yaml").write_text("experience: {ratio: 0, mu: 0.3}\noptimizer.lr: 2.0e-4\n")
    assert board("--name", "good") == 0
    rows = board.rows()
    assert list(rows) == ["method", "---", "without", "good", "mine"], "the baseline first, then the highest"
    assert [rows[name]["verdict"] for name in ("without", "good", "mine")] == ["the baseline", "better", "equal"]
    assert rows["mine"]["Pass@1"].startswith("+0.000 (-0.0")
    assert rows["good"]["Pass@1"].startswith("+0.400 (+0.3")
    assert rows["good"]["tokens"].startswith("0.33 (")
    assert (rows["mine"]["generated"], rows["mine"]["seeds"]) == ("1.00", "5")
    assert rows["mine"]["runs"] == "2026-01-03, c0ffee, a processor"
    text = (board.folder / "page.md").read_text()
    assert "Its newest run is of 2026-01-03." in text
    assert "Not complete, and so left out: with." in text
    assert "- [good](../studies/entries/good.jsonl) on countdown: `questions: 8`, " in text
    assert "`experience.mu: 0.3`" in text


def test_without_the_baseline_there_is_no_verdict(board):
    assert board() == 0
    (board.folder / "results.jsonl").unlink()
    assert board.rows()["mine"]["verdict"] == ""
    assert "There are no verdicts before the baseline, without, is complete." in (board.folder / "page.md").read_text()


def edited(plain, **changes):
    """A line with other settings, and the key of these."""
    settings = {**plain["settings"], **{name.replace("__", "."): value for name, value in changes.items()}}
    return {**plain, "settings": settings, "key": key_of_settings(settings)}


WRONG = {
    "line 2: on countdown, the protocol has another rollout.max_tokens": lambda of: edited(of, rollout__max_tokens=99),
    "line 2: the protocol's budget has steps 8 and evaluation.every 4": lambda of: edited(of, evaluation__every=1),
    "line 2: seed 77 is none of the protocol's": lambda of: edited(of, seed=77),
    "line 2: the line before it has another method: experience.mu": lambda of: edited(of, experience__mu=0.4),
    "line 2: another run on countdown that counts has another optimizer.lr": lambda of: edited(of, optimizer__lr=4e-4),
    "line 2: its curves do not end at its last step, 9": lambda of: edited(of, steps=9),
    "line 2: unknown key 'stepps'; did you mean 'steps'?": lambda of: edited(of, stepps=9),
    "line 2: its key is not that of its settings": lambda of: {**of, "settings": {}},
    "line 2: it has not as many numbers": lambda of: {**of, "curves": {**of["curves"], "pass_at_k": [None]}},
    "line 2: processor: String should match": lambda of: {**of, "processor": "<b>|"},
    "line 2 is no result": lambda of: {},
    "on countdown the runs of seed 2 are missing": lambda of: edited(of, seed=1),
    "line 8: one more than the 3 trials of the protocol": lambda of: edited(of, seed=100, optimizer__lr=3e-4),
}
"""What is said of an entry whose second line is changed so."""


def test_an_entry_that_is_not_of_the_protocol_is_refused_in_one_line(board, capsys):
    assert board() == 0
    place = board.folder / "runs" / "bench" / "mine.jsonl"
    # The runs that count come first, by their seeds.
    lines = sorted(map(json.loads, place.read_text().splitlines()), key=lambda of: of["settings"]["seed"])
    for message, change in WRONG.items():
        place.write_text("".join(json.dumps(of) + "\n" for of in (lines[0], change(lines[1]), *lines[2:])))
        capsys.readouterr()
        assert studies.run.main(["leaderboard", "--entries", "runs/bench", "--output", "page.md"]) == 2, message
        said = capsys.readouterr().err
        assert f"mine.jsonl: {message}" in said
        assert said.count("\n") == 1
