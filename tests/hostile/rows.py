"""Hostile rows and files of questions: sound rows, of which some are replaced by such as are known to be wrong."""

import csv
import functools
import io
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from exgrpo.train.builtin import ASSETS, DEFAULT_TASK
from exgrpo.train.data.files import Row, read_rows
from exgrpo.train.data.prompts import PromptFormat
from exgrpo.train.data.questions import question_set
from tests.hostile import texts
from tests.hostile.judge import Trial

LONG = 200_000
DEEP = 100_000
BAD_LINES = (
    *('{"question": "a"', "[", "{]", "question: a", "{'question': 'a'}", "\x00", "nan,", '{"question": "a\x01"}'),
    *("[" * DEEP, '{"a": ' * DEEP, '{"question": "q", "answer": ' + "9" * 5000 + "}", '"\\u12"'),
)
"""No JSON, or what Python reads none of."""
BAD_ROWS: tuple[Any, ...] = (
    *(None, 7, "text", [], [{"question": "q", "answer": "1"}], {}, {"question": "q"}, {"answer": "1"}),
    *({"question": question, "answer": "1"} for question in ("", " \n", 7, None, True, {}, [], [7], [[]], ["q"])),
    *({"question": "q", "answer": answer} for answer in ("", " ", None, True, {}, [], [1, 2], [[1]], "1 #### ")),
    *({"question": "q", "solution": solution} for solution in ("no answer", "\\boxed{", "", 7, "####")),
    *({"question": [{"role": role, "content": "q"}], "answer": "1"} for role in ("assistant", "system", "", 7, [])),
    *({"question": [{"role": "user", "content": content}], "answer": "1"} for content in (None, 7, "", [])),
    *(
        {"prompt": prompt, "reward_model": {"ground_truth": "1"}}
        for prompt in ("q", 7, [], [7], {}, [{"role": "user"}])
    ),
    {"prompt": [{"role": [], "content": "q"}], "reward_model": {"ground_truth": "1"}},
    *(
        {"prompt": [{"role": "user", "content": "q"}], "reward_model": model}
        for model in (None, 7, {}, {"ground_truth": {}})
    ),
    *({"question": "half \ud800 a pair", "answer": "1"}, {"question": "q", "answer": "half \udfff a pair"}),
    *({"question": "q", "answer": number} for number in (float("nan"), float("inf"))),
)
BAD_FILES = (b"", b"\n\n", b"\xff\xfe\x00", b"\x89PNG\r\n\x1a\n", b"PAR1", b"PAR1" * 10, b"\x00" * 1000, b"PK\x03\x04")


def rows(rng: random.Random, number: int) -> list[dict[str, str]]:
    """Sound rows; their texts may be odd."""
    odd = (
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
    return [{"question": f"{i} + {i}?{rng.choice(odd)}", "answer": str(2 * i)} for i in range(number)]


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
        return (
            ""
            if got == expected
            else f"{len(got)} rows {got[:3]!r:.300} instead of {len(expected)} {expected[:3]!r:.300}"
        )

    return wrong


def trial(what: str, path: Path | str, **expected: Any) -> Trial:
    """One file; `expected` is that of the `Trial`."""
    return Trial(what, lambda: read(path), **expected)


def drawn(rng: random.Random, folder: Path) -> Trial:
    """One of them."""
    return rng.choice(WAYS)(rng, folder)


def _lines(rng: random.Random, folder: Path) -> Trial:
    """JSON Lines with some bad ones."""
    sound = rows(rng, rng.randint(1, 20))
    lines = [json.dumps(row, ensure_ascii=rng.random() < 0.5) for row in sound]
    bad = rng.sample(range(len(lines)), rng.randint(0, min(7, len(lines))))
    for place in bad:
        lines[place] = rng.choice(BAD_LINES) if rng.random() < 0.4 else json.dumps(rng.choice(BAD_ROWS))
    path = folder / "rows.jsonl"
    path.write_bytes(rng.choice(("\n", "\n\n", "\r\n")).join(lines).encode("utf-8", "surrogatepass"))
    if bad:
        names = (f"{len(bad)} of {len(lines)} rows are malformed",)
        return trial("bad lines", path, expected="refused", names=names)
    return trial("sound lines", path, expected="right", wrong=other_than(sound))


def _list(rng: random.Random, folder: Path) -> Trial:
    """A list of JSON with some bad rows."""
    sound: list[Any] = rows(rng, rng.randint(1, 20))
    mixed = list(sound)
    bad = rng.sample(range(len(mixed)), rng.randint(0, min(7, len(mixed))))
    for place in bad:
        mixed[place] = rng.choice(BAD_ROWS)
    path = folder / "rows.json"
    path.write_text(json.dumps(mixed))
    if bad:
        names = (f"{len(bad)} of {len(mixed)} rows are malformed", "not valid JSON")
        return trial("bad list", path, expected="refused", names=names)
    return trial("sound list", path, expected="right", wrong=other_than(sound))


def _any_row(rng: random.Random, folder: Path) -> Trial:
    keys = ("question", "problem", "answer", "solution", "prompt", "reward_model", "data_source", "ground_truth", "x")
    row = {rng.choice(keys): texts.value(rng) for _ in range(rng.randint(1, 5))}
    path = folder / rng.choice(("rows.jsonl", "rows.json"))
    try:
        path.write_text(json.dumps(row))
    except ValueError:  # a number of more digits than Python writes
        path.write_text("{")
    return trial("any row", path)


def _damaged(rng: random.Random, folder: Path) -> Trial:
    suffix = rng.choice((".jsonl", ".json", ".csv", ".parquet"))
    path = folder / f"rows{suffix}"
    _write(path, rows(rng, rng.randint(1, 30)), rng)
    path.write_bytes(texts.damaged(rng, path.read_bytes()))
    return trial(f"damaged {suffix}", path)


def _cut(rng: random.Random, folder: Path) -> Trial:
    """A table that is not whole: what is at its end is needed to read it."""
    path = folder / "rows.parquet"
    _write(path, rows(rng, rng.randint(1, 30)), rng)
    whole = path.read_bytes()
    path.write_bytes(whole[: rng.randrange(len(whole))])
    return trial("cut parquet", path, expected="refused", names=("rows.parquet",))


def _sound_table(rng: random.Random, folder: Path) -> Trial:
    path, sound = folder / f"rows{rng.choice(('.csv', '.parquet'))}", rows(rng, rng.randint(1, 30))
    _write(path, sound, rng)
    return trial(f"sound {path.suffix}", path, expected="right", wrong=other_than(sound))


def _write(path: Path, sound: list[dict[str, str]], rng: random.Random) -> None:
    match path.suffix:
        case ".jsonl":
            path.write_text("\n".join(map(json.dumps, sound)))
        case ".json":
            path.write_text(json.dumps(sound))
        case ".csv":
            text = io.StringIO(newline="")
            writer = csv.DictWriter(text, sound[0])
            writer.writeheader()
            writer.writerows(sound)
            path.write_text(text.getvalue(), newline="")
        case _:
            codec = rng.choice(("none", "snappy", "gzip", "zstd"))
            table = pyarrow.Table.from_pylist(sound)
            pyarrow.parquet.write_table(table, path, compression=codec, use_dictionary=rng.random() < 0.5)


def _table(rng: random.Random, folder: Path) -> Trial:
    """Tables whose columns have kinds that no question has, or that are not there."""
    kinds: dict[str, Any] = {
        "binary": [b"\xff\xfe", b"q"],
        "numbers": [1.5, float("nan")],
        "whole": [2**62, -1],
        "nothing": pyarrow.nulls(2),
        "lists": [["a"], ["b", "c"]],
        "objects": [{"a": 1}, {"b": 2}],
        "times": pyarrow.array([1, 2**62], pyarrow.timestamp("ns")),
        "dates": pyarrow.array([2**31 - 1, 0], pyarrow.date32()),
        "decimals": pyarrow.array([None, None], pyarrow.decimal128(38, 10)),
        "words": pyarrow.array(["a", "b"]).dictionary_encode(),
        "half texts": pyarrow.Array.from_buffers(
            pyarrow.string(), 2, [None, pyarrow.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pyarrow.py_buffer(b"\xff\xc3")]
        ),
    }
    question, answer = rng.choice(sorted(kinds)), rng.choice(sorted(kinds))
    names = rng.choice((("question", "answer"), ("problem", "solution"), ("prompt", "reward_model"), ("a", "b")))
    path = folder / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table(dict(zip(names, (kinds[question], kinds[answer]), strict=True))), path)
    fine = names == ("question", "answer") and question == "words"
    return trial(f"a table of {question}", path, expected="either" if fine else "refused", names=("rows.parquet",))


