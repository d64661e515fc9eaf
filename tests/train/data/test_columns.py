"""Columns of rows, from a file to the reward that takes them."""

import json
from contextlib import ExitStack

import pytest

from exgrpo.tools.evaluate import __main__ as evaluate
from exgrpo.tools.evaluate.evaluation import load
from exgrpo.tools.evaluate.options import parse_options
from exgrpo.train.common.errors import ConfigError, DataError
from exgrpo.train.config.recipe import parse_args
from exgrpo.train.data.files import read_rows
from exgrpo.train.data.prompts import PromptFormat
from exgrpo.train.data.questions import contradictions, question_set
from exgrpo.train.reward.contract import Columns
from exgrpo.train.run.startup_checks import check_startup
from tests.train.configs import configured
from tests.train.data.test_questions import PAPER_ROW, TOKENIZER
from tests.train.data.test_questions import load as questions_of
from tests.train.files import write_rows
from tests.train.reward.conftest import grade

ROWS = [{"problem": f"p{i}", "answer": str(i), "level": i, "huge": "x" * 100} for i in range(3)]
TAKEN = Columns(("question", "level"), ("bonus",), taker="reward 'mine.py:score'")


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv"])
def test_rows_keep_the_columns_that_are_taken(tmp_path, suffix):
    path = write_rows(tmp_path / f"mine.{suffix}", ROWS)
    found = read_rows(path, split="train", limit=None, seed=0, columns=TAKEN)
    level = str if suffix == "csv" else int
    assert [row.columns for row in found] == [{"question": f"p{i}", "level": level(i)} for i in range(3)]
    prompts = PromptFormat(max_prompt_tokens=100)
    assert [q.columns for q in question_set(path, found, TOKENIZER, prompts)] == [row.columns for row in found]
    assert all(row.columns == {} for row in read_rows(path, split="train", limit=None, seed=0))
    (whole, *_) = questions_of(path, TOKENIZER, max_prompt_tokens=100)
    assert whole.columns.keys() == {*ROWS[0], "question"}


def test_nested_columns_and_the_question_of_rows_of_the_paper(tmp_path):
    path = write_rows(tmp_path / "mine.parquet", [PAPER_ROW])
    (row,) = read_rows(path, split="train", limit=None, seed=0, columns=Columns(("question", "extra_info")))
    assert row.columns == {"question": "What is 6 * 7?", "extra_info": PAPER_ROW["extra_info"]}


def test_generated_questions_have_columns():
    columns = Columns(("question", "edges"))
    (row,) = read_rows("builtin:colouring", split="test", limit=1, seed=0, columns=columns)
    assert all(edge in row.columns["question"] for edge in row.columns["edges"])
    with pytest.raises(DataError, match=r"^builtin:colouring: a question has no column 'levels', .* its columns are "):
        read_rows("builtin:colouring", split="test", limit=1, seed=0, columns=Columns(("levels",)))


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv"])
def test_a_run_reads_the_columns_that_its_reward_takes(tmp_path, suffix):
    reward = tmp_path / "mine.py"
    reward.write_text("def score(response, gold, *, question, level): return int(level) + (response == question)\n")
    path = tmp_path / f"rows.{suffix}"
    values = {"data": {"train": write_rows(path, ROWS), "test": None, "train_limit": None}}
    with ExitStack() as resources:
        found = check_startup(configured(values, reward={"function": f"{reward}:score", "workers": 1}), resources)
        assert not any("huge" in row.columns for row in found.train[0])
        answers = [("p1", row.gold, row.columns) for row in found.train[0]]
        assert grade(found.grader, f"{reward}:score", answers).reward == (0.0, 2.0, 2.0)
        write_rows(path, [{"question": "q", "answer": "1", "levels": 1}])
        message = "no column 'level', which the reward '.*mine.py:score' takes; its columns are '(answer, )?question"
        with pytest.raises(DataError, match=message):
            check_startup(configured(values, reward={"function": f"{reward}:score", "workers": 1}), resources)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv"])
