"""Files of traces: what is read, and what is told of those that are wrong."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from exgrpo.tools.experience.convert import answers_of
from exgrpo.train.common.errors import DataError
from exgrpo.train.run.traces import check_traces, read_traces
from tests.train.batches import lists
from tests.train.files import write_rows

ROW = {"question": "1 + 1", "response": "2"}
BAD = [
    ({"response": 3}, "response: Input should be a valid string (got 3)"),
    ({"response": None}, "response is missing"),
    ({"question": None}, "nothing names the question: question, problem and prompt_ids are missing"),
    ({"response_ids": [1, 2], "log_prob": [-0.5]}, "1 log_prob for 2 response_ids"),
    *(
        ({"response_ids": [1], "log_prob": [number]}, "log_prob: it must be finite numbers up to 0")
        for number in (0.5, float("nan"))
    ),
    *(
        ({"response_ids": ids}, "response_ids: it must be a list of token ids")
        for ids in ([-1], [10**400], [0.5], [[1], [2, 3]], "ab")
    ),
    ({"reward": float("inf")}, "reward: Input should be a finite number (got inf)"),
    ({"finished": 1}, "finished: Input should be a valid boolean (got 1)"),
    ({"old_log_probs_from": "me"}, "old_log_probs_from: Input should be 'trainer', 'engine' or 'unknown' (got 'me')"),
    ({"group_successes": 3, "group_answers": 2}, "3 group_successes of 2 group_answers"),
    ({"key": -1}, "key: Input should be greater than or equal to 0 (got -1)"),
    ({"response_ids": [5, 7], "response_mask": [True]}, "1 response_mask for 2 response_ids"),
    *(
        ({"response_ids": [5, 7], "response_mask": marks}, "response_mask: it must be")
        for marks in ([0, 0], [False, False], "yes")  # numbers, nothing of the policy, text
    ),
    ({"response_ids": [5, 7], "allowed_tokens": [[5]]}, "1 allowed_tokens for 2 response_ids"),
    ({"response_ids": [5, 7], "allowed_tokens": [[5], [6]]}, "allowed_tokens lacks a token of response_ids"),
    *(
        ({"response_ids": [5, 7], "allowed_tokens": words}, "allowed_tokens: it must be")
        for words in ([[5, 5], []], [[5, -1], []], [[5.5], []], 5, ["a", []])  # twice, no token ids, no lists
    ),
]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_text_alone_is_enough_and_both_kinds_of_file_say_the_same(tmp_path, suffix):
    whole = {"prompt_ids": [4, 5], "response_ids": [6, 7], "log_prob": [-0.5, 0.0], "allowed_tokens": [[], [3, 7]]}
    whole |= {"old_log_probs_from": "engine", "model": "m", "answer": "so 1 #### 2 ", "finished": False, "reward": 0.5}
    whole |= {"step": 4, "advantage": -0.25, "key": 2**62, "group_successes": 1, "group_answers": 3, "replays": 2}
    whole |= {"source": 7, "more": "ignored"}
    path = Path(write_rows(tmp_path / f"traces.{suffix}", [{**ROW, **whole}, ROW]))
    first, second = read_traces(path)
    assert (first.answer, first.finished, first.reward, first.step, first.advantage) == ("2", False, 0.5, 4, -0.25)
    assert (first.group_successes, first.group_answers, first.replays, first.key, first.model) == (1, 3, 2, 2**62, "m")
    tokens = (first.prompt_ids.tolist(), first.response_ids.tolist(), first.log_prob.tolist())
    assert tokens == ([4, 5], [6, 7], [-0.5, 0.0])
    assert (first.response_ids.dtype, first.log_prob.dtype) == (np.int32, np.float32)
    assert (second.question, second.response, second.answer, second.reward) == ("1 + 1", "2", None, None)
    assert lists(first.allowed_tokens) == [[], [3, 7]]
    lacking = ("allowed_tokens", "response_ids", "log_prob", "prompt_ids", "old_log_probs_from")
    assert [getattr(second, name) for name in lacking] == [None] * 5
    assert (second.finished, second.group_successes, second.group_answers, second.key) == (True, 0, 0, 0)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_columns_are_read_under_the_names_that_they_had(tmp_path, suffix):
    was = {"response_ids": [6, 7], "written": [True, False], "kept": [[], [3, 7]], "behaviour": "engine"}
    path = Path(write_rows(tmp_path / f"traces.{suffix}", [{**ROW, **was}]))
    (trace,) = read_traces(path)
    assert (trace.response_mask.tolist(), trace.old_log_probs_from) == ([True, False], "engine")
    assert lists(trace.allowed_tokens) == [[], [3, 7]]
    (answer,) = answers_of({**ROW, **was}, {})
    assert [answer[name] for name in ("response_mask", "allowed_tokens", "old_log_probs_from")] == [*was.values()][1:]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_a_row_that_cannot_be_right_is_named(tmp_path, change, message):
    path = Path(write_rows(tmp_path / "traces.jsonl", [ROW, "", {**ROW, **change}]))
    with pytest.raises(DataError) as error:
        list(read_traces(path))
    assert str(error.value).startswith(f"{path} line 3: ")
    assert message in str(error.value)


def test_damaged_files_are_named(tmp_path):
    path = Path(write_rows(tmp_path / "traces.parquet", [ROW] * 1000))
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"traces.parquet: cannot be read as parquet"):
        check_traces(path)
    with pytest.raises(DataError, match="line 2: not valid JSON"):
        list(read_traces(Path(write_rows(tmp_path / "traces.jsonl", [ROW, '{"question"']))))
    with pytest.raises(DataError, match="line 1: expected an object, got list"):
        list(read_traces(Path(write_rows(tmp_path / "list.jsonl", ["[1]"]))))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.parquet", "there is no such file or folder of traces"),
        ("traces.csv", r"unknown kind of file; answers are read from .parquet, .jsonl, .json"),
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
    found = [
        None if t.response_ids is None else t.response_ids.tolist() for t in read_traces(tmp_path / "traces.parquet")
    ]
    assert found == lists
