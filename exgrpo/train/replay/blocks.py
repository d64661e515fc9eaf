"""Tokens of stored answers, end to end in blocks: in RAM, or in files that are mapped into memory.

An array for each answer would take as much memory as 30 tokens. Blocks are only added to, so that a snapshot of the
buffer shares them, and a checkpoint writes a full one once. A block goes when all of its answers have left.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from exgrpo.train.common.columns import COLUMNS, Column, Ints, columns_of
from exgrpo.train.common.errors import ConfigError
from exgrpo.train.common.records import AllowedTokens

FEWEST, MOST = 1 << 12, 1 << 22
"""Tokens of the first block and of the largest ones; one between has room for as many as are stored."""


class Places(NamedTuple):
    """The places of answers.

    Attributes:
        block: [N] number of the block of each.
        start: [N] where its tokens begin there.
        length: [N] its number of tokens.
    """

    block: Ints
    start: Ints
    length: Ints


class TokenBlock:
    """Columns of tokens, of which a column without any value but its default is missing.

    Args:
        room: tokens that it can hold.
        folder: of files for the arrays; None: they are in RAM.

    Attributes:
        columns: [room] each, by name; `AllowedTokens` may have room after their ids.
        used: tokens that it holds.
    """

    def __init__(self, room: int, folder: Path | None = None) -> None:
        self.room, self.folder, self.used = room, folder, 0
        self.columns: dict[str, Any] = {}

    def append(self, tokens: Mapping[str, Any], size: int) -> None:
        """Append so many tokens; a missing column has its default. Raises ConfigError: there is no space."""
        for name, column in columns_of("token", stored=True).items():
            given = tokens.get(name)
            if given is None or column.is_default(given):
                if name not in self.columns:
                    continue
                given = column.filled(size)
            if column.dtype is AllowedTokens:
                self.columns[name] = self._with_sets(self.columns.get(name), given)
                continue
            if name not in self.columns:
                self.columns[name] = _array(self.room, column.dtype, self.folder)
                self.columns[name][: self.used] = column.filled(self.used)
            self.columns[name][self.used : self.used + size] = given
        self.used += size

    def _with_sets(self, held: AllowedTokens | None, new: AllowedTokens) -> AllowedTokens:
        ids, bounds = (held.ids, held.bounds) if held else (_array(0, np.int32, None), None)
        bounds = _array(self.room + 1, np.int64, self.folder) if bounds is None else bounds
        first, size = int(bounds[self.used]), len(new)
        end = first + len(new.ids)
        bounds[self.used + 1 : self.used + 1 + size] = first + new.bounds[1:]
        if end > len(ids):
            ids, old = _array(max(end, 2 * len(ids)), np.int32, self.folder), ids
            ids[:first] = old[:first]
        ids[first:end] = new.ids
        return AllowedTokens(ids, bounds)

    def part(self, column: str, start: int, end: int) -> Any:
        """Return tokens `start` to before `end` of a column, without a copy of what it has."""
        return self.columns[column][start:end] if column in self.columns else COLUMNS[column].filled(end - start)


class TokenBlocks:
    """The blocks of a buffer.

    Args:
        folder: of temporary files that hold the tokens, and that the system may keep out of RAM; None: tokens are in
            RAM. The files have no names: they go with the process.

    Attributes:
        contents: the blocks by their numbers.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.contents: dict[int, TokenBlock] = {}
        self._living: dict[int, int] = {}
        self._last, self._open = -1, False

    def extend(self, tokens: Mapping[str, Any], length: Ints) -> Places:
        """Store the tokens of several answers [N], which lie end to end; raises as `TokenBlock.append`."""
        ends = np.cumsum(length)
        starts = ends - length
        places = Places(np.empty(len(length), np.int64), np.empty(len(length), np.int64), length)
        first = 0
        while first < len(length):
            block = self._with_room(int(length[first]))
            begin = int(starts[first])
            last = int(np.searchsorted(ends, begin + block.room - block.used, side="right"))
            end = int(ends[last - 1])
            places.block[first:last] = self._last
            places.start[first:last] = starts[first:last] - begin + block.used
            block.append({name: values[begin:end] for name, values in tokens.items()}, end - begin)
            self._living[self._last] += end - begin
            first = last
        return places

    def release(self, places: Places) -> None:
        """Let answers go."""
        numbers, which = np.unique(places.block, return_inverse=True)
        for number, tokens in zip(numbers.tolist(), np.bincount(which, places.length).tolist(), strict=True):
            self._living[number] -= int(tokens)
            if not self._living[number]:
                del self._living[number], self.contents[number]

    def sparse(self) -> list[int]:
        """Return the numbers of blocks, but for the one that is being filled, of which less than half is left."""
        filling = self._last if self._open else -1
        return [n for n, living in self._living.items() if n != filling and 2 * living < self.contents[n].used]

    def adopt(self, contents: Mapping[int, TokenBlock], places: Places) -> None:
        """Hold these answers of other blocks instead of what is held; nothing is copied or added to those blocks."""
        numbers, which = np.unique(places.block, return_inverse=True)
        self._living = dict(zip(numbers.tolist(), map(int, np.bincount(which, places.length)), strict=True))
        self.contents = {number: contents[number] for number in self._living}
        self._last, self._open = max(self.contents, default=-1), False

    def _with_room(self, tokens: int) -> TokenBlock:
        last = self.contents.get(self._last) if self._open else None
        if last is None or last.room - last.used < tokens:
            room = max(tokens, min(MOST, max(FEWEST, sum(self._living.values()))))
            self._last, self._open = self._last + 1, True
            last = self.contents[self._last] = TokenBlock(room, self.folder)
            self._living[self._last] = 0
        return last


