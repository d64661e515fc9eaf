"""Hostile input of the programs themselves, as a user starts them: one line on standard error, and an exit status."""

import os
import subprocess
import sys
from pathlib import Path

from hypothesis.strategies import sampled_from as of

from tests.hostile.judge import Trial, clear
from tests.hostile.recipes import NUMBERS
from tests.hostile.values import Draw
from tests.train.launch import MAIN, environment
from tests.train.warm import ROOT

SECONDS = 120.0
"""For a program that has nothing to do but to say what is wrong."""
# Characters of any encoding are written, and the terminal may have none.
STRICT = {"PYTHONIOENCODING": "ascii:strict", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
NO_VALUES = ("[", "text", ".nan", "{}", '"\\e[2J"', "\x00", "é", "9" * 5000)
NO_REWARDS = ("", "import none", "raise SystemExit(3)", "score = 1", "def score(x): pass", "(", "1 / 0")
NO_FILES = (b"", b"{", b"\xff", b"[]", b"[" * 10**5, b'{"question": "\\u001b[2J"}', b'{"step": "x"}', b"\x00" * 99)
FILES = ("rows.jsonl", "rows.parquet", "rows.csv", "rows.json")


def told(done: "subprocess.CompletedProcess[str]") -> str:
    """What is wrong with a program that had to refuse its input."""
    status = [f"exit status {done.returncode}"] if done.returncode != 2 else []
    return "; ".join([*clear(done.stderr), *status])


def trial(what: str, *words: str) -> Trial:
    """One start of a program that has to refuse its input; one that does not end by itself is killed."""
    options = {"capture_output": True, "encoding": "utf-8", "errors": "surrogateescape", "timeout": SECONDS}
    run = lambda: subprocess.run(  # noqa: E731
        [sys.executable, *words], cwd=ROOT, env=environment() | STRICT, stdin=subprocess.DEVNULL, **options, check=False
    )
    return Trial(what, run, "right", wrong=told)


def _train(draw: Draw, folder: Path) -> Trial:
    key, rows = draw(of(NUMBERS)), folder / draw(of(FILES))
    rows.write_bytes(draw(of(NO_FILES)))
    (folder / "recipe.yaml").write_text(f"policy.path: m\ndata.train: q\n{key}: {draw(of(NO_VALUES))}\n")
    (folder / "rewards.py").write_text(draw(of(NO_REWARDS)))
    (folder / "config.json").write_bytes(
        draw(of((b"", b"{}", b"[]", b"\xff", b'{"model_type": "none"}', b"[" * 10**5)))
    )
    step = folder / "checkpoints" / "step_00000001"
    step.mkdir(parents=True)
    (step / "manifest.json").write_bytes(draw(of((b"", b"{}", b"\xff", b"[1]"))))
    odd = draw(of(("x", "", "nan", "\x1b[31m", "é", os.fsdecode(b"\xff"), "9" * 5000)))
    given = {
        "recipe": ["--recipe", str(folder / "recipe.yaml")],
        "option": [f"--{key}={odd}"],
        "rows": [f"--data.train={rows}", "--policy.path=builtin:arithmetic"],
        "reward": [f"--reward.function={folder}/rewards.py:score", f"--output.folder={folder}/runs"],
        "model": [f"--policy.path={folder}", "--data.train=builtin:arithmetic", "--data.train_limit=4"],
        "resume": [f"--resume={folder}"],
    }
    what = draw(of(sorted(given)))
    return trial(f"train: {what}", str(MAIN), *given[what])


def _module(draw: Draw, folder: Path) -> Trial:
    name = draw(of(("report", "evaluate", "experience", "estimate", "doctor")))
    (folder / "metrics.jsonl").write_bytes(draw(of(NO_FILES)))
    word = draw(of((str(folder), str(folder / "none"), "", "--", "--x=\x1b[2J", os.fsdecode(b"--\xff"), " ")))
    words = {"estimate": ["--policy.path", word], "doctor": ["--only", word]}.get(name, [word])
    return trial(name, "-m", f"exgrpo.tools.{name}", *words)


WAYS = (_train, _train, _train, _module)
