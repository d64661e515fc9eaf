r"""Parse a row of question and answer from a data set.

{"prompt": [{"role", "content"}, ...], "reward_model": {"ground_truth": ...}, "data_source": ...}: the last user
message is the question, the first system message is stored separately.
{"question" or "problem": ..., "answer" or "solution": ...}: the question is a text, or a list of {role, content}
messages, all of which enter the prompt: the last is the user's, and a system message, which must be the first, is
stored separately. The gold answer is what follows "####" in the last line of the answer, as in GSM8K, else the whole
answer; if "####" is in another line, or begins a heading, the last \boxed{...} of the answer counts. If only "solution"
is given, it is read in the same way, but is no gold answer as a whole.
A gold answer is a string, a number, or a list of one of them. A null or NaN cell, an empty text and a solution that
marks no answer are read as "": the row has no gold answer. Other columns are passed to rewards that take them.
data.columns names the question, answer or solution columns of the second form if they are called otherwise.
"""

import json
import math
import pickle
import re
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from exgrpo.train.common.errors import SHOWN, DataError, cut, shown
from exgrpo.train.reward.contract import Columns
from exgrpo.train.reward.grading import boxed_answer
from exgrpo.train.reward.names import DEFAULT

COLUMNS = ("prompt", "reward_model", "data_source", "question", "problem", "answer", "solution")
QUESTIONS, ANSWERS = ("prompt", "question", "problem"), ("reward_model", "answer", "solution")
"""Alternative columns; a row needs one of each tuple."""
NO_COLUMNS = Columns()
ROLES = ("system", "user", "assistant")
_BARE_BOX = re.compile(r"\\boxed\s*(-?\d+)\.?\s*\$")  # two solutions of MATH have no braces: `$\boxed 2$`
_MARK = re.compile(r"(?<!#)####(?!#)")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
REMEDY = "--data.columns question NAME answer NAME says what they are called"


@dataclass(frozen=True)
class ColumnSelection:
    """Options for reading a row.

    Attributes:
        taken: columns that a reward takes.
        names: the data set's names of its question, answer or solution column.
    """

    taken: Columns = NO_COLUMNS
    names: Mapping[str, str] = field(default_factory=dict)

    def check(self, columns: Collection[str]) -> None:
        """Check that the named columns exist; raises DataError as `parse_row` does."""
        if missing := [name for name in self.names.values() if name not in columns]:
            raise DataError(
                f"has no column {shown(missing[0])}, which data.columns names; its columns are "
                f"{shown(', '.join(map(str, columns)))}"
            )

    def renamed(self, row: dict[str, Any]) -> dict[str, Any]:
        """Rename the named columns of a row to the usual names, where they override other columns."""
        if not self.names:
            return row
        self.check(row)
        beaten = {"prompt"} if "question" in self.names else set()
        beaten |= {"answer"} if "solution" in self.names else set()
        kept = {name: value for name, value in row.items() if name not in beaten}
        return kept | {name: row[theirs] for name, theirs in self.names.items()}


NOTHING_ELSE = ColumnSelection()


class Message(NamedTuple):
    """One message; `role` is one of `ROLES`."""

    role: str
    content: str


