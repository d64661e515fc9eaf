"""Read rows of question and answer from files, a hub and generators.

Files
    .jsonl: one object per line, empty lines skipped; .json: a list of objects, or one object per line; .parquet; .csv:
    the first line names the columns, a comma, a semicolon or a tab separates cells, and an empty cell is a missing
    value. A pattern (data/part-*.parquet) reads all matching files in the order of their names.
"""

import csv
import glob
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from types import ModuleType
from typing import Any

from exgrpo.train.common import plain
from exgrpo.train.common.errors import SHOWN, DataError, cut, os_errors_as, shown
from exgrpo.train.common.functions import PREFIX, find_module, module_names
from exgrpo.train.config.sources import checked, parameters, split_arguments
from exgrpo.train.data import gym
from exgrpo.train.data.rows import ANSWERS, COLUMNS, NO_COLUMNS, QUESTIONS, REMEDY, ColumnSelection, Row, parse_row
from exgrpo.train.reward.contract import Columns
from exgrpo.train.reward.names import DEFAULT

TASKS = "exgrpo.train.data.tasks"
"""Package of built-in tasks: modules with generate(split, count, seed, **arguments) -> objects with a question and an
answer, and optionally REWARD, the name of the reward of their questions."""
HELD_OUT_SEED = 0
"""Seed of generated held-out questions, independent of the run's seed so that all runs have the same ones."""
SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
DELIMITERS = ",;\t"
"""Accepted separators of the cells of a CSV file."""

_HUB_NAME = re.compile(r"\w[\w.-]*(?:/[\w.-]+)?(?::[\w.-]+)?")
_SHOWN_PROBLEMS = 5


@dataclass(frozen=True)
class _BadRow:
    place: str
    problem: str


def read_rows(
    source: str,
    *,
    split: str = "train",
    limit: int | None = None,
    seed: int = 0,
    columns: Columns = NO_COLUMNS,
    names: Mapping[str, str] | None = None,
    reward: str | None = None,
) -> list[Row]:
    """Return all rows of a source.

    Args:
        source: a .jsonl, .json, .parquet or .csv file, a pattern that matches several, builtin:NAME or
            reasoning_gym:NAME, both with optional arguments after a "?", or the name of a hub data set, "name" or
            "name:config". exgrpo.train.data.rows lists the row formats.
        split: split of a hub, builtin or reasoning-gym data set; files are read whole.
        limit: number of questions that a generator makes.
        seed: seed of a generator.
        columns: columns to keep.
        names: column names of the question, answer or solution in a file or a hub data set.
        reward: name of the reward of the questions; None: the one that the source brings, else the default.

    Raises:
        DataError: the source is empty, cannot be read or fetched, or has malformed rows (the message names files, rows
            and causes).
    """
    rows, name = _rows(source, split, limit, seed, ColumnSelection(columns, names or {})), reward or own_reward(source)
    return rows if name == DEFAULT else [replace(row, reward=name) for row in rows]


def _rows(source: str, split: str, limit: int | None, seed: int, reading: ColumnSelection) -> list[Row]:
    if _generated(source):
        if limit is None:
            raise DataError(f"{source} needs a limit: the number of questions to generate")
        return _generated_rows(source, split, limit, seed, reading.taken)
    if files := local_files(source):
        found = [item for path in files for item in _file_rows(path, reading)]
    else:
        found = list(_parsed(_hub_rows(source, split), source, source, reading))
    bad = [item for item in found if isinstance(item, _BadRow)]
    if bad:
        shown = "".join(f"\n  {item.place}: {item.problem}" for item in bad[:_SHOWN_PROBLEMS])
        more = f"\n  and {len(bad) - _SHOWN_PROBLEMS} more" if len(bad) > _SHOWN_PROBLEMS else ""
        raise DataError(f"{source}: {len(bad)} of {len(found)} rows are malformed:{shown}{more}")
    if not found:
        raise DataError(f"{source}: the data set is empty")
    return [item for item in found if isinstance(item, Row)]


