"""What a person sees of stored experience: counts, distributions, texts."""

import subprocess
import sys

import numpy as np
import pytest

from exgrpo.tools.experience import program
from exgrpo.tools.experience.export import export
from exgrpo.tools.experience.show import counts
from exgrpo.tools.experience.sources import FileExperience, open_run
from tests.tools.experience.runs import QUESTIONS, make_run, questions, some


@pytest.fixture
def say(capsys, monkeypatch):
    """The program in this process; gives its status, what it prints and its errors."""
    monkeypatch.setenv("COLUMNS", "120")

    def run(*arguments):
        status = program.main([str(argument) for argument in arguments])
        return status, *capsys.readouterr()

    return run


def test_columns_say_what_is_stored(tmp_path):
    overview = open_run(make_run(tmp_path, some())).overview()
    assert counts(overview) == {
        "stored trajectories": 7,
        "questions with stored trajectories": 3,
        "questions in all": QUESTIONS,
        "questions that have left": 1,
        "log-probs by: trainer": 4,
        "log-probs by: engine": 3,
    }
    found = overview.distributions
    assert found["age"].tolist() == [2, 4, 2, 4, 2, 4, 2]
    assert found["replays"].tolist() == list(range(7))
    np.testing.assert_allclose(found["group accuracy"], [(1 + i % 2) / 3 for i in range(7)])
    assert found["tokens"].tolist() == [len(one.response) for one in some()]
    assert found["reward"].tolist() == [1, 1, 1, 1, 1, 1, 0]
    assert found["success count"].tolist() == [2, 2, 2]
    assert found["answers"].tolist() == [3, 2, 2]
    assert found["solutions"].tolist() == [1, 1, 1]


def test_a_file_shows_what_the_run_shows(tmp_path):
    run = open_run(make_run(tmp_path / "run", some()))
    export(tmp_path / "run", tmp_path / "set")
    file = FileExperience(tmp_path / "set")
    ours, theirs = run.overview(), file.overview()
    assert theirs.question.tolist() == ours.question.tolist()
    for name in ("replays", "group accuracy", "tokens", "reward", "answers", "solutions"):
        assert theirs.distributions[name].tolist() == ours.distributions[name].tolist()
    assert theirs.distributions["step"].tolist() == [one.step for one in some()]
    assert theirs.behaviour == ours.behaviour
    for a, b in ((run.question(index), file.question(index)) for index in (0, 2)):
        assert (a.text, a.gold, len(a.answers)) == (b.text, b.gold, len(b.answers))
        for one, other in zip(a.answers, b.answers, strict=True):
            assert one.label == other.label
            assert one.text == other.text


def test_the_program_prints_tables_and_the_answers_to_a_question_and_exports(tmp_path, say):
    run = make_run(tmp_path / "run", some())
    status, out, _ = say("show", run)
    assert status == 0
    assert f"{run}, step 5" in out
    assert "7  stored trajectories" in out
    for name in ("age", "replays", "group accuracy", "tokens", "success count", "solutions"):
        assert name in out
    status, out, _ = say("show", run, "--question", "0")
    first = some()[0]
    assert status == 0
    assert questions()[0].text in out
    assert f"right answer: {questions()[0].gold}" in out
    assert f"reward 1, step 3, replayed 0 times, mean log-prob {first.log_prob.mean():.3f}, by trainer" in out
    assert f"<think>0</think>\\boxed{{{questions()[0].gold}}}" in out
    assert "cut at the length limit" in out
    assert "<|end|>" not in out
    assert "question 4: 0 stored answers" in say("show", run, "--question", "4")[1]
    status, out, _ = say("export", run, tmp_path / "set")
    assert (status, out) == (0, f"7 trajectories in {tmp_path / 'set'}\n")
    status, out, _ = say("show", tmp_path / "set" / "data" / "train-00000-of-00001.parquet")
    assert status == 0
    assert "7  stored trajectories" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no argument is neither a command (show, export, import) nor a run"),
        (["list"], "list is neither a command (show, export, import) nor a run"),
        (["show"], "(see python -m exgrpo.tools.experience show --help)"),
        (["show", "none"], "none: there is no such folder of a run"),
        (["show", "none", "--qestion", "1"], "did you mean --question?"),
        (["show", "empty"], "empty has no checkpoint, where experience is stored: a run writes one every checkpoint"),
        (["export", "empty", "out"], "empty has no checkpoint"),
        (["show", "run", "--question", "99"], "there is no question 99: the run has the questions 0 to 5"),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, say, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    make_run(tmp_path / "run", some())
    status, _, told = say(*arguments)
    assert status == 2
    assert message in told
    assert told.startswith("error: ")
    assert told.count("\n") == 1


def test_the_package_and_the_tables_need_neither_torch_nor_a_tokenizer(tmp_path):
    run = make_run(tmp_path / "run", some())
    heavy = ("torch", "transformers", "datasets", "matplotlib", "pyarrow")
    script = (
        f"import sys; from exgrpo.tools.experience.program import main; main(['show', {str(run)!r}]); "
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
