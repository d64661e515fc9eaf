"""What a case promises, and whether it was kept: one clear error, or the right result, and nothing else."""

import contextlib
import io
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from exgrpo.train.common.errors import LONGEST, ExgrpoError, print_error

MOST_LINES = 8
"""Of an error: a data set with malformed rows names five of them, below one line and above another one."""
RULES = ("─" * 5, "-" * 5)
TRACEBACK = "Traceback (most recent call last)"


@dataclass(frozen=True)
class Trial:
    """One hostile input and what has to come of it.

    Attributes:
        what: the way in which it is hostile, or sound; a few words that many trials share.
        call: gives the input to the project.
        expected: an error, a result, or either where nobody can know.
        names: an error has one of these in its text; empty: any text.
        errors: the classes that an error may have.
        wrong: what is wrong with a result; "": nothing.
    """

    what: str
    call: Callable[[], Any]
    expected: Literal["refused", "right", "either"] = "either"
    names: tuple[str, ...] = ()
    errors: tuple[type[Exception], ...] = (ExgrpoError,)
    wrong: Callable[[Any], str] = lambda result: ""


@dataclass(frozen=True)
class Verdict:
    """What came of a trial: an error of a right class, a result, or something else; and what was not as promised."""

    came: Literal["refused", "right", "neither"]
    problems: tuple[str, ...] = ()


def judged(trial: Trial) -> Verdict:
    """Do a trial in this process."""
    try:
        result = trial.call()
    except trial.errors as error:
        return Verdict("refused", tuple(_problems_of_text(trial, printed(error))))
    except BaseException:
        return Verdict("neither", (f"a defect: {_end_of(traceback.format_exc())}",))
    try:
        problem = trial.wrong(result)
    except Exception:
        problem = f"what came cannot be judged: {_end_of(traceback.format_exc())}"
    taken = ["is taken, and it is wrong"] if trial.expected == "refused" else []
    return Verdict("right", (*([problem] if problem else []), *taken))


def printed(error: Exception) -> str:
    """An error as a program prints it."""
    if not isinstance(error, ExgrpoError):
        return f"error: {error}\n"
    with contextlib.redirect_stderr(io.StringIO()) as told:
        print_error(error)
    return told.getvalue()


def _problems_of_text(trial: Trial, text: str) -> list[str]:
    problems = clear(text)
    if trial.expected == "right":
        problems.append(f"is refused, and it is right: {text}")
    elif trial.names and not any(name in text for name in trial.names):
        problems.append(f"the error names none of {trial.names}: {text}")
    return problems


def clear(text: str) -> list[str]:
    """What is wrong with what a program that fails has printed; it does not have to be only its error."""
    end = _end_of(text)
    strange = {character for character in text if not character.isprintable()} - {"\n"}
    problems = {
        f"not one error: {end}": sum(line.startswith("error: ") for line in text.splitlines()) != 1,
        f"an error of {text.count(chr(10))} lines: {end}": text.count("\n") > MOST_LINES,
        f"an error of {len(text)} characters: {text[:200]}": len(text) > LONGEST + len("error: \n"),
        f"a traceback: {end}": TRACEBACK in text,
        f"an error with the characters {sorted(map(ascii, strange))}: {text[:300]!a}": bool(strange),
        f"the frame of a parser's message: {end}": any(rule in text for rule in RULES),
        "an error without a word": not text.removeprefix("error: ").strip(),
    }
    return [problem for problem, there in problems.items() if there]


def _end_of(text: str) -> str:
    return "\n".join(text.splitlines()[-14:])[-2000:]
