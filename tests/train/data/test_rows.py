"""Rows of both forms, of CSV files and of conversations: what is read of them, and what is wrong with them."""

import csv

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exgrpo.train.common.errors import DataError
from exgrpo.train.data.files import read_rows
from exgrpo.train.data.rows import COLUMNS, REMEDY, ColumnSelection, parse_row
from exgrpo.train.reward.contract import ALL_COLUMNS
from tests.train.data.test_questions import BASE_TOKENIZER, PAPER_ROW, TOKENIZER, decoded, load
from tests.train.files import write_rows
from tests.train.values import ANY, tried


@pytest.mark.parametrize(
    ("row", "question", "gold"),
    [
        ({"question": "q", "answer": "6*7=<<6*7=42>>42\n#### 42"}, "q", "42"),
        ({"question": "q", "answer": "#### 1 #### 2 "}, "q", "2"),
        ({"question": "q", "answer": "42"}, "q", "42"),
        ({"problem": "p", "solution": "so #### 7"}, "p", "7"),
        ({"problem": "p", "solution": "so \\boxed{\\frac{1}{2}}."}, "p", "\\frac{1}{2}"),
        ({"problem": "p", "solution": "The largest root is $\\boxed 2$."}, "p", "2"),
        ({"problem": "p", "solution": "long \\boxed{1}", "answer": "5"}, "p", "5"),
        ({"question": "q", "problem": None, "answer": 42, "solution": None}, "q", "42"),
        ({"question": "q", "answer": "He has 3 + 4 = 7.\n#### 72 clips\n"}, "q", "72 clips"),
        ({"problem": "p", "solution": "It is yes.\n#### Yes"}, "p", "Yes"),
        ({"problem": "p", "solution": "so \\boxed{5}.\n\n#### \\frac{10}{2}"}, "p", "\\frac{10}{2}"),
        *(
            ({"problem": "p", kind: f"so \\boxed{{5}}.\n\n{heading}"}, "p", "5")
            for kind in ("solution", "answer")
            for heading in (
                "#### Verification\n5 + 5 = 10, as it should be.",
                "#### Verification\n\n- 5 + 5 = 10\n- 5 > 0\n",
                "#### Verification: 5 + 5 = 10",
                "#### Verification",
                "#### Step 2\n7",
            )
        ),
        ({"problem": "p", "solution": "so \\boxed{5}.\n##### 2"}, "p", "5"),
        ({"problem": "p", "answer": "why \\boxed{5}"}, "p", "why \\boxed{5}"),
        ({"problem": "p", "answer": "#### 460\nThe answer is: 460"}, "p", "#### 460\nThe answer is: 460"),
        ({"question": "q", "answer": 0.5}, "q", "0.5"),
        ({"question": "q", "answer": ["C"]}, "q", "C"),
        (PAPER_ROW | {"reward_model": {"ground_truth": [7]}}, "What is 6 * 7?", "7"),
    ],
)
def test_row_formats(row, question, gold):
    parsed = parse_row(row, "file")
    assert (parsed.question, parsed.gold) == (question, gold)
    assert parsed.source == row.get("data_source", "file")


BAD_ROWS = [
    ([1, 2], "expected an object, got a list of 2"),
    ({"text": "x"}, "has none of prompt, question, problem; its keys are text"),
    ({"question": "q", "final": "1"}, "neither answer nor solution; its keys are question, final .--data.columns"),
    ({"question": 5, "answer": "1"}, "the question must be text, got int 5"),
    ({"question": " ", "answer": "1"}, "the question is empty"),
    ({"question": "q", "answer": True}, "answer must be text, a finite number"),
    ({"question": "q", "answer": float("inf")}, "answer must be text, a finite number"),
    ({"question": "q", "answer": ["1", "2"]}, "got a list of 2"),
    (PAPER_ROW | {"prompt": "text"}, "prompt must be a list"),
    (PAPER_ROW | {"prompt": [{"role": "system", "content": "x"}]}, "no user message"),
    ({"prompt": PAPER_ROW["prompt"]}, "no reward_model.ground_truth"),
    (PAPER_ROW | {"reward_model": {"style": "rule"}}, "no reward_model.ground_truth"),
    (PAPER_ROW | {"reward_model": {"ground_truth": {}}}, "ground_truth must be text"),
]


@pytest.mark.parametrize(("row", "problem"), BAD_ROWS)
def test_malformed_rows_say_what_is_wrong(row, problem):
    with pytest.raises(ValueError, match=problem):
        parse_row(row, "file")


@pytest.mark.parametrize(
    "row",
    [
        *(
            {"question": "q", "answer": answer}
            for answer in (None, "", " \n", float("nan"), [None], "####", "why #### ")
        ),
        *({"question": "q", "solution": solution} for solution in (None, "", "no mark", "\\boxed{", "####")),
        {"question": "q", "solution": "so\n#### 460\nThe answer is: 460"},
        PAPER_ROW | {"reward_model": None},
        PAPER_ROW | {"reward_model": {"ground_truth": None}},
    ],
)
def test_a_row_without_a_gold_answer_is_sound(row):
    assert parse_row(row, "file").gold == ""


