"""Conversion of answers from other projects' tables into a data set for experience.start: `exgrpo experience import`.

The columns are those of `exgrpo.train.run.traces`; a mapping says what a table calls them. Rows are read, checked
and written some at a time.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from exgrpo.tools.experience.export import ROWS, kinds, new_folder, write, write_card
from exgrpo.tools.experience.sources import load_tokenizer
from exgrpo.train.common.columns import renamed
from exgrpo.train.common.errors import ConfigError, DataError, shown
from exgrpo.train.common.records import Rollout
from exgrpo.train.data.files import local_files
from exgrpo.train.data.rows import Message, as_text, gold_text
from exgrpo.train.rollout.stops import text_of
from exgrpo.train.run.traces import Trace, parse_as, read_values, trace_columns

Row = dict[str, Any]
Decode = Callable[[Any], str]
SHOWN_PROBLEMS = 5
ANSWERS, UNGRADED = "answers", "without a reward, so that a run grades them"
UNSCORED = "without log-probs, so that the policy of a run scores them at its start"
EMPTY, BAD = "rows left out, without an answer", "rows left out, invalid"
OF_QUESTION = ("question", "prompt_ids", "answer", "source")
"""Columns shared by all answers of a row; a list in another column has one value per answer."""


@dataclass
class Import:
    """Tables of answers and the progress of reading them.

    Attributes:
        source: the files.
        columns: names in the files, by column of a trace, where they differ.
        decode: token ids to text; None: there is no tokenizer.
        skip_bad: leave out invalid rows.
        counts: numbers of rows and answers by kind.
        problems: the first invalid rows, each with place and cause.
    """

    source: str
    columns: Mapping[str, str]
    decode: Decode | None
    skip_bad: bool
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def batches(self, files: Sequence[Path]) -> Iterator[pa.RecordBatch]:
        """Yield all answers with the columns of a trace; raise DataError for an unreadable file or an invalid row."""
        rows: list[Row] = []
        for row in self._rows(files):
            self.counts.update({ANSWERS: 1, UNSCORED: row["log_prob"] is None, UNGRADED: row["reward"] is None})
            rows.append(row)
            if len(rows) == ROWS:
                yield pa.RecordBatch.from_pylist(rows, pa.schema(kinds()))
                rows = []
        if rows:
            yield pa.RecordBatch.from_pylist(rows, pa.schema(kinds()))

    def _rows(self, files: Sequence[Path]) -> Iterator[Row]:
        for place, value in (one for path in files for one in read_values(path)):
            try:
                if isinstance(value, DataError):
                    raise value
                found = [self._checked(row) for row in answers_of(value, self.columns)]
            except DataError as error:
                problem = f"{place}: {error}"
                if not self.skip_bad:
                    raise DataError(f"{problem}; mend the row, or give --skip_bad to leave such rows out") from None
                self.counts[BAD] += 1
                self.problems += [problem] if len(self.problems) < SHOWN_PROBLEMS else []
                continue
            self.counts[EMPTY] += not found
            yield from found

    def _checked(self, row: Row) -> Row:
        """Validate a row, and decode its token ids if it has no text."""
        trace = parse_as(Trace, {**row, "response": row["response"] or ""}, "trace")
        if row["response"] is None:
            if self.decode is None:
                raise DataError("has response_ids and no response: --tokenizer must name the model that wrote it")
            assert trace.response_ids is not None
            rollout = Rollout(trace.response_ids, trace.finished, response_mask=trace.response_mask)
            row = {**row, "response": text_of(rollout, self.decode, ())}
        try:
            pa.RecordBatch.from_pylist([row], pa.schema(kinds()))
        except (ValueError, TypeError, OverflowError) as error:  # numbers and texts that a trace allows and a file not
            raise DataError(f"cannot be written: {shown(error)}") from None
        return row

    @property
    def facts(self) -> dict[str, object]:
        """Columns and counts by name, for the card."""
        named = ", ".join(f"{name} is {theirs or 'left out'}" for name, theirs in self.columns.items())
        of_rows = {name: f"{self.counts[name]:,}" for name in (ANSWERS, UNGRADED, UNSCORED, EMPTY, BAD)}
        return {"columns": named or "as they are", **of_rows}

    def __str__(self) -> str:
        facts = [f"{name}: {value}" for name, value in self.facts.items() if value != "0"]
        return "\n".join([f"{self.source}:", *facts, *(f"left out: {problem}" for problem in self.problems)])


def import_answers(
    source: str,
    folder: Path,
    columns: Mapping[str, str] | None = None,
    *,
    skip_bad: bool = False,
    tokenizer: str | None = None,
) -> Import:
    """Write answers from other projects' tables as a data set for `experience.start`.

    Args:
        source: a .parquet, .jsonl or .json file, or a pattern that matches several.
        folder: folder of the data set, created completely or not at all.
        columns: paths in a row, by column of a trace, see `cell`; "": ignore the column.
        skip_bad: leave out invalid rows.
        tokenizer: path or name of the model that wrote the answers, for rows of token ids without texts.

    Returns:
        Counts and problems of what was read.

    Raises:
        ConfigError: a trace has no such column.
        DataError: a file or row cannot be read, or no row holds an answer.
        ModelError: the tokenizer cannot be loaded.
        OutputError: the folder is not empty, or cannot be written.
    """
    columns = columns or {}
    if unknown := [name for name in columns if name not in kinds()]:
        raise ConfigError(f"--columns: there is no {unknown[0]!r} to name; there are {', '.join(kinds())}")
    with new_folder(folder) as unfinished:
        files = local_files(source)
        if not files:
            raise DataError(f"{source}: there is no such file")
        decode = None if tokenizer is None else load_tokenizer(f"--tokenizer {tokenizer}", tokenizer).decode
        found = Import(source, columns, decode, skip_bad)
        write(found.batches(files), unfinished)
        if not found.counts[ANSWERS]:
            raise DataError(f"there is no answer in these files: {found}".replace("\n", "; "))
        about = "Answers to questions whose answers can be verified, from files of another project."
        write_card(unfinished, about, found.facts)
    return found


def answers_of(row: Any, columns: Mapping[str, str]) -> Iterator[Row]:
    """Yield the answers of a table's row: one, or one per element of a list of responses.

    Raise DataError for an invalid row; the message does not name its place.
    """
    if not isinstance(row, dict):
        raise DataError(f"expected an object, got {type(row).__name__}")
    present = renamed(row)
    cells: Row = {name: cell(row, columns[name]) if name in columns else present.get(name) for name in kinds()}
    if "question" not in columns and cells["question"] is None:
        cells["question"] = row.get("problem")
    cells |= {"question": _question(cells["question"]), "answer": _gold(cells["answer"])}
    responses = cells["response"] if cells["response"] is not None else cells["response_ids"]
    if responses is None or (_is_list(responses) and not len(responses)):
        return
    if _is_list(responses) and (isinstance(responses[0], str) or _is_list(responses[0])):
        lists: Row = {name: value for name, value in cells.items() if name not in OF_QUESTION and _is_list(value)}
        own: Row = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in lists.items()}
        if wrong := [name for name, value in own.items() if len(value) != len(responses)]:
            raise DataError(f"{len(own[wrong[0]])} {wrong[0]} for {len(responses)} answers")
        several = [{**cells, **{name: value[i] for name, value in own.items()}} for i in range(len(responses))]
    else:
        several = [cells]
    numeric = [one.trace for one in trace_columns().values() if one.axis == "row"]
    for one in several:
        numbers = {name: _number(one[name]) for name in numeric}
        yield {**one, **numbers, "response": _response(one["response"])}


def cell(row: Row, path: str) -> Any:
    """Return a value of a row.

    Args:
        row: row of a table.
        path: a name; or names and list indices separated by dots, for a nested value (reward_model.ground_truth,
            choices.0.text); or several of these joined by "+", whose numbers are added; "": None.

    Raises:
        DataError: the row has no such column.
    """
    if path in row or not path:
        return row[path] if path else None
    if "+" in path:
        parts = [_number(cell(row, part)) for part in path.split("+")]
        try:
            return sum(part for part in parts if part is not None) if any(part is not None for part in parts) else None
        except (TypeError, OverflowError):
            raise DataError(f"{path} cannot be added: {shown(parts)}") from None
    value: Any = row
    for name in path.split("."):
        try:
            value = value[int(name)] if _is_list(value) else value[name]
        except (KeyError, IndexError, TypeError, ValueError):
            names = shown(", ".join(map(str, row)))
            raise DataError(f"has no {path!r}, which --columns names; its columns are {names}") from None
    return value


def _is_list(value: Any) -> bool:
    return isinstance(value, list | np.ndarray)


def _is_message(value: Any) -> bool:
    return _is_list(value) and len(value) > 0 and isinstance(value[0], dict)


def _message(value: Any) -> Message:
    role, content = (value.get(name) if isinstance(value, dict) else None for name in ("role", "content"))
    if isinstance(content, list):  # parts, some of them texts
        texts = (part.get("text") for part in content if isinstance(part, dict))
        content = "\n\n".join(text for text in texts if isinstance(text, str))
    if not isinstance(role, str) or not isinstance(content, str):
        raise DataError(f"a message must be {{role, content}} with texts, got {shown(value)}")
    return Message(role, content)


def _question(value: Any) -> Any:
    """Return the question in a prompt of messages as a training question has it, without system messages."""
    if not _is_message(value):
        return value
    messages = [message for message in map(_message, value) if message.role != "system"]
    return messages[0].content if len(messages) == 1 else as_text(messages)


def _response(value: Any) -> Any:
    if not _is_message(value):
        return value
    if len(value) != 1:
        raise DataError(f"an answer has {len(value)} messages, and answers of one are read")
    return _message(value[0]).content


def _gold(value: Any) -> str | None:
    """Return a right answer; None if it is no text or number, which identify questions."""
    try:
        return gold_text(value, "answer") or None
    except DataError:
        return None


def _number(value: Any) -> Any:
    """Return a number; None for NaN, which pandas writes for missing values."""
    return None if isinstance(value, float) and math.isnan(value) else value
