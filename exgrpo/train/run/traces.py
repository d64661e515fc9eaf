"""Files of traces: parquet and JSONL, one answer a row, as `export` writes them or from elsewhere.

Columns
    response: the text of the answer. It has to be there, and one of those that name its question:
    question or problem: the text of the question; prompt_ids: the token ids of its prompt.
    answer: the gold answer, by which questions of equal text are told apart; what follows the last "####" counts.
    response_ids, log_prob: [R] tokens of the answer and their log-probs; written: [R] false where an environment wrote
    the token; kept: [R] lists of the token ids that each was drawn from, empty for all of them; behaviour: who computed
    the log-probs; model: who wrote the answer. finished, reward, step, key, advantage, group_successes, group_answers,
    replays: as of a `Trajectory` and its `Origin`.
Every column but the first may be missing, and a cell may be empty. Other columns are ignored.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from exgrpo.train.common import jsonl
from exgrpo.train.common.errors import DataError, os_errors_as, shown
from exgrpo.train.common.records import Behaviour, KeptSets, Mask, TokenIds
from exgrpo.train.data.questions import Question

SUFFIXES = (".parquet", ".jsonl")
NAMES_QUESTION = ("question", "problem", "prompt_ids")
"""Columns of which a file needs one."""
TEXTS = ("question", "problem", "answer", "response", "behaviour", "model")
WHOLE = ("step", "group_successes", "group_answers", "replays", "key")
LISTS = ("prompt_ids", "response_ids", "log_prob", "written", "kept")
COLUMNS = (*TEXTS, *WHOLE, *LISTS, "finished", "reward", "advantage")
BATCH = 1024
"""Rows that are read at once."""
ZERO_LOG_PROB = 1e-3
"""A log-prob may be above 0 by so much, which is rounding."""


@dataclass(frozen=True, eq=False, slots=True)
class Trace:
    """An answer from a file; what the file does not say is None.

    Attributes:
        place: file and row.
        response: the text, without what ended it.
        question: text of the question.
        gold: its right answer.
        prompt: [P] token ids of the question's prompt.
        tokens: [R] token ids of the answer.
        log_prob: [R] fp32 of the policy that wrote it.
        written: [R], whether the policy wrote the token; None: all of them.
        kept: [R] the words that each token was drawn from; None: all.
        behaviour: who computed `log_prob`.
        model: name or path of the policy that wrote it.
        finished: whether it ended by itself.
        reward: what a verifier gave.
        step: training step in which it was written.
        advantage: in the group that it was written in.
        successes: m of that group.
        answers: F of that group.
        replays: how often it was replayed.
        key: of its solution; 0: none.
    """

    place: str
    response: str
    question: str | None = None
    gold: str | None = None
    prompt: TokenIds | None = None
    tokens: TokenIds | None = None
    log_prob: npt.NDArray[np.float32] | None = None
    written: Mask | None = None
    kept: KeptSets | None = None
    behaviour: Behaviour | None = None
    model: str | None = None
    finished: bool = True
    reward: float | None = None
    step: int | None = None
    advantage: float | None = None
    successes: int = 0
    answers: int = 0
    replays: int = 0
    key: int = 0


class Questions:
    """Finds the training question of a trace: by its text and gold answer, else by the token ids of its prompt, else by
    the prompt as people read it, which other projects write in the place of the question.

    Where a trace or the questions have no gold answers, its text is enough. Of equal questions the first one is found.

    Args:
        questions: of the run.
        read: token ids to text, special tokens left out.
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
        """The question of a trace; None: it is not among them, or has another gold answer."""
        gold = trace.gold if self._golds else None
        if trace.question is not None:
            by_text = self._by_text.get(trace.question) if gold is None else self._by_gold.get((trace.question, gold))
            if by_text is not None:
                return by_text
        by_prompt = None if trace.prompt is None else self._by_prompt.get(tuple(trace.prompt.tolist()))
        if by_prompt is None and trace.question is not None:
            by_prompt = self._by_reading.get(trace.question)
        return by_prompt if by_prompt and gold in (None, by_prompt.gold) else None

    @cached_property
    def _by_reading(self) -> dict[str, Question]:
        return {self._read(question.prompt): question for question in reversed(self._questions)}


