"""Questions from CSV files: what a cell means, and how a malformed row is named."""

from pathlib import Path

import pytest

from tests.train.data.test_questions import TOKENIZER, load


def test_csv_cells_are_texts_as_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    long = "x" * 200_000  # more than the csv module takes by default
    quoted = '"Two\r\nlines, ""quoted""",,007'
    header = "\ufeff question ,problem,answer"
    lines = [header, quoted, "", ',a\u2028b,"#### 1,000"', f"{long},,1", ""]
    path.write_text("\r\n".join(lines), newline="")
    loaded = load(str(path), TOKENIZER, max_prompt_tokens=300_000)
    pairs = [('Two\r\nlines, "quoted"', "007"), ("a\u2028b", "1,000"), (long, "1")]
    assert [(q.text, q.gold) for q in loaded] == pairs


def test_malformed_csv_rows_are_named_by_the_line_where_they_begin(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    lines = ["question,answer,prompt", '"a\nb",1,', "c,1", "d,,", ",1,", '"e"f,1,', "g,1,text", 'h,1,"open', "i,1,"]
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match="6 of 7 rows are malformed") as caught:
        load(str(path), TOKENIZER, max_prompt_tokens=100)
    assert [line.strip() for line in str(caught.value).split("\n")[1:]] == [
        f"{path} line 4: has 2 cells, and the first line names 3 columns",
        f"{path} line 5: has a question but neither answer nor solution",
        f"{path} line 6: has none of prompt, question, problem; its keys are answer",
        f"{path} line 7: not valid CSV: ',' expected after '\"'",
        f"{path} line 8: prompt must be JSON in a CSV file: Expecting value: line 1 column 1 (char 0)",
        "and 1 more",
    ]
