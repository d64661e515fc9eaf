"""Questions from CSV files: what a cell means, and how a malformed row is named."""

import csv

import pytest

from exgrpo.train.data.files import read_rows
from exgrpo.train.data.rows import REMEDY
from tests.train.data.test_questions import TOKENIZER, load


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