def trace_files(source: Path) -> list[Path]:
    """The files of traces that a path means: itself, or those of an exported folder, in the order of their names.

    Raises:
        DataError: there is none.
    """
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
    if source.suffix not in SUFFIXES:
        raise DataError(f"{source}: unknown kind of file; traces are read from {' and '.join(SUFFIXES)}")
    return [source]


def check_traces(source: Path) -> None:
    """Whether traces can be read from here and have the columns that are needed; only their beginning is read.

    Raises:
        DataError: they cannot or have not; the message names the file and what is missing.
    """
    for path in trace_files(source):
        next(_rows(path), None)


def read_traces(source: Path) -> Iterator[Trace]:
    """All traces of a file or an exported folder, some at a time.

    Raises:
        DataError: a file cannot be read, lacks a column, or has a row that cannot be right; the message names it.
    """
    for path in trace_files(source):
        for place, row in _rows(path):
            try:
                yield parse_trace(row, place)
            except DataError as error:
                raise DataError(f"{place}: {error}") from None


def _rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    return _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path)


def _parquet_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        file = pyarrow.parquet.ParquetFile(path)
        check_columns(file.schema_arrow.names, str(path))
        known = [name for name in COLUMNS if name in file.schema_arrow.names]
        for batch in file.iter_batches(batch_size=BATCH, columns=known):
            columns = {name: _cells(batch.column(name)) for name in known}
            for i in range(batch.num_rows):
                number += 1
                yield f"{path} row {number}", {name: cells[i] for name, cells in columns.items()}
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read as parquet: {shown(error)}") from error


def _cells(column: Any) -> list[Any]:
    """The values of a column; lists of numbers stay arrays, for they may be long."""
    import pyarrow

    if not (pyarrow.types.is_list(column.type) or pyarrow.types.is_large_list(column.type)):
        return column.to_pylist()
    return [cell.values.to_numpy(zero_copy_only=False) if cell.is_valid else None for cell in column]


def _json_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for place, row in jsonl.read_objects(path):
        check_columns([name for name, value in row.items() if value is not None], place)
        yield place, row


def check_columns(names: list[str], place: str) -> None:
    """Whether an answer and its question can be read from columns of these names.

    Raises:
        DataError: they cannot; the message names what is missing.
    """
    missing = [] if "response" in names else ["response"]
    if not set(names) & set(NAMES_QUESTION):
        missing.append(f"question (or {' or '.join(NAMES_QUESTION[1:])})")
    if missing:
        raise DataError(f"{place}: has no {' and no '.join(missing)}; it has {', '.join(names) or 'nothing'}")


def parse_trace(row: Mapping[str, Any], place: str) -> Trace:
    """A row as a trace.

    Raises:
        DataError: a value cannot be right; the message names its column.
    """
    texts = {name: _text(row, name) for name in TEXTS}
    whole = {name: _whole(row, name) for name in WHOLE}
    response, question = texts["response"], texts["question"] if texts["question"] is not None else texts["problem"]
    tokens, log_prob = _numbers(row, "response_ids", np.int32), _numbers(row, "log_prob", np.float32)
    prompt = _numbers(row, "prompt_ids", np.int32)
    if response is None:
        raise DataError("response is empty")
    if question is None and prompt is None:
        raise DataError(f"{' and '.join(NAMES_QUESTION)} are empty: nothing names the question")
    if texts["behaviour"] not in (None, *get_args(Behaviour)):
        raise DataError(f"behaviour must be one of {', '.join(get_args(Behaviour))}, got {shown(texts['behaviour'])}")
    if log_prob is not None and (tokens is None or len(tokens) != len(log_prob)):
        raise DataError(f"{len(log_prob)} log_prob for {0 if tokens is None else len(tokens)} response_ids")
    if log_prob is not None and not (np.isfinite(log_prob).all() and (log_prob <= ZERO_LOG_PROB).all()):
        raise DataError("log_prob must be finite numbers up to 0")
    successes, answers = whole["group_successes"] or 0, whole["group_answers"] or 0
    if not 0 <= successes <= answers:
        raise DataError(f"group_successes is {successes} and group_answers {answers}: one is a part of the other")
    gold = texts["answer"]
    return Trace(
        place=place,
        response=response,
        question=question,
        gold=None if gold is None else gold.rpartition("####")[2].strip(),
        prompt=prompt,
        tokens=tokens,
        log_prob=log_prob,
        written=_written(row, tokens),
        kept=_kept(row, tokens),
        behaviour=texts["behaviour"],  # type: ignore[arg-type]
        model=texts["model"],
        finished=_flag(row, "finished"),
        reward=_number(row, "reward"),
        step=whole["step"],
        advantage=_number(row, "advantage"),
        successes=successes,
        answers=answers,
        replays=whole["replays"] or 0,
        key=whole["key"] or 0,
    )