@dataclass(frozen=True)
class Row:
    """Question as read from the data set."""

    question: str
    gold: str
    """Empty: the row has none."""
    system: str | None
    """The row's own system message."""
    source: str
    """The row's data_source, else the stem of its file, the hub name or the name of the generator with arguments."""
    reward: str = DEFAULT
    """Name of the reward that grades it."""
    columns: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Columns that a reward takes, by name; `question` is always called so."""
    turns: tuple[Message, ...] = ()
    """Messages of user and assistant before the question."""
    place: str = field(default="", compare=False)
    """File and row or line, for messages; empty: the question was generated."""

    @property
    def text(self) -> str:
        """Question for display, with the turns before it."""
        return as_text((*self.turns, Message("user", self.question))) if self.turns else self.question


def parse_row(row: Any, source: str, reading: ColumnSelection = NOTHING_ELSE) -> Row:
    """Parse one row of either format; `source` is used if it names none. Raises DataError with the problem."""
    if not isinstance(row, dict):
        raise DataError(f"expected an object, got {_kind(row)}")
    row = reading.renamed(row)
    if row.get("prompt") is not None:
        return _paper_row(row, source, reading.taken)
    given = cut(", ".join(str(key) for key, value in row.items() if value is not None), SHOWN) or "none"
    question = next((row[key] for key in ("question", "problem") if row.get(key) is not None), None)
    if question is None:
        raise DataError(f"has none of prompt, question, problem; its keys are {given} ({REMEDY})")
    if row.get("answer") is not None:
        gold = marked_answer(gold_text(row["answer"], "answer"))
    elif row.get("solution") is not None:
        gold = _answer_of_solution(gold_text(row["solution"], "solution")) or ""
    elif row.keys() & {"answer", "solution"}:
        gold = ""
    else:
        raise DataError(f"has a question but neither answer nor solution; its keys are {given} ({REMEDY})")
    if not isinstance(question, list):
        return _checked_row(question, gold, None, row, source, reading.taken)
    *turns, last = read_conversation(question)
    system = turns.pop(0).content if turns and turns[0].role == "system" else None
    return replace(_checked_row(last.content, gold, system, row, source, reading.taken), turns=tuple(turns))


def read_conversation(messages: list[Any]) -> list[Message]:
    """Return the messages {role, content} of a row, at least one.

    Raises:
        DataError: a message is malformed or has another role, a system message is not the first, or the last is not the
            user's.
    """
    found = [_message(number, message) for number, message in enumerate(messages, start=1)]
    if not found or found[-1].role != "user":
        last = f"is of the {found[-1].role}" if found else "is missing"
        raise DataError(f"the last message of the question must be of the user, and it {last}")
    return found


def _message(number: int, message: Any) -> Message:
    role, content = (message.get(key) if isinstance(message, dict) else None for key in ("role", "content"))
    if not isinstance(role, str) or not isinstance(content, str):
        raise DataError(f"message {number} of the question must be {{role, content}} with texts, got {shown(message)}")
    if role not in ROLES or (role == "system" and number > 1):
        raise DataError(
            f"message {number} of the question has the role {shown(role)}: it must be user or assistant, or system in "
            "the first message"
        )
    return Message(role, content)


def as_text(messages: Iterable[Message]) -> str:
    """Format a conversation for display."""
    return "\n\n".join(f"{message.role}: {message.content}" for message in messages)


def _paper_row(row: dict[str, Any], source: str, columns: Columns) -> Row:
    messages = row["prompt"]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise DataError(f"prompt must be a list of {{role, content}} messages ({REMEDY})")
    questions = [message.get("content") for message in messages if message.get("role") == "user"]
    if not questions:
        raise DataError("prompt has no user message")
    systems = [message.get("content") for message in messages if message.get("role") == "system"]
    if systems and not isinstance(systems[0], str):
        raise DataError(f"the system message must be text, got {_kind(systems[0])}")
    reward_model = row.get("reward_model", {})
    if reward_model is not None and (not isinstance(reward_model, dict) or "ground_truth" not in reward_model):
        raise DataError(f"has a prompt but no reward_model.ground_truth ({REMEDY})")
    gold = gold_text(reward_model and reward_model["ground_truth"], "reward_model.ground_truth")
    return _checked_row(questions[-1], gold, systems[0] if systems else None, row, source, columns)


def _checked_row(
    question: Any, gold: str, system: str | None, row: dict[str, Any], source: str, columns: Columns
) -> Row:
    if not isinstance(question, str):
        raise DataError(f"the question must be text, got {_kind(question)}")
    if not question.strip():
        raise DataError("the question is empty")
    named = row.get("data_source")
    taken = columns.of(row if row.get("question") is not None else {**row, "question": question})
    return Row(question, gold.strip(), system, named if isinstance(named, str) and named else source, columns=taken)


def gold_text(value: Any, key: str) -> str:
    """Return the gold answer in a cell as text, "" for null and NaN; `key` names the cell in messages.

    Raises:
        DataError: it is neither a text nor a finite number, nor a list of one of them.
    """
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, str):
        return value
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or (isinstance(value, float) and math.isinf(value)):
        raise DataError(f"{key} must be text, a finite number or a list of one of them, got {_kind(value)}")
    return str(value)


def marked_answer(text: str) -> str:
    """Return the answer that a text marks as a solution does, else the whole text."""
    found = _answer_of_solution(text) if _MARK.search(text) else None
    return text if found is None else found


def _answer_of_solution(solution: str) -> str | None:
    """Return what follows "####" in the last line, else the content of the last box; None without both.

    If a solution has a box, words after "####" are the heading of a section.
    """
    content = boxed_answer(solution)
    if content is None and (bare := _BARE_BOX.findall(solution)):
        content = bare[-1]
    last = _MARK.split(solution.rstrip().rpartition("\n")[2])
    if len(last) > 1 and (content is None or not _WORD.search(last[-1])):
        return last[-1]
    return content


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return "null" if value is None else f"{type(value).__name__} {value!r:.40}"


def first_places(keys: Iterable[Hashable], seen: set[Hashable]) -> list[int]:
    """Return the positions of the first occurrence of each key not in `seen`, and add these keys to it."""
    places = []
    for place, key in enumerate(keys):
        if key not in seen:
            seen.add(key)
            places.append(place)
    return places


def canonical(columns: Mapping[str, Any]) -> str:
    """Return a text that is equal for equal columns of a row."""
    return json.dumps(columns, sort_keys=True, default=lambda value: pickle.dumps(value).hex()) if columns else ""
