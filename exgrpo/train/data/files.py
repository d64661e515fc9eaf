r"""Rows of question and answer from files, from a hub and from generators.

Row formats
    {"prompt": [{"role", "content"}, ...], "reward_model": {"ground_truth": ...}, "data_source": ...}: the last user
    message is the question, the first system message is kept apart.
    {"question" or "problem": ..., "answer" or "solution": ...}: the question is a text, or a list of {role, content}
    messages, which are all asked: the last is the user's, and a system message, which is the first, is kept apart. The
    gold answer is what follows the last "####" of the answer, or the whole answer without it. Where only "solution" is
    given it must hold "####" or a \boxed{...}.
    A gold answer is a string, a number, or a list of one of them. Other columns are for rewards that take them.

Files
    .jsonl: one object per line, empty lines skipped; .json: a list of objects, or one object per line; .parquet; .csv:
    the first line names the columns, an empty cell is no value, cells of prompt and reward_model are JSON. A pattern
    (data/part-*.parquet) reads all its files in the order of their names.
"""

import csv
import glob
import io
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from exgrpo.train import plain_json
from exgrpo.train.builtin import PREFIX, find_module, module_names
from exgrpo.train.data import gym
from exgrpo.train.data.arguments import checked, parameters, split_arguments
from exgrpo.train.data.conversation import Message, as_text, read_conversation
from exgrpo.train.errors import SHOWN, DataError, MissingDataError, cut, os_errors_as, shown
from exgrpo.train.reward.contract import Columns
from exgrpo.train.reward.grading import boxed_answer

TASKS = "exgrpo.train.data"
"""A built-in task is a module here with generate(split, count, seed, **arguments) -> objects with a question and an
answer. Its REWARD, where it has one, is the name of the reward of its questions."""
HELD_OUT_SEED = 0
"""Of generated held-out questions, whatever the seed of a run: runs that differ in their seed have the same ones."""
SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
COLUMNS = ("prompt", "reward_model", "data_source", "question", "problem", "answer", "solution")
NESTED = ("prompt", "reward_model")
"""Columns whose values are no texts: JSON in a file that knows only texts."""

_HUB_NAME = re.compile(r"\w[\w.-]*(?:/[\w.-]+)?(?::[\w.-]+)?")
_SHOWN_PROBLEMS = 5