def _text(row: Mapping[str, Any], name: str) -> str | None:
    value = row.get(name)
    if name == "answer" and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if value is not None and not isinstance(value, str):
        raise DataError(f"{name} must be text, got {type(value).__name__} {shown(value)}")
    return value


def _whole(row: Mapping[str, Any], name: str) -> int | None:
    value = row.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise DataError(f"{name} must be a whole number from 0, got {shown(value)}")
    return value


def _number(row: Mapping[str, Any], name: str) -> float | None:
    value = row.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"{name} must be a finite number, got {shown(value)}")
    return float(value)


def _flag(row: Mapping[str, Any], name: str) -> bool:
    value = row.get(name)
    if value is not None and not isinstance(value, bool):
        raise DataError(f"{name} must be true or false, got {shown(value)}")
    return value is not False


def _written(row: Mapping[str, Any], tokens: TokenIds | None) -> Mask | None:
    """[R] by token, at least one of them written by the policy; None: all are."""
    value = row.get("written")
    if value is None:
        return None
    given = np.asarray(value)
    if tokens is None or given.shape != tokens.shape or given.dtype != bool or not given.any():
        raise DataError(
            f"written must be true or false for each of the {0 if tokens is None else len(tokens)} response_ids, and "
            f"true for one of them, got {shown(value)}"
        )
    return None if given.all() else given


def _kept(row: Mapping[str, Any], tokens: TokenIds | None) -> KeptSets | None:
    """[R] the words of each token; None: all."""
    value = row.get("kept")
    if value is None:
        return None
    try:
        kept = KeptSets.of(list(value))
        pairs = zip([] if tokens is None else tokens, kept.lists(), strict=True)
        sound = all(
            not len(words) or (token in words and len(np.unique(words)) == len(words)) for token, words in pairs
        )
    except (TypeError, ValueError, OverflowError):
        sound = False
    if not sound or (kept.ids < 0).any():
        raise DataError(
            f"kept must be a list for each of the {0 if tokens is None else len(tokens)} response_ids, empty or with "
            f"that token id and others, each once, got {shown(value)}"
        )
    return kept if len(kept.ids) else None


def _numbers(row: Mapping[str, Any], name: str, kind: type[np.generic]) -> Any:
    """[R] numbers; token ids must be whole."""
    value = row.get(name)
    if value is None:
        return None
    whole = np.issubdtype(kind, np.integer)
    try:
        given = np.asarray(value if len(value) else np.empty(0, kind))
    except (TypeError, ValueError):
        given = np.empty((0, 0))
    fits = given.ndim == 1 and given.dtype.kind in ("iu" if whole else "iuf")
    if fits and whole and len(given):
        fits = given.min() >= 0 and given.max() < 2**31
    if not fits:
        raise DataError(f"{name} must be a list of {'token ids' if whole else 'numbers'}, got {shown(value)}")
    return given.astype(kind)
