"""Hostile command lines: of the trainer and of the other programs."""

import contextlib
import io
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from exgrpo.train.command_line import options_of
from exgrpo.train.config import Config
from exgrpo.train.doctor.program import parse_options as doctor
from exgrpo.train.estimate.program import main as estimate
from exgrpo.train.evaluate.options import parse_options as evaluate
from exgrpo.train.experience_data.program import COMMANDS
from exgrpo.train.recipe import parse_args
from exgrpo.train.report.program import Options as ReportOptions
from exgrpo.train.section import flat
from tests.hostile import texts
from tests.hostile.judge import Trial, clear
from tests.hostile.recipes import KEYS, NUMBERS, SWITCHES, repeated

NO_NUMBERS = ("text", "nan", "inf", "-inf", "1e400", "9" * 5000, "", "0x10", "[1]", "None1", "1e308", "--", "１２,")  # noqa: RUF001
Parser = Callable[[list[str]], Any]
PROGRAMS: dict[str, Parser] = {
    "train": parse_args,
    "evaluate": evaluate,
    "doctor": doctor,
    "report": lambda argv: options_of(ReportOptions, "report", argv),
    **{name: lambda argv, model=model: options_of(model, "experience", argv) for name, (_, model) in COMMANDS.items()},
}
REQUIRED = {"evaluate": ["m", "--data.test=q.jsonl"], "report": ["run"], "show": ["run"], "export": ["run", "folder"]}


def drawn(rng: random.Random, folder: Path) -> Trial:
    """One of them."""
    return rng.choice(WAYS)(rng, folder)


def quiet(parse: Parser, argv: Sequence[str]) -> Any:
    """What a parser gives, without what it prints."""
    with contextlib.redirect_stdout(io.StringIO()):
        return parse(list(argv))


def trial(what: str, argv: Sequence[str], parse: Parser = parse_args, **expected: Any) -> Trial:
    """One command line; `expected` is that of the `Trial`."""
    return Trial(what, lambda: quiet(parse, argv), **expected)


def _spelled(rng: random.Random, name: str, value: str) -> list[str]:
    option = "--" + (name.replace("_", "-") if rng.random() < 0.3 else name)
    return [f"{option}={value}"] if rng.random() < 0.5 else [option, value]


def _sound(rng: random.Random, folder: Path) -> Trial:
    given = {"seed": rng.randrange(2**31), "steps": rng.randint(1, 10**6), "rollout.samples": rng.randint(2, 64)}
    given |= {"optimizer.lr": rng.uniform(1e-6, 1e-3), "rollout.temperature": rng.uniform(0.5, 2)}
    chosen = rng.sample(sorted(given), rng.randint(1, len(given)))
    argv = [word for name in chosen for word in _spelled(rng, name, str(given[name]))]

    def wrong(config: Config) -> str:
        found = flat(config.model_dump())
        return ", ".join(f"{name} is {found[name]}" for name in chosen if found[name] != given[name])

    return trial("sound", argv, expected="right", wrong=wrong)


def _sound_of_programs(rng: random.Random, folder: Path) -> Trial:
    name = rng.choice(sorted(REQUIRED))
    return trial(f"sound {name}", REQUIRED[name], PROGRAMS[name], expected="right")


def _no_number(rng: random.Random, folder: Path) -> Trial:
    key, value = rng.choice(NUMBERS), rng.choice(NO_NUMBERS)
    argv = _spelled(rng, key, value)
    return trial("no number", argv, expected="refused", names=(key, key.replace("_", "-")))


def _no_switch(rng: random.Random, folder: Path) -> Trial:
    key = rng.choice(SWITCHES)
    argv = _spelled(rng, key, rng.choice(("maybe", "7", "", "nan")))
    return trial("no switch", argv, expected="refused", names=(key, key.replace("_", "-")))


def _no_value(rng: random.Random, folder: Path) -> Trial:
    key = rng.choice(NUMBERS)
    argv = [f"--{key}", *rng.choice(((), ("--seed", "1")))]
    return trial("no value", argv, expected="refused", names=(key,))


def _unknown(rng: random.Random, folder: Path) -> Trial:
    key = rng.choice(KEYS)
    place = rng.randrange(len(key))
    name = key[:place] + rng.choice("qxzQ") + key[place:]
    argv = [*_spelled(rng, name, "1"), *rng.choice(((), ("--seed", "1")))]
    return trial("unknown option", argv, expected="refused", names=(name, name.replace("-", "_")))


def _no_option(rng: random.Random, folder: Path) -> Trial:
    word = rng.choice(("x", "=", "1", "-", "-x", "-1", "---", "seed=1", "/", "é"))
    return trial("no option", [word], expected="refused")


def _any(rng: random.Random, folder: Path) -> Trial:
    """Any words; those that a system can hand over: no NUL, and bytes of any kind."""
    words = []
    for _ in range(rng.randint(1, 4)):
        key, odd = rng.choice(KEYS), _word(rng)
        words += rng.choice(([f"--{key}={odd}"], [f"--{key}", odd], [odd], [f"--{odd}"], [f"--{key}"]))
    name = rng.choice(("train", *PROGRAMS))
    return trial(f"any words for {name}", REQUIRED.get(name, []) + words, PROGRAMS[name], wrong=_of(name))


def _of(name: str) -> Callable[[Any], str]:
    return repeated if name == "train" else lambda options: ""


def _word(rng: random.Random) -> str:
    if rng.random() < 0.2:
        return os.fsdecode(bytes(rng.randrange(1, 256) for _ in range(8)))
    return texts.text(rng).replace("\x00", "").encode("utf-8", "surrogatepass").decode("utf-8", "surrogateescape")


def _recipe(rng: random.Random, folder: Path) -> Trial:
    word = rng.choice(
        (str(folder), str(folder / "none.yaml"), "", "builtin:nothing", "x" * 5000, "/dev/zero", "~nobody/x")
    )
    argv = rng.choice(([f"--recipe={word}"], ["--recipe", word], ["--seed=1", "--recipe", word]))
    return trial("no recipe", argv, expected="refused")


def _estimate(rng: random.Random, folder: Path) -> Trial:
    option = rng.choice(("gpus", "gpu", "config_json", "policy.path", "rollout.max_tokens", "steps", "qgpus"))
    argv = [f"--config_json={folder}", "--policy.path=m", f"--{option}={_word(rng)}"]

    def told() -> tuple[int, str]:
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            return quiet(estimate, argv), printed.getvalue()

    def wrong(ended: tuple[int, str]) -> str:
        status, text = ended
        return "; ".join(clear(text)) if status == 2 else f"ends with {status}"

    return Trial("an estimate of nothing", told, "right", wrong=wrong)


def _help(rng: random.Random, folder: Path) -> Trial:
    name = rng.choice(sorted(PROGRAMS))

    def ended() -> int | str | None:
        try:
            quiet(PROGRAMS[name], ["--help"])
        except SystemExit as end:
            return end.code
        return "goes on"

    return Trial("help", ended, "right", wrong=lambda code: "" if not code else f"exit status {code}")


WAYS = (
    *(
        _sound,
        _sound,
        _sound_of_programs,
        _no_number,
        _no_number,
        _no_number,
        _no_switch,
        _no_value,
        _unknown,
        _unknown,
    ),
    *(_no_option, _any, _any, _any, _any, _any, _any, _recipe, _estimate, _help),
)
