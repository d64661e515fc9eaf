"""The cases that once found a defect. They are explicit, so that they stay what they are where generators change."""

import json
import math
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch

from exgrpo import kernels
from tests.hostile import answers, command_lines, models, recipes, rewards, rows
from tests.hostile.judge import Trial

Case = Callable[[Path], Trial]


def _recipe(text: str, *names: str) -> Case:
    return lambda folder: recipes.trial("known", text, folder, expected="refused", names=names)


def _bases(folder: Path) -> Trial:
    for number in range(1500):
        (folder / f"{number}.yaml").write_text(f"base: {number + 1}.yaml\n")
    return recipes.trial("known", "base: 0.yaml\n", folder, expected="refused", names=("`base`",))


def _row(text: str, *names: str) -> Case:
    def case(folder: Path) -> Trial:
        (folder / "rows.jsonl").write_text(text)
        return rows.trial("known", folder / "rows.jsonl", expected="refused", names=names or ("rows.jsonl line 1",))

    return case


def _long_answer(folder: Path) -> Trial:
    """Python has no float of this size, and the answer is one all the same."""
    row = {"question": "q", "answer": 10**400}
    (folder / "rows.jsonl").write_text(json.dumps(row))
    right = rows.other_than([{"question": "q", "answer": str(row["answer"])}])
    return rows.trial("known", folder / "rows.jsonl", expected="right", wrong=right)


def _table(names: list[str], *columns: Any) -> Case:
    def case(folder: Path) -> Trial:
        path = folder / "rows.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_arrays(list(columns), names=names), path)
        return rows.trial("known", path, expected="refused", names=("rows.parquet",))

    return case


def _csv(folder: Path) -> Trial:
    (folder / "rows.csv").write_text("question,answer,question\n1,2,3\n")
    return rows.trial("known", folder / "rows.csv", expected="refused", names=("question",))


def _model(file: str, content: bytes | None = None, **values: Any) -> Case:
    def case(folder: Path) -> Trial:
        trial = models.copied(folder)
        if content is not None:
            (trial / file).write_bytes(content)
        else:
            models.change(trial, file, **values)
        return models.trial("known", trial, expected="refused")

    return case


def _index(content: object) -> Case:
    def case(folder: Path) -> Trial:
        model = models.copied(folder)
        (model / models.WEIGHTS).unlink()
        (model / "model.safetensors.index.json").write_text(json.dumps(content))
        return models.trial("known", model, expected="refused")

    return case


def _endless(head: bytes, part: bytes) -> Case:
    def script(to: socket.socket) -> None:
        to.sendall(head)
        while True:
            to.sendall(part)
            answers.pause(part)

    return lambda folder: Trial("known", lambda: answers.ask(script), "refused", errors=(answers.ServerError,))


def _kernel(name: str, **wrong: Any) -> Case:
    given = {"hidden": torch.zeros(2, 8), "weight": torch.zeros(20, 8), "target": torch.zeros(2, dtype=torch.int64)}
    call = lambda: kernels.linear_log_prob(**given | wrong)  # noqa: E731
    return lambda folder: Trial("known", call, "refused", (name,), (TypeError, ValueError))


def _no_dimensions(folder: Path) -> Trial:
    """One token in a tensor without dimensions."""
    given = {"hidden": torch.ones(8), "weight": torch.ones(20, 8), "target": torch.tensor(3), "backend": "reference"}
    wrong = lambda found: "" if abs(float(found.log_prob) + math.log(20)) < 1e-5 else str(found)  # noqa: E731
    return Trial("known", lambda: kernels.linear_log_prob(**given), "right", wrong=wrong)


def _exits(folder: Path) -> Trial:
    text = "raise SystemExit(3)\n"
    return rewards.trial("known", text, folder, expected="refused", names=("cannot run",))


def _frame(folder: Path) -> Trial:
    """A parser's message in a terminal without Unicode, which `quiet` is."""
    return command_lines.trial("known", ["--steps", "x"], expected="refused", names=("--steps",))


HEAD = b"HTTP/1.1 200 OK\r\n\r\n"
ODD_TEXTS = pyarrow.Array.from_buffers(
    pyarrow.string(), 1, [None, pyarrow.py_buffer(b"\0\0\0\0\1\0\0\0"), pyarrow.py_buffer(b"\xff")]
)
DATES = pyarrow.array([2**31 - 1], pyarrow.date32())
TEXT = pyarrow.array(["q"])
CASES: dict[str, Case] = {
    "recipe: a key twice": _recipe("steps: 1\nsteps: 2\n", "steps"),
    "recipe: a chain of bases": _bases,
    "recipe: a list of a million": _recipe("a: [" + "1," * 2**20 + "]", "characters"),
    "recipe: control characters": _recipe('"\\e[2J": 1\n', r"\x1b[2J"),
    "command line: a frame of dashes": _frame,
    "rows: deep": _row("[" * 100_000),
    "rows: digits": _row('{"question": "q", "answer": ' + "9" * 5000 + "}"),
    "rows: a large answer": _long_answer,
    "rows: half a pair": _row('{"question": "\\ud800", "answer": "1"}', "surrogate"),
    "rows: dates": _table(["question", "answer"], DATES, DATES),
    "rows: texts": _table(["question", "answer"], ODD_TEXTS, TEXT),
    "rows: a column twice in parquet": _table(["question", "answer", "question"], TEXT, TEXT, TEXT),
    "rows: a column twice in CSV": _csv,
    "model: layers": _model(models.CONFIG, num_hidden_layers=10**9),
    "model: classes": _model(models.CONFIG, architectures=[7]),
    "model: EOS": _model(models.CONFIG, eos_token_id={}),
    "model: generation": _model("generation_config.json", b"{"),
    "model: tokenizer": _model(models.TOKENIZER, b"{}"),
    "model: length of texts": _model(models.SETTINGS, model_max_length="x"),
    "model: tokenizer's class": _model(models.SETTINGS, tokenizer_class=["x"]),
    "model: index": _index({"weight_map": None}),
    "model: index as list": _index([]),
    "reward: its file exits": _exits,
    "server: drips": _endless(HEAD, b" "),
    "server: has no end": _endless(HEAD, b"1," * 2**19),
    "kernels: temperature": _kernel("temperature", temperature=10**400),
    "kernels: ignore_index": _kernel("ignore_index", ignore_index=None),
    "kernels: sparse": _kernel("hidden", hidden=torch.zeros(2, 8).to_sparse()),
    "kernels: no dimensions": _no_dimensions,
}
