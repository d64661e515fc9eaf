"""Arrays on disk: files in safetensors format, named by the checksum of their content."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from exgrpo.train.common.columns import columns_of, renamed
from exgrpo.train.common.durable import DamagedFileError, flush, sha256
from exgrpo.train.replay.flat import TokenColumns
from exgrpo.train.replay.table import packed, whole_batch, with_sets

SUFFIX = ".safetensors"


def write_checked(folder: Path, arrays: Mapping[str, np.ndarray]) -> str:
    """Write arrays to a file that is named by its SHA-256, whole or not at all, and return that name."""
    temporary = folder / "unnamed.tmp"
    try:
        save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, temporary)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    flush(temporary)
    name = sha256(temporary)
    temporary.replace(folder / f"{name}{SUFFIX}")
    flush(folder)
    return name


def read_checked(folder: Path, name: str) -> dict[str, np.ndarray]:
    """Read what `write_checked` wrote; raise DamagedFileError if it is missing or has changed."""
    path = folder / f"{name}{SUFFIX}"
    if not path.is_file():
        raise DamagedFileError(f"{path} is missing")
    if sha256(path) != name:
        raise DamagedFileError(f"{path} is damaged: its content does not have the checksum in its name")
    return load_file(path)


def read_experience(folder: Path, name: str) -> dict[str, np.ndarray]:
    """Read the arrays of a replay, as they are in the present format; raises as `read_checked`."""
    arrays = renamed(read_checked(folder, name))
    if "blocks" in arrays:
        files = [renamed(read_checked(folder, bytes(digest).hex())) for digest in arrays["blocks"]]
        rows = {name.removeprefix("row."): values for name, values in arrays.items() if name.startswith("row.")}
        return {**arrays, **_from_files(files, rows, rows.pop("block"), rows.pop("start"))}
    if "segments" in arrays:
        files = [renamed(read_checked(folder, bytes(digest).hex())) for digest in arrays["segments"]]
        return {**arrays, **_from_segments(files, arrays)}
    return arrays


def _from_segments(files: Sequence[dict[str, Any]], arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Convert format 5: files have rows, too, and `segment` and `row` name those that are there."""
    names = {"response": "token", "log_prob": "old_log_prob", "kept_words": "allowed_tokens.sizes"}
    files = [{names.get(name, name): values for name, values in file.items()} for file in files]
    segment, row = arrays["segment"], arrays["row"]
    first = np.cumsum([0, *(len(file["length"]) for file in files)])[segment]
    of_files = {"length", "start", *columns_of("group", "row", stored=True)}
    for file in files:
        file["start"] = np.cumsum(file["length"]) - file["length"]
        of_files &= file.keys()
    rows = {name: np.concatenate([file[name] for file in files])[first + row] for name in of_files if files}
    rows |= {name: arrays[name] for name in ("advantage", "successes", "answers", "replays")}
    return _from_files(files, rows, segment, rows.pop("start", row))


def _from_files(
    files: Sequence[Mapping[str, Any]], rows: dict[str, np.ndarray], file: np.ndarray, start: np.ndarray
) -> dict[str, np.ndarray]:
    """Convert formats 5 and 6: the tokens of a row lie in one of several files."""
    tokens, begins = TokenColumns(), [0]
    for found in map(with_sets, files):
        held = {name: column.array(found[name]) for name, column in columns_of("token").items() if name in found}
        tokens.append(held, len(held["token"]))
        begins.append(tokens.size)
    length = rows.pop("length", np.empty(0, np.int64)).astype(np.int64)
    question = rows.pop("question", np.empty(0, np.int64))
    return packed(whole_batch(question, length, {**rows, **tokens.gather(np.array(begins)[file] + start, length)}))
