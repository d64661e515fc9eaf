"""Files of traces: what is read, and what is told of those that are wrong."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from exgrpo.train.common.errors import DataError
from exgrpo.train.run.traces import check_traces, read_traces
from tests.tools.experience.runs import write_parquet
from tests.train.batches import lists

ROW = {"question": "1 + 1", "response": "2"}
BAD = [
    ({"response": 3}, "response must be text, got int 3"),
    ({"response_ids": [1, 2], "log_prob": [-0.5]}, "1 log_prob for 2 response_ids"),
    ({"log_prob": [-0.5]}, "1 log_prob for 0 response_ids"),
    ({"response_ids": [1], "log_prob": [0.5]}, "log_prob must be finite numbers up to 0"),
    ({"response_ids": [1], "log_prob": [float("nan")]}, "log_prob must be finite numbers up to 0"),
    ({"response_ids": [-1]}, "response_ids must be a list of token ids"),
    ({"response_ids": [2**31]}, "response_ids must be a list of token ids"),
    ({"response_ids": [0.5]}, "response_ids must be a list of token ids"),
    ({"reward": "good"}, "reward must be a finite number, got 'good'"),
    ({"reward": float("inf")}, "reward must be a finite number, got inf"),
    ({"finished": 1}, "finished must be true or false, got 1"),
    ({"behaviour": "me"}, "behaviour must be one of trainer, engine, unknown, got 'me'"),
    ({"group_successes": 3, "group_answers": 2}, "group_successes is 3 and group_answers 2"),
    ({"key": -1}, "key must be a whole number from 0, got -1"),
    *(
        ({"response_ids": [5, 7], "written": marks}, "written must be true or false for each of the 2 response_ids")
        for marks in ([True], [0, 0], [False, False], "yes")  # too few, numbers, nothing of the policy, text
    ),
    *(
        ({"response_ids": [5, 7], "kept": words}, "kept must be a list for each of the 2 response_ids, empty or with")
        for words in ([[5]], [[5], [6]], [[5, 5], []], [[5, -1], []], 5, ["a", []])  # too few, not its token, twice, ..
    ),
]


def write_jsonl(path: Path, rows: list) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_text_alone_is_enough_and_both_kinds_of_file_say_the_same(tmp_path, write):
    whole = {
        "prompt_ids": [4, 5],
        "response_ids": [6, 7],
        "log_prob": [-0.5, 0.0],
        "kept": [[], [3, 7]],
        "behaviour": "engine",
        "model": "m",
        "answer": "so 1 #### 2 ",
        "finished": False,
        "reward": 0.5,
        "step": 4,
        "advantage": -0.25,
        "key": 2**62,
        "group_successes": 1,
        "group_answers": 3,
        "replays": 2,
        "more": "ignored",
    }
    path = write(tmp_path / f"traces.{'jsonl' if write is write_jsonl else 'parquet'}", [{**ROW, **whole}, ROW])
    first, second = read_traces(path)
    assert (first.gold, first.finished, first.reward, first.step, first.advantage) == ("2", False, 0.5, 4, -0.25)
    assert (first.successes, first.answers, first.replays, first.key, first.model) == (1, 3, 2, 2**62, "m")
    assert (first.tokens.tolist(), first.tokens.dtype, first.prompt.tolist()) == ([6, 7], np.int32, [4, 5])
    assert (first.log_prob.tolist(), first.log_prob.dtype) == ([-0.5, 0.0], np.float32)
    assert (second.question, second.response, second.gold, second.reward) == ("1 + 1", "2", None, None)
    assert lists(first.kept) == [[], [3, 7]]
    assert second.kept is second.tokens is second.log_prob is second.prompt is second.behaviour is None
    assert (second.finished, second.successes, second.answers, second.key) == (True, 0, 0, 0)


@pytest.mark.parametrize(("change", "message"), BAD)
def test_a_row_that_cannot_be_right_is_named(tmp_path, change, message):
    path = write_jsonl(tmp_path / "traces.jsonl", [ROW, "", {**ROW, **change}])
    with pytest.raises(DataError) as error:
        list(read_traces(path))
    assert str(error.value).startswith(f"{path} line 3: ")
    assert message in str(error.value)


def test_missing_columns_are_named_before_anything_is_read(tmp_path):
    path = write_parquet(tmp_path / "traces.parquet", [{"text": "1 + 1", "answer": "2"}])
    with pytest.raises(DataError, match=r"has no response and no question \(or problem or prompt_ids\); it has te"):
        check_traces(path)
    path = write_jsonl(tmp_path / "traces.jsonl", [{"question": "1 + 1", "response": None}])
    with pytest.raises(DataError, match="line 1: has no response; it has question"):
        check_traces(path)


def test_damaged_files_are_named(tmp_path):
    path = write_parquet(tmp_path / "traces.parquet", [ROW] * 1000)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"traces.parquet: cannot be read as parquet"):
        check_traces(path)
    with pytest.raises(DataError, match="line 2: not valid JSON"):
        list(read_traces(write_jsonl(tmp_path / "traces.jsonl", [ROW, '{"question"'])))
    with pytest.raises(DataError, match="line 1: expected an object, got list"):
        list(read_traces(write_jsonl(tmp_path / "list.jsonl", ["[1]"])))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.parquet", "there is no such file or folder of traces"),
        ("traces.csv", r"unknown kind of file; traces are read from .parquet and .jsonl"),
        ("folder", r"holds no data/\*.parquet, so it is no exported experience"),
    ],
)
def test_other_places_are_told(tmp_path, name, message):
    (tmp_path / "traces.csv").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=message):
        check_traces(tmp_path / name)


def test_sliced_and_empty_lists_of_a_parquet_file_are_whole(tmp_path):
    lists = [[i] * (i % 4) if i % 5 else None for i in range(3000)]
    table = pa.table({"question": ["q"] * 3000, "response": ["r"] * 3000, "response_ids": lists})
    pq.write_table(table, tmp_path / "traces.parquet", row_group_size=700)
    found = [None if t.tokens is None else t.tokens.tolist() for t in read_traces(tmp_path / "traces.parquet")]
    assert found == lists
