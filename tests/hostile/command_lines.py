"""Hostile command lines: of the trainer and of the other programs."""

import contextlib
import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import sampled_from as of

from exgrpo.tools.doctor.program import parse_options as doctor
from exgrpo.tools.estimate.program import main as estimate
from exgrpo.tools.evaluate.options import parse_options as evaluate
from exgrpo.tools.experience.program import COMMANDS
from exgrpo.tools.report import Options as ReportOptions
from exgrpo.train.config.command_line import options_of
from exgrpo.train.config.options import Config
from exgrpo.train.config.recipe import parse_args
from exgrpo.train.config.section import flat
from tests.hostile.judge import Trial, clear
from tests.hostile.recipes import KEYS, NUMBERS, SWITCHES, repeated
from tests.hostile.values import ANY_TEXT, Draw, some

NO_NUMBERS = ("text", "nan", "inf", "-inf", "1e400", "9" * 5000, "", "0x10", "[1]", "None1", "1e308", "--", "１２,")  # noqa: RUF001
NO_SWITCHES = ("maybe", "7", "", "nan")
Parser = Callable[[list[str]], Any]
PROGRAMS: dict[str, Parser] = {
    "train": parse_args,
    "evaluate": evaluate,
    "doctor": doctor,
    "report": lambda argv: options_of(ReportOptions, "report", argv),
    **{name: lambda argv, model=model: options_of(model, "experience", argv) for name, (_, model) in COMMANDS.items()},
}
REQUIRED = {"evaluate": ["m", "--data.test=q.jsonl"], "report": ["run"], "show": ["run"], "export": ["run", "folder"]}
REQUIRED["import"] = ["files", "folder"]
BYTES = st.lists(st.integers(1, 255), min_size=1, max_size=8).map(lambda values: os.fsdecode(bytes(values)))
WORDS = ANY_TEXT.map(lambda text: os.fsdecode(text.replace("\x00", "").encode("utf-8", "surrogatepass")))
WORD = WORDS | WORDS | WORDS | BYTES
"""Words that a system can hand over: no NUL, and bytes of any kind."""


def quiet(parse: Parser, argv: Sequence[str]) -> Any:
    """What a parser gives, without what it prints."""
    with contextlib.redirect_stdout(io.StringIO()):
        return parse(list(argv))


def trial(what: str, argv: Sequence[str], parse: Parser = parse_args, **expected: Any) -> Trial:
    """One command line; `expected` is that of the `Trial`."""
    return Trial(what, lambda: quiet(parse, argv), **expected)


def _spelled(draw: Draw, name: str, value: str) -> list[str]:
    option = "--" + draw(of((name, name, name.replace("_", "-"))))
    return draw(of(([f"{option}={value}"], [option, value])))


def _sound(draw: Draw, folder: Path) -> Trial:
    numbers: dict[str, Any] = {"seed": st.integers(0, 2**31 - 1), "steps": st.integers(1, 10**6)}
    numbers |= {"rollout.samples": st.integers(2, 64), "optimizer.lr": st.floats(1e-6, 1e-3)}
    numbers |= {"rollout.temperature": st.floats(0.5, 2)}
    given = {name: draw(numbers[name]) for name in draw(st.sets(of(sorted(numbers)), min_size=1))}
    argv = [word for name, value in given.items() for word in _spelled(draw, name, str(value))]

    def wrong(config: Config) -> str:
        found = flat(config.model_dump())
        return ", ".join(f"{name} is {found[name]}" for name, value in given.items() if found[name] != value)

    return trial("sound", argv, expected="right", wrong=wrong)


def _sound_of_programs(draw: Draw, folder: Path) -> Trial:
    name = draw(of(sorted(REQUIRED)))
    return trial(f"sound {name}", REQUIRED[name], PROGRAMS[name], expected="right")


def _refused(draw: Draw, folder: Path) -> Trial:
    """No value, no option, or no recipe."""
    words = (str(folder), str(folder / "none.yaml"), "", "builtin:nothing", "x" * 5000, "/dev/zero", "~nobody/x")
    word = draw(of(words))
    given: tuple[list[str], ...] = ([f"--{draw(of(NUMBERS))}"], [draw(of(("x", "=", "-", "-x", "---", "seed=1")))])
    given += ([f"--recipe={word}"], ["--recipe", word], ["--seed=1", "--recipe", word])
    return trial("no value, option or recipe", draw(of(given)), expected="refused")


def _wrong_value(draw: Draw, folder: Path) -> Trial:
    keys, values = draw(of(((NUMBERS, NO_NUMBERS), (NUMBERS, NO_NUMBERS), (SWITCHES, NO_SWITCHES))))
    key = draw(of(keys))
    argv = _spelled(draw, key, draw(of(values)))
    return trial("no number or switch", argv, expected="refused", names=(key, key.replace("_", "-")))


def _unknown(draw: Draw, folder: Path) -> Trial:
    key = draw(of(KEYS))
    place = some(draw, 0, len(key) - 1)
    name = key[:place] + draw(of("qxzQ")) + key[place:]
    argv = [*_spelled(draw, name, "1"), *draw(of(((), ("--seed", "1"))))]
    return trial("unknown option", argv, expected="refused", names=(name, name.replace("-", "_")))


def _any(draw: Draw, folder: Path) -> Trial:
    words = []
    for _ in range(some(draw, 1, 4)):
        key, odd = draw(of(KEYS)), draw(WORD)
        words += draw(of(([f"--{key}={odd}"], [f"--{key}", odd], [odd], [f"--{odd}"], [f"--{key}"])))
    name = draw(of(("train", *PROGRAMS)))
    wrong = repeated if name == "train" else lambda options: ""
    return trial(f"any words for {name}", REQUIRED.get(name, []) + words, PROGRAMS[name], wrong=wrong)


def _estimate(draw: Draw, folder: Path) -> Trial:
    option = draw(of(("gpus", "gpu", "policy.path", "rollout.max_tokens", "steps", "qgpus")))
    argv = [f"--policy.path={folder}", f"--{option}={draw(WORD)}"]

    def told() -> tuple[int, str]:
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            return quiet(estimate, argv), printed.getvalue()

    def wrong(ended: tuple[int, str]) -> str:
        status, text = ended
        return "; ".join(clear(text)) if status == 2 else f"ends with {status}"

    return Trial("an estimate of nothing", told, "right", wrong=wrong)


WAYS = (
    *(_any, _any, _wrong_value, _any, _sound, _wrong_value, _unknown, _any, _wrong_value, _sound_of_programs, _any),
    *(_refused, _unknown, _refused, _wrong_value, _any, _estimate, _sound),
)