def gather(contents: Mapping[int, TokenBlock], places: Places) -> dict[str, Any]:
    """Return the columns of some answers, end to end; sets only where a block has some.

    What lies end to end already is copied in one piece.
    """
    block, start, length = places
    apart = (block[1:] != block[:-1]) | (start[1:] != start[:-1] + length[:-1])
    first = np.flatnonzero(np.append(True, apart)[: len(block)])
    last = (np.append(first[1:], len(block)) - 1)[: len(first)]
    runs = [*zip(block[first].tolist(), start[first].tolist(), (start[last] + length[last]).tolist(), strict=True)]

    def joined(name: str, column: Column) -> Any:
        if column.dtype is AllowedTokens and not any(name in contents[number].columns for number, _, _ in runs):
            return None
        return column.joined([column.filled(0), *(contents[number].part(name, *ends) for number, *ends in runs)])

    found = {name: joined(name, column) for name, column in columns_of("token", stored=True).items()}
    return {name: values for name, values in found.items() if values is not None}


def check_folder(folder: Path | None) -> None:
    """Check that tokens can be kept in a folder. Raises ConfigError."""
    if folder is not None:
        _array(1, np.int32, folder)


def _array(size: int, dtype: Any, folder: Path | None) -> npt.NDArray:
    """Return zeros, in RAM or in a file of a folder that is mapped into memory."""
    if folder is None or not size:
        # The system gives pages of zeros when they are touched, so that room takes no memory.
        return np.zeros(size, dtype)
    space = size * np.dtype(dtype).itemsize
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            # A mapped file without space on its disk would end the process when it is written to.
            file.write(bytes(space))
            file.flush()
            # As a plain array, of which a part is made in a tenth of the time.
            return np.asarray(np.memmap(file, dtype, "r+", 0, size))
    except OSError as error:
        raise ConfigError(
            f"experience.folder {folder}: {error.strerror or error}; name a folder that can be written to, with "
            f"{space / 1e6:.0f} MB of space or more, or leave experience.folder out"
        ) from error
