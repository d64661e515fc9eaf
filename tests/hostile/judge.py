"""What a case promises, and whether it was kept: one clear error, or the right result, and nothing else."""

import contextlib
import io
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from exgrpo.train.errors import LONGEST, ExgrpoError, print_error

Expected = Literal["refused", "right", "either"]
Came = Literal["refused", "right", "neither"]
MOST_LINES = 8
"""Of an error: a data set with malformed rows names five of them, below one line and above another one."""
LINES = 14
"""Of a traceback that is put down."""
RULES = ("─" * 5, "-" * 5)
TRACEBACK = "Traceback (most recent call last)"


def anything(result: Any) -> str:
    """Nothing is wrong with a result."""
    return ""


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
    expected: Expected = "either"
    names: tuple[str, ...] = ()
    errors: tuple[type[Exception], ...] = (ExgrpoError,)
    wrong: Callable[[Any], str] = anything


@dataclass(frozen=True)
class Verdict:
    """What came of a trial.

    Attributes:
        came: an error of a right class, a result, or something else.
        text: of the error, as a program prints it.
        problems: what was not as promised.
    """

    came: Came
    text: str = ""
    problems: tuple[str, ...] = ()


def judged(trial: Trial) -> Verdict:
    """Do a trial in this process."""
    try:
        result = trial.call()
    except trial.errors as error:
        text = printed(error)
        return Verdict("refused", text, tuple(_problems_of_text(trial, text)))
    except BaseException:
        return Verdict("neither", problems=(f"a defect: {_end_of(traceback.format_exc())}",))
    try:
        problem = trial.wrong(result)
    except Exception:
        problem = f"what came cannot be judged: {_end_of(traceback.format_exc())}"
    problems = [problem] if problem else []
    if trial.expected == "refused":
        problems.append("is taken, and it is wrong")
    return Verdict("right", problems=tuple(problems))


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
    problems = []
    if sum(line.startswith("error: ") for line in text.splitlines()) != 1:
        problems.append(f"not one error: {_end_of(text)}")
    if text.count("\n") > MOST_LINES:
        problems.append(f"an error of {text.count(chr(10))} lines: {_end_of(text)}")
    if len(text) > LONGEST + len("error: \n"):
        problems.append(f"an error of {len(text)} characters: {text[:200]}")
    if TRACEBACK in text:
        problems.append(f"a traceback: {_end_of(text)}")
    if strange := {character for character in text if not character.isprintable()} - {"\n"}:
        problems.append(f"an error with the characters {sorted(map(ascii, strange))}: {text[:300]!a}")
    if any(rule in text for rule in RULES):
        problems.append(f"the frame of a parser's message: {_end_of(text)}")
    if not text.removeprefix("error: ").strip():
        problems.append("an error without a word")
    return problems


def _end_of(text: str) -> str:
    return "\n".join(text.splitlines()[-LINES:])[-2000:]