def own_reward(source: str) -> str:
    """Return the name of the reward that a source brings to its questions, else the default."""
    if source.startswith(gym.PREFIX):
        return gym.REWARD
    task = _task(source) if source.startswith(PREFIX) else None
    return getattr(task, "REWARD", DEFAULT)


def from_hub(source: str) -> bool:
    """Return True if a source of questions is the name of a hub data set; raises DataError for a missing file."""
    return not _generated(source) and not local_files(source)


def _generated(source: str) -> bool:
    return source.startswith((PREFIX, gym.PREFIX))


def _task(source: str) -> ModuleType:
    task = find_module(TASKS, split_arguments(source)[0].removeprefix(PREFIX), "generate")
    if task is None:
        known = ", ".join(f"{PREFIX}{name}" for name in module_names(TASKS, "generate"))
        raise DataError(f"unknown data set {shown(source)}; there is {known}")
    return task


def _generated_rows(source: str, split: str, limit: int, seed: int, columns: Columns) -> list[Row]:
    name = source.removeprefix(PREFIX)
    if source.startswith(PREFIX):
        task, given = _task(source), split_arguments(source)[1]
        arguments = checked(source, given, parameters(task.generate, ("split", "count", "seed")))
        problems = task.generate(split, limit, seed, **arguments)
        found = [(problem.question, problem.answer, vars(problem)) for problem in problems]
    else:
        pairs = gym.read_gym(source, split, limit, seed)
        found = [(question, gold, {"question": question}) for question, gold in pairs]
    try:
        return [Row(question, gold, None, name, columns=columns.of(row)) for question, gold, row in found]
    except DataError as error:
        raise DataError(f"{source}: a question {error}") from None


def local_files(source: str) -> list[Path]:
    """Return the files that `source` means, none if it is a hub name.

    Raises:
        DataError: no file matches and it is no such name; or it is a folder, or a file of another kind.
    """
    path = Path(os.path.expanduser(source))
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
            raise DataError(f"{source}: no {', '.join(SUFFIXES)} file matches this pattern")
        return files
    if path.suffix in SUFFIXES or not _HUB_NAME.fullmatch(source):
        raise DataError(f"{source}: there is no such file")
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
        first, *others = str(error).strip().split("\n")
        if not config and others and "config" in others[0]:  # several configs, listed in the second line
            first = f"{cut(f'{first} {others[0]}', SHOWN)}: {name}:CONFIG names one"
        raise DataError(
            f"{source} is no file here, and split {split!r} of a hub data set of that name cannot be loaded: "
            f"{type(error).__name__}: {cut(first, 2 * SHOWN)}"
        ) from error


def _file_rows(path: Path, reading: ColumnSelection) -> Iterator[Row | _BadRow]:
    if path.suffix == ".parquet":
        values = parquet_values(path, lambda names: _read_columns(names, path, reading))
        return _parsed(values, str(path), path.stem, reading)
    with os_errors_as(DataError, f"{path} cannot be read"):
        raw = path.read_bytes()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}: line {line} is not UTF-8 text: {error.reason}") from error
    if path.suffix == ".csv":
        return _csv_rows(text, path, reading)
    if path.suffix == ".json":
        try:
            whole = plain.parse_json(text)
        except ValueError as error:  # also raised for a file with one object per line
            if text.lstrip().startswith("["):
                raise DataError(f"{path}: not valid JSON: {shown(error)}") from error
        else:
            return _parsed(whole if isinstance(whole, list) else [whole], str(path), path.stem, reading)
    return _parsed_lines(text, path, reading)