@given(st.dictionaries(st.sampled_from((*COLUMNS, "x")), ANY, min_size=1, max_size=5))
def test_any_row_is_a_question_with_an_answer_or_one_error(row):
    parsed, error = tried(lambda: parse_row(row, "file"), DataError)
    assert len(error) < 1000
    assert error or (parsed.question.strip() and parsed.gold == parsed.gold.strip())


def test_csv_cells_are_texts_as_they_stand(tmp_path):
    path = tmp_path / "mine.csv"
    long = "x" * 200_000  # more than the csv module takes by default
    quoted = '"Two\r\nlines, ""quoted""",, "007"'
    header = "\ufeff question ,problem,answer"
    lines = [header, quoted, "", ',a\u2028b,"#### 1,000"', f"{long},,1", ""]
    path.write_text("\r\n".join(lines), newline="")
    loaded = load(str(path), TOKENIZER, max_prompt_tokens=300_000)
    pairs = [('Two\r\nlines, "quoted"', "007"), ("a\u2028b", "1,000"), (long, "1")]
    assert [(q.text, q.gold) for q in loaded] == pairs


def test_malformed_csv_rows_are_named_by_the_line_where_they_begin(tmp_path):
    path = tmp_path / "mine.csv"
    lines = ["question,answer,level", '"a\nb",1,', "c,1", "d,,", "", ",1,", '"e"f,1,', "g,h,1,3", 'h,1,"open', "i,1,"]
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match="4 of 7 rows are malformed") as caught:
        load(str(path), TOKENIZER, max_prompt_tokens=100)
    assert [line.strip() for line in str(caught.value).split("\n")[1:]] == [
        f"{path} line 7: has none of prompt, question, problem; its keys are answer ({REMEDY})",
        f"{path} line 8: not valid CSV: ',' expected after '\"'",
        f"{path} line 9: has more cells than the 3 columns that the first line names",
        f"{path} line 10: not valid CSV: unexpected end of data",
    ]


def pairs(path, **names):
    rows = read_rows(str(path), split="train", limit=None, seed=0, names=names)
    return [(row.question, row.gold) for row in rows]


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_semicolons_and_tabs_separate_cells_where_the_first_line_says_so(tmp_path, delimiter):
    path = tmp_path / "mine.csv"
    texts = [("a; b, c\td?", "1,5"), ('"so"\n; he said', "2"), ("x;y;z;w", "3")]
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerows([["id", "question", "answer"], *([7, *pair] for pair in texts)])
    assert pairs(path) == texts
    named = tmp_path / "named.csv"
    named.write_text(path.read_text().replace("question", "Die Frage").replace("answer", "Antwort"))
    assert pairs(named, question="Die Frage", answer="Antwort") == texts


def test_semicolons_within_cells_are_text(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text('question,answer,"a;b;c;d"\nx;y,1,"p;q"\n"u;v;w",2,\n')
    assert pairs(path) == [("x;y", "1"), ("u;v;w", "2")]
    path.write_text('"question","answer"\n"x;y;z","1"\n')
    assert pairs(path) == [("x;y;z", "1")]


SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [
    {"role": "user", "content": "A number?"},
    {"role": "assistant", "content": "{6}"},
    {"role": "user", "content": "Times 7?"},
]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("keep_system", [False, True])
def test_the_chat_template_gets_all_turns(tmp_path, suffix, keep_system):
    rows = [{"question": [SYSTEM, *TURNS], "answer": "42"}, {"question": TURNS[:1], "answer": "6"}]
    path = write_rows(tmp_path / f"mine.{suffix}", rows)
    long, short = load(path, TOKENIZER, max_prompt_tokens=200, keep_system=keep_system, prompt_format="{question}!")
    asked = [*TURNS[:2], {"role": "user", "content": "Times 7?!"}]
    chat = [SYSTEM, *asked] if keep_system else asked
    assert list(long.prompt) == TOKENIZER.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert decoded(short) == "<user>A number?!\n<assistant>"
    assert (long.gold, long.text) == ("42", "user: A number?\n\nassistant: {6}\n\nuser: Times 7?")
    assert (short.text, short.columns["question"]) == ("A number?", TURNS[:1])


def test_without_a_template_there_are_no_turns(tmp_path):
    path = write_rows(tmp_path / "mine.jsonl", [{"question": TURNS, "answer": "42"}])
    with pytest.raises(DataError, match=r"'user: A number\?.* has several turns, which need data.chat=True"):
        load(path, BASE_TOKENIZER, chat=False, max_prompt_tokens=200)


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
