"""Rows whose question is a conversation."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from exgrpo.train.common.errors import DataError
from exgrpo.train.data.rows import ColumnSelection, parse_row
from exgrpo.train.reward.contract import ALL_COLUMNS
from tests.train.data.test_questions import BASE_TOKENIZER, TOKENIZER, decoded, load

SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [
    {"role": "user", "content": "A number?"},
    {"role": "assistant", "content": "{6}"},
    {"role": "user", "content": "Times 7?"},
]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("keep_system", [False, True])
def test_the_chat_template_gets_all_turns(tmp_path, suffix, keep_system):
    path = tmp_path / f"mine.{suffix}"
    rows = [{"question": [SYSTEM, *TURNS], "answer": "42"}, {"question": TURNS[:1], "answer": "6"}]
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    long, short = load(
        str(path), TOKENIZER, max_prompt_tokens=200, keep_system=keep_system, prompt_format="{question}!"
    )
    asked = [*TURNS[:2], {"role": "user", "content": "Times 7?!"}]
    chat = [SYSTEM, *asked] if keep_system else asked
    assert list(long.prompt) == TOKENIZER.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert decoded(short) == "<user>A number?!\n<assistant>"
    assert (long.gold, long.text) == ("42", "user: A number?\n\nassistant: {6}\n\nuser: Times 7?")
    assert (short.text, short.columns["question"]) == ("A number?", TURNS[:1])


def test_without_a_template_there_are_no_turns(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps({"question": TURNS, "answer": "42"}))
    with pytest.raises(
        DataError, match=r"the question 'user: A number\?.* has several turns, which need data.chat=True"
    ):
        load(str(path), BASE_TOKENIZER, chat=False, max_prompt_tokens=200)


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "the last message of the question must be of the user, and it is missing"),
        (TURNS[:2], "the last message of the question must be of the user, and it is of the assistant"),
        ([SYSTEM], "and it is of the system"),
        (["text"], "message 1 of the question must be {role, content} with texts, got 'text'"),
        ([*TURNS[:2], {"role": "user", "content": None}], "message 3 of the question must be {role, content} with"),
        ([TURNS[0], SYSTEM, TURNS[2]], "message 2 of the question has the role 'system': it must be user or assistant"),
        ([{"role": "tool", "content": "1"}, TURNS[0]], "message 1 of the question has the role 'tool'"),
        ([{"role": "user", "content": " "}], "the question is empty"),
    ],
)
def test_what_is_no_conversation_is_named(messages, problem):
    with pytest.raises(DataError, match=problem):
        parse_row({"question": messages, "answer": "1"}, "file", ColumnSelection(ALL_COLUMNS))