def parquet_values(
    path: Path, columns: Callable[[list[str]], list[str]] = lambda names: names, rows: int = 8192, arrays: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a parquet file.

    Args:
        path: the file.
        columns: selects the columns to read from all names.
        rows: rows in memory at once.
        arrays: keep lists of numbers as arrays, since they may be long.

    Raises:
        DataError: it cannot be read.
    """
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            read = columns(file.schema_arrow.names) if file.metadata.num_rows else []
            for batch in file.iter_batches(batch_size=rows, columns=read):
                cells = [_cells(column, arrays) for column in batch.columns]
                yield from (dict(zip(read, row, strict=True)) for row in zip(*cells, strict=True))
    except DataError:
        raise
    except Exception as error:  # also for text that is not UTF-8, and dates outside Python's range
        raise DataError(f"{path}: cannot be read as parquet: {shown(error)}") from error


def _cells(column: Any, arrays: bool) -> list[Any]:
    from pyarrow import types

    inner = column.type
    while types.is_list(inner) or types.is_large_list(inner):
        inner = inner.value_type
    if not arrays or inner == column.type or not (types.is_integer(inner) or types.is_floating(inner)):
        return column.to_pylist()
    return [cell.values.to_numpy(zero_copy_only=False) if cell.is_valid else None for cell in column]


def _read_columns(names: list[str], path: Path, reading: ColumnSelection) -> list[str]:
    usual = {*names, *reading.names}
    for wanted in (QUESTIONS, ANSWERS):
        if not usual.intersection(wanted):
            given = cut(", ".join(names), SHOWN)
            raise DataError(f"{path}: has none of the columns {', '.join(wanted)}; it has {given}: {REMEDY}")
    try:
        reading.check(names)
        reading.taken.of(dict.fromkeys((*names, "question", *reading.names)))
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    named = reading.names.values()
    read = [name for name in names if name in COLUMNS or name in reading.taken or name in named]
    if twice := [name for name in read if read.count(name) > 1]:
        raise DataError(f"{path}: has more than one column {shown(twice[0])}: leave one of them")
    return read


def _delimiter(text: str, reading: ColumnSelection) -> str:
    """Return the delimiter with which the first line has the most known columns, or else the most cells."""
    known = {*COLUMNS, *reading.names.values()}

    def fit(delimiter: str) -> tuple[int, int]:
        names = next(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True), [])
        return sum(name.strip() in known for name in names), len(names)

    return max(DELIMITERS, key=fit)


def _csv_rows(text: str, path: Path, reading: ColumnSelection) -> Iterator[Row | _BadRow]:
    # The csv module's cell limit is global to the process; long solutions and unclosed quotes exceed it.
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    # Without skipinitialspace the quotes in `"1 + 1, what is it?", "2"` would be part of the answer.
    records = csv.reader(
        io.StringIO(text, newline=""), delimiter=_delimiter(text, reading), strict=True, skipinitialspace=True
    )
    try:
        names = [name.strip() for name in next(records, [])]
    except csv.Error as error:
        raise DataError(f"{path}: the line of its columns is not valid CSV: {error}") from error
    if not names:
        return
    _read_columns(names, path, reading)
    while True:
        place = f"{path} line {records.line_num + 1}"
        try:
            cells = next(records, None)
        except csv.Error as error:
            yield _BadRow(place, f"not valid CSV: {error}")
            continue
        if cells is None:
            return
        if len(cells) > len(names):
            yield _BadRow(place, f"has more cells than the {len(names)} columns that the first line names")
        elif cells:
            row = {name: cell or None for name, cell in zip_longest(names, cells)}
            yield _row(row, place, path.stem, reading)


def _parsed(values: Iterable[Any], place: str, source: str, reading: ColumnSelection) -> Iterator[Row | _BadRow]:
    return (_row(value, f"{place} row {number}", source, reading) for number, value in enumerate(values, start=1))


def _parsed_lines(text: str, path: Path, reading: ColumnSelection) -> Iterator[Row | _BadRow]:
    # Not splitlines(): JSON text may contain U+2028 and the like, which do not end a line of the file.
    for line in plain.parse_lines(text.split("\n")):
        place = f"{path} line {line.number}"
        yield _BadRow(place, line.problem) if line.problem else _row(line.value, place, path.stem, reading)


def _row(value: Any, place: str, source: str, reading: ColumnSelection) -> Row | _BadRow:
    try:
        return replace(parse_row(value, source, reading), place=place)
    except DataError as error:
        return _BadRow(place, str(error))
