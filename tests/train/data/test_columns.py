"""Columns of rows, from a file to the reward that takes them."""

import json
from contextlib import ExitStack

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from exgrpo.train.data.files import read_rows
from exgrpo.train.data.prompts import PromptFormat
from exgrpo.train.data.questions import load_questions, question_set
from exgrpo.train.early import look
from exgrpo.train.errors import DataError
from exgrpo.train.reward.contract import ALL_COLUMNS, Columns
from tests.train.configs import configured
from tests.train.data.test_questions import PAPER_ROW, TOKENIZER

ROWS = [{"problem": f"p{i}", "answer": str(i), "level": i, "huge": "x" * 100} for i in range(3)]
TAKEN = Columns(("question", "level"), ("bonus",), taker="reward 'mine.py:score'")


def write(folder, suffix, rows):
    path = folder / f"mine.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif suffix == "csv":
        path.write_text("\n".join([",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]))
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv"])
def test_rows_keep_the_columns_that_are_taken(tmp_path, suffix):
    path = write(tmp_path, suffix, ROWS)
    found = read_rows(path, split="train", limit=None, seed=0, columns=TAKEN)
    level = str if suffix == "csv" else int
    assert [row.columns for row in found] == [{"question": f"p{i}", "level": level(i)} for i in range(3)]
    prompts = PromptFormat(max_prompt_tokens=100)
    assert [q.columns for q in question_set(path, found, TOKENIZER, prompts)] == [row.columns for row in found]
    assert all(row.columns == {} for row in read_rows(path, split="train", limit=None, seed=0))
    (whole, *_) = load_questions(path, TOKENIZER, prompts)
    assert whole.columns.keys() == {*ROWS[0], "question"}


def test_nested_columns_and_the_question_of_rows_of_the_paper(tmp_path):
    path = write(tmp_path, "parquet", [PAPER_ROW])
    (row,) = read_rows(path, split="train", limit=None, seed=0, columns=Columns(("question", "extra_info")))
    assert row.columns == {"question": "What is 6 * 7?", "extra_info": PAPER_ROW["extra_info"]}


def test_generated_questions_have_columns():
    columns = Columns(("question", "edges"))
    (row,) = read_rows("builtin:colouring", split="test", limit=1, seed=0, columns=columns)
    assert all(edge in row.columns["question"] for edge in row.columns["edges"])
    with pytest.raises(
        DataError, match=r"^builtin:colouring: a question has no column 'levels', .* its columns are '.*"
    ):
        read_rows("builtin:colouring", split="test", limit=1, seed=0, columns=Columns(("levels",)))


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv"])
def test_a_missing_column_is_named_with_those_that_exist(tmp_path, suffix):
    path = write(tmp_path, suffix, ROWS)
    message = r"mine.* has no column 'levels', which the reward 'mine.py:score' takes; its columns are 'problem, answer"
    with pytest.raises(DataError, match=message):
        read_rows(path, split="train", limit=None, seed=0, columns=Columns(("levels",), taker="reward 'mine.py:score'"))
    assert read_rows(path, split="train", limit=None, seed=0, columns=ALL_COLUMNS)


def test_a_run_reads_the_columns_that_its_reward_takes(tmp_path):
    reward = tmp_path / "mine.py"
    reward.write_text("def score(response, gold, *, question, level):\n    return level + (response == question)\n")
    (tmp_path / "rows").mkdir()
    values = {"data": {"train": write(tmp_path / "rows", "jsonl", ROWS), "test": None, "train_limit": None}}
    with ExitStack() as resources:
        found = look(configured(values, reward={"function": f"{reward}:score", "workers": 1}), resources)
        grading = found.grader.begin()
        for row in found.train[0]:
            assert "huge" not in row.columns
            grading.add("p1", row.gold, row.question, f"{reward}:score", row.columns)
        assert grading.finish().reward == (0.0, 2.0, 2.0)
        values["data"]["train"] = write(tmp_path / "rows", "jsonl", [{"question": "q", "answer": "1"}])
        with pytest.raises(DataError, match="line 1: has no column 'level', which the reward '.*mine.py:score' takes"):
            look(configured(values, reward={"function": f"{reward}:score", "workers": 1}), resources)