@dataclass(frozen=True)
class Row:
    """One question as the data set gives it."""

    question: str
    gold: str
    system: str | None
    """The row's own system message."""
    source: str
    """The row's data_source, else the stem of its file, the hub name or the name of the generator with arguments."""
    reward: str = ""
    """Name of the reward that its source brings; "": none."""
    columns: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Those that a reward takes, by name; `question` is among them whatever the data set calls it."""
    turns: tuple[Message, ...] = ()
    """What user and assistant said before the question."""

    @property
    def text(self) -> str:
        """The question as people read it, with the turns before it."""
        return as_text((*self.turns, Message("user", self.question))) if self.turns else self.question


@dataclass(frozen=True)
class _BadRow:
    place: str
    problem: str


NO_COLUMNS = Columns()


def read_rows(
    source: str,
    *,
    split: str,
    limit: int | None,
    seed: int,
    columns: Columns = NO_COLUMNS,
    reward: str | None = None,
) -> list[Row]:
    """All rows of `source`; see exgrpo.train.data.questions.load_questions for the arguments and errors."""
    rows = _rows(source, split, limit, seed, columns)
    return rows if reward is None else [replace(row, reward=reward) for row in rows]


def _rows(source: str, split: str, limit: int | None, seed: int, columns: Columns) -> list[Row]:
    if _generated(source):
        if limit is None:
            raise DataError(f"{source} needs a limit: the number of questions to generate")
        read = _builtin_rows if source.startswith(PREFIX) else _gym_rows
        return read(source, split, limit, seed, columns)
    if files := _local_files(source):
        found = [item for path in files for item in _file_rows(path, columns)]
    else:
        found = list(_parsed(_hub_rows(source, split), source, source, columns))
    bad = [item for item in found if isinstance(item, _BadRow)]
    if bad:
        shown = "".join(f"\n  {item.place}: {item.problem}" for item in bad[:_SHOWN_PROBLEMS])
        more = f"\n  and {len(bad) - _SHOWN_PROBLEMS} more" if len(bad) > _SHOWN_PROBLEMS else ""
        raise DataError(f"{source}: {len(bad)} of {len(found)} rows are malformed:{shown}{more}")
    if not found:
        raise DataError(f"{source}: the data set is empty")
    return [item for item in found if isinstance(item, Row)]


def own_reward(source: str) -> str:
    """Name of the reward that a source brings to its questions; "": none."""
    if source.startswith(gym.PREFIX):
        return gym.REWARD
    task = _task(source) if source.startswith(PREFIX) else None
    return getattr(task, "REWARD", "")


def from_hub(source: str) -> bool:
    """Whether a source of questions is the name of a hub data set. Raises MissingDataError for a missing file."""
    return not _generated(source) and not _local_files(source)


def _generated(source: str) -> bool:
    return source.startswith((PREFIX, gym.PREFIX))


def parse_row(row: Any, source: str, columns: Columns = NO_COLUMNS) -> Row:
    """Reads one row of either format; `source` is used where it names none. Raises DataError: what is wrong."""
    if not isinstance(row, dict):
        raise DataError(f"expected an object, got {_kind(row)}")
    if row.get("prompt") is not None:
        return _paper_row(row, source, columns)
    question = next((row[key] for key in ("question", "problem") if row.get(key) is not None), None)
    if question is None:
        given = ", ".join(str(key) for key, value in row.items() if value is not None)
        raise DataError(f"has none of prompt, question, problem; its keys are {cut(given, SHOWN) or 'none'}")
    if row.get("answer") is not None:
        gold = _gold_text(row["answer"], "answer").rpartition("####")[2]
    elif row.get("solution") is not None:
        gold = _answer_of_solution(_gold_text(row["solution"], "solution"))
    else:
        raise DataError("has a question but neither answer nor solution")
    if not isinstance(question, list):
        return _checked_row(question, gold, None, row, source, columns)
    *turns, last = read_conversation(question)
    system = turns.pop(0).content if turns and turns[0].role == "system" else None
    return replace(_checked_row(last.content, gold, system, row, source, columns), turns=tuple(turns))


def _paper_row(row: dict[str, Any], source: str, columns: Columns) -> Row:
    messages = row["prompt"]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise DataError("prompt must be a list of {role, content} messages")
    questions = [message.get("content") for message in messages if message.get("role") == "user"]
    if not questions:
        raise DataError("prompt has no user message")
    systems = [message.get("content") for message in messages if message.get("role") == "system"]
    if systems and not isinstance(systems[0], str):
        raise DataError(f"the system message must be text, got {_kind(systems[0])}")
    reward_model = row.get("reward_model")
    if not isinstance(reward_model, dict) or reward_model.get("ground_truth") is None:
        raise DataError("has no reward_model.ground_truth")
    gold = _gold_text(reward_model["ground_truth"], "reward_model.ground_truth")
    return _checked_row(questions[-1], gold, systems[0] if systems else None, row, source, columns)


def _checked_row(
    question: Any, gold: str, system: str | None, row: dict[str, Any], source: str, columns: Columns
) -> Row:
    if not isinstance(question, str):
        raise DataError(f"the question must be text, got {_kind(question)}")
    if not question.strip():
        raise DataError("the question is empty")
    if not gold.strip():
        raise DataError("the answer is empty")
    named = row.get("data_source")
    taken = columns.of(row if row.get("question") is not None else {**row, "question": question})
    return Row(question, gold.strip(), system, named if isinstance(named, str) and named else source, columns=taken)


def _gold_text(value: Any, key: str) -> str:
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, str):
        return value
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or (isinstance(value, float) and not math.isfinite(value)):
        raise DataError(f"{key} must be text, a finite number or a list of one of them, got {_kind(value)}")
    return str(value)


def _answer_of_solution(solution: str) -> str:
    if "####" in solution:
        return solution.rpartition("####")[2]
    content = boxed_answer(solution)
    if content is None:
        raise DataError("has no answer, and its solution holds neither #### nor \\boxed{...}")
    return content


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return "null" if value is None else f"{type(value).__name__} {value!r:.40}"


def _task(source: str) -> ModuleType:
    task = find_module(TASKS, split_arguments(source)[0].removeprefix(PREFIX), "generate")
    if task is None:
        known = ", ".join(f"{PREFIX}{name}" for name in module_names(TASKS, "generate"))
        raise DataError(f"unknown data set {shown(source)}; there is {known}")
    return task


def _builtin_rows(source: str, split: str, limit: int, seed: int, columns: Columns) -> list[Row]:
    task, given = _task(source), split_arguments(source)[1]
    arguments = checked(source, given, parameters(task.generate, ("split", "count", "seed")))
    reward, name = own_reward(source), source.removeprefix(PREFIX)
    problems = task.generate(split, limit, seed, **arguments)
    return [
        Row(problem.question, problem.answer, None, name, reward, _of_generated(source, columns, vars(problem)))
        for problem in problems
    ]


def _gym_rows(source: str, split: str, limit: int, seed: int, columns: Columns) -> list[Row]:
    pairs = gym.read_gym(source, split, limit, seed)
    return [
        Row(question, gold, None, source, gym.REWARD, _of_generated(source, columns, {"question": question}))
        for question, gold in pairs
    ]


def _of_generated(source: str, columns: Columns, row: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return columns.of(row)
    except DataError as error:
        raise DataError(f"{source}: a question {error}") from None


def _local_files(source: str) -> list[Path]:
    """The files that `source` means, none if it is a hub name."""
    path = Path(source).expanduser()
    with os_errors_as(DataError, f"{source} cannot be read"):
        is_file, is_folder = path.is_file(), path.is_dir()
    if is_file:
        if path.suffix not in SUFFIXES:
            raise DataError(f"{source}: unknown kind of file; known are {', '.join(SUFFIXES)}")
        return [path]
    if is_folder:
        raise DataError(f"{source} is a folder: name a file in it, or a pattern such as {source}/train*.parquet")
    if glob.has_magic(source):
        files = [Path(name) for name in sorted(glob.glob(str(path))) if Path(name).suffix in SUFFIXES]
        if not files:
            raise MissingDataError(f"{source}: no {', '.join(SUFFIXES)} file matches this pattern")
        return files
    if path.suffix in SUFFIXES or not _HUB_NAME.fullmatch(source):
        raise MissingDataError(f"{source}: there is no such file")
    return []


def _hub_rows(source: str, split: str) -> Iterable[Any]:
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{source} is no file, and reading a hub needs `pip install exgrpo[train]`") from error
    name, _, config = source.partition(":")
    try:
        return datasets.load_dataset(name, config or None, split=split)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise DataError(
            f"{source} is no file here, and split {split!r} of a hub data set of that name cannot be loaded: "
            f"{type(error).__name__}: {cut(reason, SHOWN)}"
        ) from error


def _file_rows(path: Path, columns: Columns) -> Iterator[Row | _BadRow]:
    if path.suffix == ".parquet":
        return _parsed(_parquet_values(path, columns), str(path), path.stem, columns)
    with os_errors_as(DataError, f"{path} cannot be read"):
        raw = path.read_bytes()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}: line {line} is not UTF-8 text: {error.reason}") from error
    if path.suffix == ".csv":
        return _csv_rows(text, path, columns)
    if path.suffix == ".json" and text.lstrip().startswith("["):
        try:
            return _parsed(plain_json.parse(text), str(path), path.stem, columns)
        except ValueError as error:
            raise DataError(f"{path}: not valid JSON: {shown(error)}") from error
    return _parsed_lines(text, path, columns)


def _parquet_values(path: Path, taken: Columns) -> Iterator[Any]:
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        columns = _read_columns(file.schema_arrow.names, path, taken) if file.metadata.num_rows else []
        for batch in file.iter_batches(batch_size=8192, columns=columns):
            yield from batch.to_pylist()
    except DataError:
        raise
    except (
        Exception
    ) as error:  # beside errors of the format, texts that are no UTF-8 and dates that Python does not have
        raise DataError(f"{path}: cannot be read as parquet: {shown(error)}") from error


def _read_columns(names: list[str], path: Path, taken: Columns) -> list[str]:
    """Those of a table's columns that are read."""
    if not any(name in names for name in COLUMNS):
        raise DataError(f"{path}: has none of the columns {', '.join(COLUMNS)}; it has {', '.join(names)}")
    try:
        taken.of(dict.fromkeys((*names, "question")))
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    read = [name for name in names if name in COLUMNS or name in taken]
    if twice := [name for name in read if read.count(name) > 1]:
        raise DataError(f"{path}: has more than one column {shown(twice[0])}: leave one of them")
    return read


