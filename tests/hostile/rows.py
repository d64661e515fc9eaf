"""Hostile rows and files of questions: sound rows, of which some are replaced by such as are known to be wrong."""

import csv
import functools
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from hypothesis import strategies as st
from hypothesis.strategies import sampled_from as of

from exgrpo.train.common.functions import ASSETS, DEFAULT_TASK
from exgrpo.train.data.files import Row, read_rows
from exgrpo.train.data.prompts import PromptFormat
from exgrpo.train.data.questions import question_set
from tests.hostile.judge import Trial
from tests.hostile.values import ANY, Draw, damaged, some

LONG = 200_000
DEEP = 100_000
BAD_LINES = (
    *('{"question": "a"', "[", "{]", "question: a", "{'question': 'a'}", "\x00", "nan,", '{"question": "a\x01"}'),
    *("[" * DEEP, '{"a": ' * DEEP, '{"question": "q", "answer": ' + "9" * 5000 + "}", '"\\u12"'),
)
"""No JSON, or what Python reads none of."""
USER, TRUTH = [{"role": "user", "content": "q"}], {"ground_truth": "1"}
BAD_ROWS: tuple[Any, ...] = (
    *(None, 7, "text", [], [{"question": "q", "answer": "1"}], {}, {"question": "q"}, {"answer": "1"}),
    *({"question": question, "answer": "1"} for question in ("", " \n", 7, None, True, {}, [], [7], [[]], ["q"])),
    *({"question": "q", "answer": answer} for answer in (True, {}, [], [1, 2], [[1]])),
    {"question": "q", "solution": {}},
    *({"question": [{"role": role, "content": "q"}], "answer": "1"} for role in ("assistant", "system", "", 7, [])),
    *({"question": [{"role": "user", "content": content}], "answer": "1"} for content in (None, 7, "", [])),
    *({"prompt": prompt, "reward_model": TRUTH} for prompt in ("q", 7, [], [7], {}, [{"role": "user"}])),
    {"prompt": [{"role": [], "content": "q"}], "reward_model": TRUTH},
    *({"prompt": USER, "reward_model": model} for model in (7, {}, {"ground_truth": {}})),
    *({"question": "half \ud800 a pair", "answer": "1"}, {"question": "q", "answer": "half \udfff a pair"}),
    {"question": "q", "answer": float("inf")},
)
BAD_FILES = (b"", b"\n\n", b"\xff\xfe\x00", b"\x89PNG\r\n\x1a\n", b"PAR1", b"PAR1" * 10, b"\x00" * 1000, b"PK\x03\x04")
BAD_CSV = ('"a', "a", "a,b,c", "a,", ",1", '"a"b,1', "a,\x00", "\x00" * 9, "a\udcff,1")
ODD = (
    "",
    " <|end|>",
    " \x00",
    " \u202e",
    " \U0001f600",
    " {question}",
    " \\boxed{3}",
    " \x1b[2J",
    " \u2028",
    ' "',
    "\r\n",
)
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
KEYS = ("question", "problem", "answer", "solution", "prompt", "reward_model", "data_source", "ground_truth", "x")
NO_SOURCES = (
    *("/dev/zero", "x" * 5000, "", " ", "a\x00b.jsonl", "builtin:", "builtin:none", "builtin:arithmetic?x=1"),
    *("builtin:arithmetic?%", "\ud800.jsonl", "~nobody/x.json"),
)
HALF_TEXTS = [None, pyarrow.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pyarrow.py_buffer(b"\xff\xc3")]
COLUMNS: dict[str, Any] = {
    "binary": pyarrow.array([b"\xff\xfe", b"q"]),
    "numbers": pyarrow.array([1.5, float("nan")]),
    "whole": pyarrow.array([2**62, -1]),
    "nothing": pyarrow.nulls(2),
    "lists": pyarrow.array([["a"], ["b", "c"]]),
    "objects": pyarrow.array([{"a": 1}, {"b": 2}]),
    "times": pyarrow.array([1, 2**62], pyarrow.timestamp("ns")),
    "dates": pyarrow.array([2**31 - 1, 0], pyarrow.date32()),
    "decimals": pyarrow.array([None, None], pyarrow.decimal128(38, 10)),
    "words": pyarrow.array(["a", "b"]).dictionary_encode(),
    "half texts": pyarrow.Array.from_buffers(pyarrow.string(), 2, HALF_TEXTS),
}
"""Of kinds that no question has, but for the words."""


def rows(draw: Draw, most: int) -> list[Any]:
    """Sound rows; their texts may be odd."""
    odd = draw(st.lists(of(ODD), min_size=1, max_size=most))
    return [{"question": f"{i} + {i}?{more}", "answer": str(2 * i)} for i, more in enumerate(odd)]


def read(path: Path | str) -> list[Row]:
    """Everything that a run does with a file of questions before it trains; returns the rows."""
    found = read_rows(str(path), split="train", limit=None, seed=0)
    questions = question_set(str(path), found, _tokenizer(), PromptFormat(max_prompt_tokens=10**6), limit=None)
    assert len(questions.fingerprint) == 64
    return found


@functools.cache
def _tokenizer() -> Any:
    from transformers import AutoTokenizer  # seconds: only for those who read rows

    return AutoTokenizer.from_pretrained(ASSETS / DEFAULT_TASK)


def other_than(right: Sequence[dict[str, str]]) -> Callable[[list[Row]], str]:
    """Says what is wrong with rows that were read."""
    expected = [(row["question"], row["answer"].strip()) for row in right]

    def wrong(found: list[Row]) -> str:
        got = [(row.question, row.gold) for row in found]
        text = f"{len(got)} rows {got[:3]!r:.300} instead of {len(expected)} {expected[:3]!r:.300}"
        return "" if got == expected else text

    return wrong


