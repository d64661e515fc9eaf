"""A question is known by what it asks: a file with each row twenty times gives the run of the file with each once."""

import json
import random
from pathlib import Path

import pytest

from exgrpo.tools.experience.sources import open_run
from exgrpo.train.config.recipe import DEFAULT_RUN
from exgrpo.train.data.tasks.arithmetic import generate
from tests.train.launch import MAIN, completed, launch
from tests.train.run.test_run import SMALL, records, untimed

QUESTIONS = COPIES = 20
STEPS = 6


def repeated(rows):
    """The rows, and among and behind them, in any order, copies of those before."""
    draw, found = random.Random(0), []
    for number, row in enumerate(rows, start=1):
        found += [row, *(rows[draw.randrange(number)] for _ in range(3))]
    rest = [row for row in rows for _ in range(COPIES - found.count(row))]
    draw.shuffle(rest)
    return found + rest


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """By the number of copies, the folder of a run and what it has printed."""
    problems = generate("train", QUESTIONS, seed=3)
    rows = [{"question": problem.question, "answer": problem.answer} for problem in problems]
    found = {}
    for copies in (1, COPIES):
        folder: Path = tmp_path_factory.mktemp("copies")
        written = rows if copies == 1 else repeated(rows)
        assert len(written) == QUESTIONS * copies
        (folder / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
        (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
        arguments = (
            *(*SMALL, f"--recipe={DEFAULT_RUN}", f"--steps={STEPS}", f"--output.folder={folder}/runs"),
            *(f"--data.train={folder}/mine.jsonl", f"--data.test={folder}/test.jsonl", "--data.train_limit=18"),
        )
        found[copies] = folder / "runs" / "small", completed(MAIN, *arguments).stdout
    return found


def test_the_metrics_and_answers_are_the_same(runs):
    (once, _), (often, _) = runs[1], runs[COPIES]
    assert untimed(once) == untimed(often)
    assert sum(record.get("replayed", 0) for record in records(often)) > 0
    assert (once / "samples.jsonl").read_text() == (often / "samples.jsonl").read_text()


def test_the_stored_answers_are_the_same(runs):
    once, often = (open_run(folder) for folder, _ in (runs[1], runs[COPIES]))
    assert len(once) == len(often) > 0
    assert once.questions.fingerprint == often.questions.fingerprint
    assert [one.response.tolist() for one in once.answers] == [one.response.tolist() for one in often.answers]


def test_the_line_at_the_start_counts_rows_and_questions(runs):
    printed = [" ".join(runs[copies][1].split()) for copies in (1, COPIES)]
    assert " 18 questions from " in printed[0]
    assert "400 rows, 18 questions from " in printed[1]
    for text in printed:
        assert "mine.jsonl, 2 more left out by data.train_limit" in text
        assert text.count("3 training questions are among the held-out ones of test, the first ") == 1


def test_a_run_goes_on_with_the_same_questions(runs):
    (once, _), (often, _) = runs[1], runs[COPIES]
    for folder in (once, often):
        done = launch(MAIN, f"--resume={folder}", f"--steps={STEPS + 1}")
        assert done.returncode == 0, done.stderr
    assert untimed(once)[-1] == untimed(often)[-1]
