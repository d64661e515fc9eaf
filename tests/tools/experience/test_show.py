"""What a person sees of stored experience: counts, distributions, texts; and a run that begins with it."""

import numpy as np
import pytest

from exgrpo.tools.experience import __main__ as program
from exgrpo.tools.experience.__main__ import main
from exgrpo.tools.experience.show import counts, distributions
from exgrpo.tools.experience.sources import open_run
from tests.programs import python
from tests.tools.experience.runs import QUESTIONS, K, make_run, questions, some
from tests.train.batches import same, stored_rows
from tests.train.files import write_rows
from tests.train.launch import MAIN, completed


@pytest.fixture
def say(capsys, monkeypatch):
    """The program in this process; gives its status, what it prints and its errors."""
    monkeypatch.setenv("COLUMNS", "120")

    def run(*arguments):
        status = program.main([str(argument) for argument in arguments])
        return status, *capsys.readouterr()

    return run


def test_columns_say_what_is_stored(tmp_path):
    run = open_run(make_run(tmp_path, some()))
    numbers = {"stored trajectories": 7, "log-probs by: trainer": 4, "log-probs by: engine": 3}
    numbers |= {"questions with stored trajectories": 3, "questions in all": QUESTIONS, "questions that have left": 1}
    assert counts(run) == numbers
    found = distributions(run)
    assert found["age"].tolist() == [2, 4, 2, 4, 2, 4, 2]
    assert found["replays"].tolist() == list(range(7))
    np.testing.assert_allclose(found["group accuracy"], [(1 + i % 2) / 3 for i in range(7)])
    assert found["tokens"].tolist() == [len(one.response) for one in some()]
    assert found["reward"].tolist() == [1, 1, 1, 1, 1, 1, 0]
    assert found["success count"].tolist() == [2, 2, 2]
    assert found["answers"].tolist() == [3, 2, 2]
    assert found["solutions"].tolist() == [1, 1, 1]


def test_the_program_prints_tables_and_the_answers_to_a_question_and_exports(tmp_path, say):
    run = make_run(tmp_path / "run", some())
    status, out, _ = say("show", run)
    assert status == 0
    assert "7  stored trajectories" in out
    status, out, _ = say("show", run, "--question", "0")
    first = some()[0]
    assert status == 0
    assert questions()[0].text in out
    assert f"reward 1, step 3, replayed 0 times, mean log-prob {first.log_prob.mean():.3f}, by trainer" in out
    assert f"<think>0</think>\\boxed{{{questions()[0].gold}}}" in out
    assert "<|end|>" not in out
    assert "question 4: 0 stored answers" in say("show", run, "--question", "4")[1]
    status, out, _ = say("export", run, tmp_path / "set")
    assert (status, out) == (0, f"7 trajectories in {tmp_path / 'set'}\n")
    assert "0  stored trajectories" in say("show", make_run(tmp_path / "empty", []))[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["list"], "list is no command; use one of show, export, import"),
        (["show", "none"], "none: there is no such folder of a run"),
        (["show", "empty"], "empty has no checkpoint"),
        (["show", "run", "--question", "99"], "there is no question 99: the run has the questions 0 to 5"),
        (["import", "some.jsonl", "set", "--tokenizer=./none"], "--tokenizer ./none: "),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, say, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    make_run(tmp_path / "run", some())
    write_rows(tmp_path / "some.jsonl", [{"question": "1", "response": "1"}])
    status, _, told = say(*arguments)
    assert status == 2
    assert message in told
    assert told.startswith("error: ")
    assert told.count("\n") == 1
    assert not (tmp_path / "set").exists()


def test_the_package_and_the_tables_need_neither_torch_nor_a_tokenizer(tmp_path):
    run = make_run(tmp_path / "run", some())
    heavy = ("torch", "transformers", "datasets", "matplotlib", "pyarrow")
    script = (
        f"import sys; from exgrpo.tools.experience.__main__ import main; main(['show', {str(run)!r}]); "
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    assert python("-c", script).splitlines()[-1] == "[]"


ARGUMENTS = (
    *("--steps=1", "--questions=3", f"--rollout.samples={K}", f"--data.train_limit={QUESTIONS}", "--data.test=None"),
    *("--experience.start_pass_rate=0", "--optimizer.minibatches=1", "--rollout.engine=transformers"),
    *("--checkpoint.every=1", "--output.save_model=False", "--output.trackers", "--experience.expire"),
)


@pytest.mark.long
def test_a_run_begins_with_the_experience_of_another(tmp_path):
    source = make_run(tmp_path / "run", some())
    assert main(["export", str(source), str(tmp_path / "set")]) == 0
    folders = (f"--output.folder={tmp_path}", f"--experience.start={tmp_path / 'set'}")
    done = completed(MAIN, *ARGUMENTS, "--output.name=next", *folders, ranks=2)
    assert "the experience starts with 7 answers to 3 questions from " in " ".join(done.stdout.split())
    found = open_run(tmp_path / "next")
    stored = stored_rows(found.answers)
    assert all(any(same(one, other, besides=["step"]) for other in stored if other.step == 0) for one in some())
    assert found.answers.replays.any()

    # A run that goes on has what its checkpoint has, and needs the file no more.
    (tmp_path / "set").rename(tmp_path / "gone")
    done = completed(MAIN, f"--resume={tmp_path / 'next'}", "--steps=2", ranks=2)
    assert "the experience starts with" not in " ".join(done.stdout.split())
    assert len(open_run(tmp_path / "next")) >= len(stored)