def trial(what: str, path: Path | str, **expected: Any) -> Trial:
    """One file; `expected` is that of the `Trial`."""
    return Trial(what, lambda: read(path), **expected)


def _some_bad(draw: Draw, folder: Path) -> Trial:
    """JSON Lines, or a list of JSON, with some bad ones."""
    sound = rows(draw, 20)
    bad = draw(st.sets(st.integers(0, len(sound) - 1), max_size=7))
    lines = [json.dumps(row, ensure_ascii=draw(st.booleans())) for row in sound]
    path = folder / draw(of(("rows.jsonl", "rows.jsonl", "rows.json")))
    of_lines = st.just("null") if path.suffix == ".json" else of(BAD_LINES)
    for place in bad:
        lines[place] = draw(of(BAD_ROWS).map(json.dumps) | of_lines)
    ends = draw(of(("\n", "\n\n", "\r\n")))
    text = f"[{', '.join(lines)}]" if path.suffix == ".json" else ends.join(lines)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    if bad:
        names = (f"{len(bad)} of {len(lines)} rows are malformed", *(["not valid JSON"] * (path.suffix == ".json")))
        return trial("bad rows", path, expected="refused", names=names)
    return trial("sound rows", path, expected="right", wrong=other_than(sound))


def _any_row(draw: Draw, folder: Path) -> Trial:
    path = folder / draw(of(("rows.jsonl", "rows.json")))
    try:
        path.write_text(json.dumps(draw(st.dictionaries(of(KEYS), ANY, min_size=1, max_size=5))))
    except ValueError:  # a number of more digits than Python writes
        path.write_text("{")
    return trial("any row", path)


def _damaged(draw: Draw, folder: Path) -> Trial:
    path = folder / f"rows{draw(of(SUFFIXES))}"
    _write(path, rows(draw, 30), draw)
    path.write_bytes(damaged(draw, path.read_bytes()))
    return trial(f"damaged {path.suffix}", path)


def _sound_file(draw: Draw, folder: Path) -> Trial:
    path, sound = folder / f"rows{draw(of((*SUFFIXES, '.csv', '.parquet')))}", rows(draw, 30)
    if draw(st.integers(0, 9)) == 0:
        sound[0]["question"] = draw(of(("x", "1 + ", "\U0001f600"))) * LONG
    elif path.suffix == ".jsonl":
        sound[0]["answer"] = str(10**400)  # Python has no float of this size, and it is an answer all the same
    _write(path, sound, draw)
    return trial(f"sound {path.suffix}", path, expected="right", wrong=other_than(sound))


def _write(path: Path, sound: list[dict[str, str]], draw: Draw) -> None:
    match path.suffix:
        case ".jsonl":
            numbers = [row | {"answer": int(row["answer"])} for row in sound]
            path.write_text("\n".join(map(json.dumps, numbers)))
        case ".json":
            path.write_text(json.dumps(sound))
        case ".csv":
            text = io.StringIO(newline="")
            writer = csv.DictWriter(text, sound[0])
            writer.writeheader()
            writer.writerows(sound)
            path.write_text(text.getvalue(), newline="")
        case _:
            codec = draw(of(("none", "snappy", "gzip", "zstd")))
            table = pyarrow.Table.from_pylist(sound)
            pyarrow.parquet.write_table(table, path, compression=codec, use_dictionary=draw(st.booleans()))


def _table(draw: Draw, folder: Path) -> Trial:
    """Tables whose columns have kinds that no question has, are not there, or stand twice."""
    question, answer = draw(of(sorted(COLUMNS))), draw(of(sorted(COLUMNS)))
    pairs = (("question", "answer"), ("problem", "solution"), ("prompt", "reward_model"), ("a", "b"))
    names = draw(of((*pairs, ("question", "answer", "question"))))
    columns = [COLUMNS[question], COLUMNS[answer]]
    path = folder / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays((columns * 2)[: len(names)], names), path)
    fine = names == ("question", "answer") and question == "words"
    return trial(f"a table of {question}", path, expected="either" if fine else "refused", names=("rows.parquet",))


def _csv(draw: Draw, folder: Path) -> Trial:
    header, bad = draw(of(("question,answer", "question,answer", "question,answer,question"))), draw(of(BAD_CSV))
    path = folder / "rows.csv"
    lines = (header, *("a,1",) * some(draw, 0, 5), bad)
    path.write_bytes("\n".join(lines).encode("utf-8", "surrogateescape"))
    # A NUL is a character as any other; pages and prompts show it. A row without a gold answer is none to train on.
    fine = bad in ("a", "a,", "a,\x00", "\x00" * 9) and header == "question,answer"
    return trial("bad CSV", path, expected="either" if fine else "refused", names=("rows.csv",))


def _nothing(draw: Draw, folder: Path) -> Trial:
    """No file, a file without questions, or a table that is not whole: what is at its end is needed to read it."""
    path = folder / f"rows{draw(of(SUFFIXES))}"
    if path.suffix == ".parquet":
        _write(path, rows(draw, 30), draw)
        whole = path.read_bytes()
        path.write_bytes(whole[: some(draw, 0, len(whole) - 1)])
    else:
        path.write_bytes(draw(of(BAD_FILES)))
    sources = (str(path), str(path), *NO_SOURCES, str(folder), str(folder / "none.jsonl"), f"{folder}/*.txt")
    return trial("no questions", draw(of(sources)), expected="refused")


WAYS = (*(_some_bad, _any_row, _damaged) * 4, *(_sound_file, _table, _csv, _nothing, _nothing))
