"""Files of traces: parquet, JSONL and JSON, one answer a row, as `exgrpo experience` writes them or from elsewhere.

The columns are `TEXTS`, and those that `common.columns` names in traces. A row needs `response`, and one of `question`,
`problem` and `prompt_ids`. Every other column may be missing, a cell may be empty, and unknown columns are ignored.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)

from exgrpo.train.common import plain
from exgrpo.train.common.columns import COLUMNS, EARLIER, Column, renamed
from exgrpo.train.common.errors import DataError, os_errors_as, shown
from exgrpo.train.common.records import AllowedTokens, LogProbSource
from exgrpo.train.config.section import explain
from exgrpo.train.data.files import parquet_values
from exgrpo.train.data.questions import Question
from exgrpo.train.data.rows import marked_answer

SUFFIXES = (".parquet", ".jsonl", ".json")
ZERO_LOG_PROB = 1e-3
"""A log-prob may be above 0 by so much, which is rounding."""
Model = TypeVar("Model", bound=BaseModel)


def _gold(value: Any) -> Any:
    """Return a right answer as text, as rows of questions have it."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    text = str(value) if number else value
    return marked_answer(text).strip() if isinstance(text, str) else text


def _array(value: Any, kinds: str, what: str) -> npt.NDArray:
    """Return values [R] of these kinds of NumPy."""
    try:
        given = np.asarray(value) if len(value) else np.empty(0, np.int32)
    except (TypeError, ValueError):  # no list, or one of lists of different lengths
        given = np.empty((0, 0))
    if given.ndim != 1 or (len(given) and given.dtype.kind not in kinds):
        raise ValueError(f"it must be a list of {what}")
    return given


def _token_ids(value: Any) -> npt.NDArray[np.int32]:
    given = _array(value, "iu", "token ids")
    if len(given) and not 0 <= given.min() <= given.max() < 2**31:
        raise ValueError("it must be a list of token ids")
    return given.astype(np.int32)


def _log_probs(value: Any) -> npt.NDArray[np.float32]:
    given = _array(value, "iuf", "numbers").astype(np.float32)
    if not (np.isfinite(given).all() and (given <= ZERO_LOG_PROB).all()):
        raise ValueError("it must be finite numbers up to 0")
    return given


def _written(value: Any) -> npt.NDArray[np.bool_]:
    given = _array(value, "b", "true or false")
    if not given.any():
        raise ValueError("it must be true for one token")
    return given.astype(bool)


def _sets(value: Any) -> AllowedTokens:
    try:
        allowed_tokens = AllowedTokens.from_lists([_token_ids(ids) for ids in value])
    except (TypeError, ValueError):
        raise ValueError("it must be a list of lists of token ids") from None
    if any(len(np.unique(ids)) < len(ids) for ids in allowed_tokens.lists()):
        raise ValueError("it must be lists of token ids, each once")
    return allowed_tokens