@pytest.mark.parametrize(
    ("row", "names"),
    [
        ({"problem": "q", "final_answer": "#### 7"}, {"answer": "final_answer"}),
        ({"Question": "q", "Answer": "7"}, {"question": "Question", "answer": "Answer"}),
        ({"prompt": "q", "response": "long", "answer": "7"}, {"question": "prompt"}),
        ({"question": "an id", "text": "q", "answer": "7"}, {"question": "text"}),
        ({"question": "q", "answer": "long", "key": "7"}, {"answer": "key"}),
        ({"question": "q", "answer": "why \\boxed{7}"}, {"solution": "answer"}),
    ],
)
def test_columns_may_have_other_names(tmp_path, suffix, row, names):
    path = write_rows(tmp_path / f"mine.{suffix}", [row])
    (found,) = read_rows(path, split="train", limit=None, seed=0, names=names, columns=Columns(("question",)))
    assert (found.question, found.gold, found.columns) == ("q", "7", {"question": "q"})


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv"])
def test_other_names_are_asked_for_where_the_usual_ones_are_missing(tmp_path, suffix):
    remedy = "--data.columns question NAME answer NAME says what they are called"
    for row, said in (
        ({"problem": "q", "final_answer": "7"}, "answer.* solution; it.* problem, final_answer"),
        ({"Question": "q", "Answer": "7"}, "prompt, question, problem; it.* Question, Answer"),
    ):
        with pytest.raises(DataError, match=f"{said}.*{remedy}"):
            read_rows(write_rows(tmp_path / f"mine.{suffix}", [row]), split="train", limit=None, seed=0)
    path = write_rows(tmp_path / f"mine.{suffix}", [{"problem": "q", "final_answer": "7"}])
    with pytest.raises(DataError, match=r"no column 'Answr', which data.columns names; its columns are 'problem, "):
        read_rows(path, split="train", limit=None, seed=0, names={"answer": "Answr"})


def test_a_run_and_its_evaluation_read_columns_by_their_names(tmp_path):
    for name, row in (("a", {"Q": "q", "A": "7"}), ("b", {"question": "q", "final": "7"}), ("c", ROWS[0])):
        write_rows(tmp_path / f"{name}.jsonl", [row])
    a, b, c = (f"{tmp_path}/{name}.jsonl" for name in "abc")
    recipe = tmp_path / "mine.yaml"
    sources = [{"source": b, "columns": {"answer": "final"}}, {"source": c, "columns": {}}]
    of_data = {"train": [a, b, "builtin:arithmetic"], "train_limit": 1, "test": c, "sources": sources}
    recipe.write_text(json.dumps({"policy.path": "builtin:arithmetic", "data": of_data}))
    config = parse_args(["--recipe", str(recipe), "--data.columns", "question", "Q", "answer", "A"])
    with ExitStack() as resources:
        found = check_startup(config, resources)
    assert [[row.gold for row in rows] for rows in found.train[:2]] == [["7"], ["7"]]
    assert [row.question for row in found.held_out["test"][0]] == ["p0"]
    named = ["--data.columns", "question", "Q", "answer", "A"]
    asked = parse_options(["builtin:arithmetic", "--recipe", str(recipe), "--data.test", a, *named])
    evaluate.check_startup(asked)
    (question,), _ = load(asked, TOKENIZER, progress=False)
    assert question.gold == "7"
    with pytest.raises(ConfigError, match=r"data.columns"):
        parse_args(["--recipe", str(recipe), "--data.columns", "qestion", "Q"])


def test_a_question_with_two_answers_is_told_once(tmp_path):
    rows = [("[b]1 + 1?", "2"), ("other", "5"), ("[b]1 + 1?", "3"), ("other", "6"), ("[b]1 + 1?", "4")]
    rows += [("same", "1"), ("same", "1")]
    path = write_rows(tmp_path / "mine.jsonl", [{"question": question, "answer": answer} for question, answer in rows])
    loaded = questions_of(path, TOKENIZER, max_prompt_tokens=100)
    said = contradictions(loaded)
    assert said.startswith("2 questions have different answers in different rows, such as '[b]1 + 1?' of 'mine': '2'")
    assert contradictions(list(loaded)[:4:3]) == contradictions(list(loaded)[4:]) == ""
    assert contradictions([*list(loaded)[:3:2]]).startswith("1 question has ")