def _columns_twice(rng: random.Random, folder: Path) -> Trial:
    path = folder / "rows.csv"
    path.write_text("question,answer,question\n1,2,3\n")
    table = pyarrow.Table.from_arrays([pyarrow.array(["q"])] * 3, names=["question", "answer", "question"])
    if rng.random() < 0.5:
        path = folder / "rows.parquet"
        pyarrow.parquet.write_table(table, path)
    return trial("a column twice", path, expected="refused", names=(path.name,))


def _csv(rng: random.Random, folder: Path) -> Trial:
    lines = ("question,answer", *("a,1",) * rng.randint(0, 5))
    bad = rng.choice(('"a', "a", "a,b,c", "a,", ",1", '"a"b,1', "a,\x00", "\x00" * 9, "a\udcff,1"))
    path = folder / "rows.csv"
    path.write_bytes("\n".join((*lines, bad)).encode("utf-8", "surrogateescape"))
    # A NUL is a character as any other; pages and prompts show it.
    return trial("bad CSV", path, expected="either" if bad == "a,\x00" else "refused", names=("rows.csv",))


def _no_questions(rng: random.Random, folder: Path) -> Trial:
    path = folder / rng.choice(("rows.jsonl", "rows.json", "rows.csv", "rows.parquet"))
    path.write_bytes(rng.choice(BAD_FILES))
    return trial("no questions", path, expected="refused", names=(path.name,))


def _no_file(rng: random.Random, folder: Path) -> Trial:
    bad = (
        str(folder),
        str(folder / "none.jsonl"),
        f"{folder}/*.jsonl",
        "/dev/zero",
        "x" * 5000,
        "",
        " ",
        "a\x00b.jsonl",
    )
    bad += (
        "builtin:",
        "builtin:none",
        "builtin:arithmetic?x=1",
        "builtin:arithmetic?%",
        "\ud800.jsonl",
        "~nobody/x.json",
    )
    source = rng.choice(bad)
    return trial("no file", source, expected="refused")


def _enormous(rng: random.Random, folder: Path) -> Trial:
    sound = rows(rng, 3)
    sound[1]["question"] = rng.choice(("x", "1 + ", "\U0001f600")) * LONG
    path = folder / f"rows{rng.choice(('.jsonl', '.csv', '.parquet'))}"
    _write(path, sound, rng)
    return trial("an enormous question", path, expected="right", wrong=other_than(sound))


WAYS = (*(_lines, _any_row, _damaged) * 6, *(_list, _cut, _sound_table, _table, _csv, _no_questions, _no_file) * 2)
WAYS = (*WAYS, _columns_twice, _enormous)