TokenIds = Annotated[npt.NDArray[np.int32], PlainValidator(_token_ids)]
Whole = Annotated[int, Field(ge=0, lt=2**63)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class Trace(BaseModel):
    """An answer from a file, and what is known of each of its R tokens; what the file does not say is None.

    `TEXTS` and `COLUMNS` say what the fields are; `more` has the values of `further_columns`, by their names there.
    """

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    question: str | None = Field(None, validation_alias=AliasChoices("question", "problem"))
    prompt_ids: TokenIds | None = None
    answer: Annotated[str | None, BeforeValidator(_gold)] = None
    response_ids: TokenIds | None = None
    response: str
    log_prob: Annotated[npt.NDArray[np.float32], PlainValidator(_log_probs)] | None = None
    response_mask: Annotated[npt.NDArray[np.bool_], PlainValidator(_written)] | None = None
    allowed_tokens: Annotated[AllowedTokens, PlainValidator(_sets)] | None = None
    old_log_probs_from: LogProbSource | None = None
    model: str | None = None
    finished: bool = True
    reward: Number | None = None
    step: Whole | None = None
    advantage: Number | None = None
    group_successes: Whole = 0
    group_answers: Whole = 0
    replays: Whole = 0
    key: Whole = 0
    more: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _there(cls, row: dict[str, Any]) -> dict[str, Any]:
        row = renamed({name: cell for name, cell in row.items() if cell is not None})
        further = {name: one for name, one in further_columns().items() if one.trace in row}
        return {**row, "more": {name: _values(one, row[one.trace]) for name, one in further.items()}}

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.question is None and self.prompt_ids is None:
            raise ValueError("nothing names the question: question, problem and prompt_ids are missing")
        tokens = np.empty(0, np.int32) if self.response_ids is None else self.response_ids
        given = {name: getattr(self, name) for name in ("log_prob", "response_mask", "allowed_tokens")}
        for name, values in (given | {n: v for n, v in self.more.items() if COLUMNS[n].axis == "token"}).items():
            if values is not None and len(values) != len(tokens):
                raise ValueError(f"{len(values)} {name} for {len(tokens)} response_ids")
        sets = self.allowed_tokens.lists() if self.allowed_tokens else []
        if any(len(ids) and token not in ids for token, ids in zip(tokens, sets, strict=False)):
            raise ValueError("allowed_tokens lacks a token of response_ids")
        if self.group_successes > self.group_answers:
            raise ValueError(f"{self.group_successes} group_successes of {self.group_answers} group_answers")
        # As of a `Rollout`.
        self.response_mask = None if self.response_mask is None or self.response_mask.all() else self.response_mask
        self.allowed_tokens = self.allowed_tokens if self.allowed_tokens and len(self.allowed_tokens.ids) else None
        return self


TEXTS = {
    "question": "text of the question",
    "prompt_ids": "token ids of its prompt, as the model reads it",
    "answer": "its right answer",
    "source": "data set that the question comes from",
    "response": "text of the answer, without what ends it",
    "model": "where the policy began; together with the step it names the policy that wrote the answer",
}
"""Columns of traces that answers have nowhere else, each with its meaning."""


def trace_columns() -> dict[str, Column]:
    """Return the columns of answers that traces have, by their names in `COLUMNS`."""
    return {name: one for name, one in COLUMNS.items() if one.trace}


def further_columns() -> dict[str, Column]:
    """Return those of `trace_columns` without a field in `Trace`: numbers that need no check of their own."""
    return {name: one for name, one in trace_columns().items() if one.trace not in Trace.model_fields}


def _values(column: Column, value: Any) -> Any:
    kinds = {"b": "b", "f": "iuf"}.get(np.dtype(column.dtype).kind, "iu")
    values = _array(value if column.axis == "token" else [value], kinds, column.trace)
    return values.astype(column.dtype) if column.axis == "token" else column.dtype(values[0])


class Questions:
    """Finds the training question of a trace: by its text and gold answer, else by the token ids of its prompt, else by
    the prompt as people read it, which other projects write in the place of the question.

    Where a trace or the questions have no gold answers, its text is enough. Of equal questions the first one is found.
    `read` decodes token ids without special tokens.
    """

    def __init__(self, questions: Sequence[Question], read: Callable[[Sequence[int]], str]) -> None:
        self._questions, self._read = questions, read
        self._golds = any(question.gold for question in questions)
        self._by_gold: dict[tuple[str, str], Question] = {}
        self._by_text: dict[str, Question] = {}
        self._by_prompt: dict[tuple[int, ...], Question] = {}
        for question in questions:
            self._by_gold.setdefault((question.text, question.gold), question)
            self._by_text.setdefault(question.text, question)
            self._by_prompt.setdefault(question.prompt, question)

    def find(self, trace: Trace) -> Question | None:
        """Return the question of a trace; None: it is not among them, or has another gold answer."""
        gold = trace.answer if self._golds else None
        if trace.question is not None:
            by_text = self._by_text.get(trace.question) if gold is None else self._by_gold.get((trace.question, gold))
            if by_text is not None:
                return by_text
        by_prompt = None if trace.prompt_ids is None else self._by_prompt.get(tuple(trace.prompt_ids.tolist()))
        if by_prompt is None and trace.question is not None:
            by_prompt = self._by_reading.get(trace.question)
        return by_prompt if by_prompt and gold in (None, by_prompt.gold) else None

    @cached_property
    def _by_reading(self) -> dict[str, Question]:
        return {self._read(question.prompt): question for question in reversed(self._questions)}


def trace_files(source: Path) -> list[Path]:
    """Return the files of traces at a path: itself, or those of an exported folder; raise DataError without any."""
    source = source.expanduser()
    with os_errors_as(DataError, f"{source} cannot be read"):
        if source.is_dir():
            files = sorted(path for path in source.glob("data/*") if path.suffix in SUFFIXES)
            if not files:
                raise DataError(
                    f"{source} holds no data/*.parquet, so it is no exported experience: name one, or a file of traces"
                )
            return files
        if not source.is_file():
            raise DataError(f"{source}: there is no such file or folder of traces")
    return [source]


def check_traces(source: Path) -> None:
    """Check that traces can be read from here; only the first one of each file is read. Raises as `read_traces`."""
    for path in trace_files(source):
        next(_traces(path), None)


def read_traces(source: Path) -> Iterator[Trace]:
    """Yield all traces of a file or an exported folder; raise DataError, which names a row that cannot be right."""
    for path in trace_files(source):
        yield from _traces(path)


def _traces(path: Path) -> Iterator[Trace]:
    known = {"problem", *EARLIER, *Trace.model_fields, *(one.trace for one in trace_columns().values())}
    for place, value in read_values(path, known):
        try:
            yield parse_as(Trace, value, "trace")
        except DataError as error:
            raise DataError(f"{place}: {error}") from None


def read_values(path: Path, known: set[str] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a file with their places; in the place of a line that is no JSON, the error.

    Args:
        known: columns of a parquet file that are read, if it has some of them; None: all.

    Raises:
        DataError: the file cannot be read, or is of another kind.
    """
    if path.suffix == ".parquet":
        read = [] if known is None else known
        values = parquet_values(path, lambda names: [n for n in names if n in read] or names, rows=1024, arrays=True)
        yield from ((f"{path} row {number}", value) for number, value in enumerate(values, start=1))
        return
    if path.suffix not in SUFFIXES:
        raise DataError(f"{path}: unknown kind of file; answers are read from {', '.join(SUFFIXES)}")
    with os_errors_as(DataError, f"{path} cannot be read"), path.open("rb") as file:
        whole = path.suffix == ".json" and file.read(1024).lstrip().startswith(b"[")
        file.seek(0)
        if whole:
            try:
                values = plain.parse_json(file.read())
            except ValueError as error:
                raise DataError(f"{path}: not valid JSON: {shown(error)}") from None
            yield from ((f"{path} row {number}", value) for number, value in enumerate(values, start=1))
            return
        for line in plain.parse_lines(file):
            yield f"{path} line {line.number}", DataError(line.problem) if line.problem else line.value


def parse_as(model: type[Model], value: Any, title: str) -> Model:
    """Return what `read_values` gives as a row of a model; raise DataError, without a place, if it is wrong."""
    if isinstance(value, DataError):
        raise value
    if not isinstance(value, dict):
        raise DataError(f"expected an object, got {type(value).__name__}")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise DataError(explain(error, model, title)) from None
