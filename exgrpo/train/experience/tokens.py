"""The tokens of stored answers: end to end in blocks, in RAM or in files that are mapped into memory.

An array of its own for each answer would cost as much as 30 tokens, and could not lie on disk. Blocks are only added
to, so whoever holds a part of one keeps it as it was. A block goes when all of its answers have left.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from exgrpo.train.errors import ConfigError
from exgrpo.train.records import Mask, TokenIds

Ints = npt.NDArray[np.int64]
FEWEST, MOST = 1 << 12, 1 << 22
"""Tokens of the first block and of the largest ones; one between has room for as many as are stored."""
BYTES = 9
"""Of a token: its id, its log-prob and its mark."""


class Tokens(NamedTuple):
    """The tokens of one answer, or of several, end to end.

    Attributes:
        response: [T] int32, ids.
        log_prob: [T] fp32 of the policy that wrote them.
        observed: [T] bool, whether an environment wrote the token.
    """

    response: TokenIds
    log_prob: npt.NDArray[np.float32]
    observed: Mask

    def part(self, start: int, end: int) -> "Tokens":
        """Those from `start` to before `end`, without a copy."""
        return Tokens(self.response[start:end], self.log_prob[start:end], self.observed[start:end])


class Places(NamedTuple):
    """Where answers lie.

    Attributes:
        block: [N] number of the block of each.
        start: [N] where its tokens begin there.
        length: [N] how many it has.
    """

    block: Ints
    start: Ints
    length: Ints


class TokenBlocks:
    """Keeps the tokens of answers.

    Args:
        folder: of temporary files that hold the tokens, and that the system may keep out of RAM; None: tokens are in
            RAM. The files have no names: they go with the process.

    Attributes:
        contents: the blocks by their numbers.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.contents: dict[int, Tokens] = {}
        self._living: dict[int, int] = {}
        self._last, self._used, self._room = -1, 0, 0

    def append(self, response: TokenIds, log_prob: npt.NDArray[np.float32], observed: Mask | None) -> tuple[int, int]:
        """Store tokens in one block; `observed` None: the policy wrote all of them.

        Returns:
            the number of the block, and where they begin there.

        Raises:
            ConfigError: there is no space for a file in the folder.
        """
        self._make_room(len(response))
        number, start, end = self._last, self._used, self._used + len(response)
        block = self.contents[number]
        block.response[start:end] = response
        block.log_prob[start:end] = log_prob
        if observed is not None and observed.any():
            block.observed[start:end] = observed
        self._used = end
        self._living[number] += len(response)
        return number, start

    def extend(self, tokens: Tokens, length: Ints) -> Places:
        """Store the tokens of several answers [N], which lie end to end; raises as `append`."""
        ends = np.cumsum(length)
        starts = ends - length
        places = Places(np.empty(len(length), np.int64), np.empty(len(length), np.int64), length)
        first = 0
        while first < len(length):
            self._make_room(int(length[first]))
            begin = int(starts[first])
            last = int(np.searchsorted(ends, begin + self._room - self._used, side="right"))
            number, start = self.append(*tokens.part(begin, int(ends[last - 1])))
            places.block[first:last] = number
            places.start[first:last] = starts[first:last] - begin + start
            first = last
        return places

    def release(self, places: Places) -> None:
        """Let answers go."""
        numbers, which = np.unique(places.block, return_inverse=True)
        left = np.bincount(which, places.length)
        for number, tokens in zip(numbers.tolist(), left.tolist(), strict=True):
            self._living[number] -= int(tokens)
            if not self._living[number]:
                del self._living[number], self.contents[number]

    def sparse(self) -> list[int]:
        """The numbers of blocks, without the one that is being filled, of which less than half is left."""
        size = {number: len(tokens.response) for number, tokens in self.contents.items()}
        return [n for n, living in self._living.items() if n != self._last and 2 * living < size[n]]

    def adopt(self, contents: Mapping[int, Tokens], places: Places) -> None:
        """Hold these answers of other blocks instead of what is held; nothing is copied or added to those blocks."""
        numbers, which = np.unique(places.block, return_inverse=True)
        self._living = dict(zip(numbers.tolist(), map(int, np.bincount(which, places.length)), strict=True))
        self.contents = {number: contents[number] for number in self._living}
        self._last, self._used, self._room = max(self.contents, default=-1) + 1, 0, 0

    def _make_room(self, tokens: int) -> None:
        """Begin a new block where the one that is being filled has less room."""
        if self._last in self.contents and self._room - self._used >= tokens:
            return
        self._room = max(tokens, min(MOST, max(FEWEST, sum(self._living.values()))))
        self._last, self._used = self._last + 1, 0
        self.contents[self._last] = _in_memory(self._room) if self.folder is None else _in_file(self._room, self.folder)
        self._living[self._last] = 0


def check_folder(folder: Path | None) -> None:
    """Whether tokens can be kept in a folder. Raises ConfigError."""
    if folder is not None:
        TokenBlocks(folder).append(np.zeros(1, np.int32), np.zeros(1, np.float32), None)


def gather(contents: Mapping[int, Tokens], places: Places) -> Tokens:
    """The tokens of some answers, end to end; what lies end to end already is copied in one piece."""
    block, start, length = places
    if not len(block):
        return _in_memory(0)
    apart = (block[1:] != block[:-1]) | (start[1:] != start[:-1] + length[:-1])
    first = np.flatnonzero(np.append(True, apart))
    last = np.append(first[1:], len(block)) - 1
    runs = zip(block[first].tolist(), start[first].tolist(), (start[last] + length[last]).tolist(), strict=True)
    parts = [contents[number].part(begin, end) for number, begin, end in runs]
    return Tokens(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def _in_memory(size: int) -> Tokens:
    # The system gives pages of zeros when they are touched, so room and marks that nobody sets take no memory.
    return Tokens(np.zeros(size, np.int32), np.zeros(size, np.float32), np.zeros(size, bool))


def _in_file(size: int, folder: Path) -> Tokens:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            # A mapped file without space on its disk would end the process when it is written to.
            file.write(bytes(size * BYTES))
            file.flush()
            # As plain arrays, of which a part is made in a tenth of the time.
            return Tokens(
                np.asarray(np.memmap(file, np.int32, "r+", 0, size)),
                np.asarray(np.memmap(file, np.float32, "r+", 4 * size, size)),
                np.asarray(np.memmap(file, np.bool_, "r+", 8 * size, size)),
            )
    except OSError as error:
        raise ConfigError(
            f"experience.folder {folder}: {error.strerror or error}; name a folder that can be written to, with "
            f"{size * BYTES / 1e6:.0f} MB of space or more, or leave experience.folder out"
        ) from error
