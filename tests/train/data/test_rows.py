"""Rows of both forms: what is read of them, and what is wrong with them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exgrpo.train.common.errors import DataError
from exgrpo.train.data.rows import COLUMNS, parse_row
from tests.train.data.test_questions import PAPER_ROW
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
