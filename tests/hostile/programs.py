"""Hostile input of the programs themselves, as a user starts them: one line on standard error, and an exit status."""

import os
import random
import subprocess
import sys
from pathlib import Path

from tests.hostile.judge import Trial, clear
from tests.hostile.recipes import NUMBERS
from tests.train.launch import MAIN, environment
from tests.train.warm import ROOT

SECONDS = 120.0
"""For a program that has nothing to do but to say what is wrong."""
WRONG = 2
MODULES = ("report", "evaluate", "experience", "estimate", "doctor")


def run(words: list[str]) -> subprocess.CompletedProcess[str]:
    """A program that ends by itself.

    Raises:
        TimeoutExpired: it does not; it is killed.
    """
    # Characters of any encoding are written, and the terminal may have none.
    strict = {"PYTHONIOENCODING": "ascii:strict", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=environment() | strict,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="surrogateescape",
        timeout=SECONDS,
        check=False,
    )


def told(done: subprocess.CompletedProcess[str]) -> str:
    """What is wrong with a program that had to refuse its input."""
    problems = clear(done.stderr)
    if done.returncode != WRONG:
        problems.append(f"exit status {done.returncode}")
    return "; ".join(problems)


def trial(what: str, *words: str) -> Trial:
    """One start of a program that has to refuse its input."""
    return Trial(what, lambda: run(list(words)), "right", wrong=told)


def drawn(rng: random.Random, folder: Path) -> Trial:
    """One of them."""
    return rng.choice(WAYS)(rng, folder)


def _recipe(rng: random.Random, folder: Path) -> Trial:
    path = folder / "recipe.yaml"
    key, odd = rng.choice(NUMBERS), rng.choice(("[", "text", ".nan", "{}", '"\\e[2J"', "\x00", "é", "9" * 5000))
    path.write_text(f"policy.path: m\ndata.train: q\n{key}: {odd}\n")
    return trial("train: recipe", str(MAIN), "--recipe", str(path))


def _option(rng: random.Random, folder: Path) -> Trial:
    odd = rng.choice(("x", "", "nan", "\x1b[31m", "é", os.fsdecode(b"\xff"), "9" * 5000))
    return trial("train: option", str(MAIN), f"--{rng.choice(NUMBERS)}={odd}")


def _rows(rng: random.Random, folder: Path) -> Trial:
    path = folder / rng.choice(("rows.jsonl", "rows.parquet", "rows.csv", "rows.json"))
    path.write_bytes(rng.choice((b"", b"{", b"\xff", b"[" * 10**5, b'{"question": "\\u001b[2J"}', b"\x00" * 99)))
    return trial("train: rows", str(MAIN), f"--data.train={path}", "--policy.path=builtin:arithmetic")


def _reward(rng: random.Random, folder: Path) -> Trial:
    path = folder / "rewards.py"
    path.write_text(
        rng.choice(("", "import none", "raise SystemExit(3)", "score = 1", "def score(x): pass", "(", "1 / 0"))
    )
    return trial("train: reward", str(MAIN), f"--reward.function={path}:score", f"--output.folder={folder / 'runs'}")


def _model(rng: random.Random, folder: Path) -> Trial:
    (folder / "config.json").write_bytes(
        rng.choice((b"", b"{}", b"[]", b"\xff", b'{"model_type": "none"}', b"[" * 10**5))
    )
    words = (f"--policy.path={folder}", "--data.train=builtin:arithmetic", "--data.train_limit=4")
    return trial("train: model", str(MAIN), *words, f"--output.folder={folder / 'runs'}")


def _resume(rng: random.Random, folder: Path) -> Trial:
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "step_00000001").mkdir()
    (folder / "checkpoints" / "step_00000001" / "manifest.json").write_bytes(rng.choice((b"", b"{}", b"\xff", b"[1]")))
    return trial("train: resume", str(MAIN), f"--resume={folder}")


def _module(rng: random.Random, folder: Path) -> Trial:
    name = rng.choice(MODULES)
    (folder / "metrics.jsonl").write_bytes(rng.choice((b"", b"{", b"[]", b"\xff", b"[" * 10**5, b'{"step": "x"}')))
    word = rng.choice((str(folder), str(folder / "none"), "", "--", "--x=\x1b[2J", os.fsdecode(b"--\xff"), " "))
    words = {"estimate": ["--policy.path", word], "doctor": ["--only", word]}.get(name, [word])
    return trial(name, "-m", f"exgrpo.train.{name}", *words)


WAYS = (_recipe, _option, _rows, _reward, _model, _resume, _module, _module)