def _csv_rows(text: str, path: Path, taken: Columns) -> Iterator[Row | _BadRow]:
    # The module's limit of a cell holds for the whole process; long solutions and quotes without an end meet it.
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    records = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        columns = [name.strip() for name in next(filter(None, records), ())]
    except csv.Error as error:
        raise DataError(f"{path}: the line of its columns is not valid CSV: {error}") from error
    if not columns:
        return
    _read_columns(columns, path, taken)
    while True:
        line = records.line_num + 1
        try:
            cells = next(records, None)
            if cells is None:
                return
            if cells:
                yield parse_row(_csv_object(columns, cells), path.stem, taken)
        except csv.Error as error:
            yield _BadRow(f"{path} line {line}", f"not valid CSV: {error}")
        except DataError as error:
            yield _BadRow(f"{path} line {line}", str(error))


def _csv_object(columns: list[str], cells: list[str]) -> dict[str, Any]:
    if len(cells) != len(columns):
        raise DataError(f"has {len(cells)} cells, and the first line names {len(columns)} columns")
    row: dict[str, Any] = {name: cell or None for name, cell in zip(columns, cells, strict=True)}
    for name in NESTED:
        if row.get(name) is not None:
            try:
                row[name] = plain_json.parse(row[name])
            except ValueError as error:
                raise DataError(f"{name} must be JSON in a CSV file: {error}") from error
    return row


def _parsed(values: Iterable[Any], place: str, source: str, columns: Columns) -> Iterator[Row | _BadRow]:
    for number, value in enumerate(values, start=1):
        try:
            yield parse_row(value, source, columns)
        except DataError as error:
            yield _BadRow(f"{place} row {number}", str(error))


def _parsed_lines(text: str, path: Path, columns: Columns) -> Iterator[Row | _BadRow]:
    # Not splitlines(): JSON text may hold U+2028 and the like, which end no line of the file.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield parse_row(plain_json.parse(line), path.stem, columns)
        except DataError as error:
            yield _BadRow(f"{path} line {number}", str(error))
        except ValueError as error:
            place = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else shown(error)
            yield _BadRow(f"{path} line {number}", f"not valid JSON: {place}")
