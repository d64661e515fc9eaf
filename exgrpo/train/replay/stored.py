"""Stored answers as columns, of which a `Trajectory` is made only when it is asked for, and their tokens in blocks.

Ten million objects with arrays of their own would take a kilobyte each beside their tokens, and an array of its own for
each answer as much as 30 tokens. So tokens lie end to end in blocks, in RAM or in files that are mapped into memory.
Blocks are only added to, so whoever holds a part of one keeps it as it was. A block goes when all of its answers have
left. The words that tokens were drawn from lie beside them in the same way, where a run cuts its vocabulary: a block
without any has no room for them.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt

from exgrpo.train.common.errors import ConfigError
from exgrpo.train.common.records import KeptSets, Mask, TokenIds, Trajectory
from exgrpo.train.common.step_batch import BEHAVIOURS, Ints

FEWEST, MOST = 1 << 12, 1 << 22
"""Tokens of the first block and of the largest ones; one between has room for as many as are stored."""
OF_TRAJECTORY: dict[str, type[np.generic]] = {
    "question": np.int64,
    "step": np.int64,
    "reward": np.float64,
    "key": np.int64,
    "penalty": np.float64,
    "finished": np.bool_,
    "behaviour": np.uint8,
}
"""Columns with a value of each answer."""
OF_PLACE: dict[str, type[np.generic]] = {"serial": np.int64, "block": np.int32, "start": np.int64, "length": np.int64}
"""Columns that say which answer it is, and where its tokens lie."""
_given = 0


class Tokens(NamedTuple):
    """The tokens of one answer, or of several, end to end.

    Attributes:
        response: [T] int32, ids.
        log_prob: [T] fp32 of the policy that wrote them.
        observed: [T] bool, whether an environment wrote the token.
        kept: [T] the words that each was drawn from; None: the whole vocabulary.
    """

    response: TokenIds
    log_prob: npt.NDArray[np.float32]
    observed: Mask
    kept: KeptSets | None = None

    def part(self, start: int, end: int) -> "Tokens":
        """Those from `start` to before `end`, without a copy."""
        kept = None if self.kept is None else self.kept[start:end]
        return Tokens(self.response[start:end], self.log_prob[start:end], self.observed[start:end], kept)

    @classmethod
    def joined(cls, parts: "Sequence[Tokens]") -> "Tokens":
        """Those of several parts, end to end."""
        return cls(
            np.concatenate([part.response for part in parts]),
            np.concatenate([part.log_prob for part in parts]),
            np.concatenate([part.observed for part in parts]),
            KeptSets.of_parts([part.kept for part in parts], [len(part.response) for part in parts]),
        )


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
        contents: the blocks by their numbers. The sets of one that is being filled have room behind their words.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.contents: dict[int, Tokens] = {}
        self._living: dict[int, int] = {}
        self._last, self._used, self._room = -1, 0, 0

    def append(self, tokens: Tokens) -> tuple[int, int]:
        """Store tokens in one block; returns its number, and where they begin there.

        Raises:
            ConfigError: there is no space for a file in the folder.
        """
        size = len(tokens.response)
        self._make_room(size)
        number, start, end = self._last, self._used, self._used + size
        block = self.contents[number]
        block.response[start:end], block.log_prob[start:end] = tokens.response, tokens.log_prob
        if tokens.observed.any():
            block.observed[start:end] = tokens.observed
        if tokens.kept is not None or block.kept is not None:
            self._append_sets(tokens.kept or KeptSets.whole(size))
        self._used = end
        self._living[number] += size
        return number, start

    def _append_sets(self, kept: KeptSets) -> None:
        """Store the sets of the tokens that come next in the block that is being filled."""
        block, start = self.contents[self._last], self._used
        if block.kept is None:
            empty = KeptSets(_array(0, np.int32, self.folder), _array(self._room + 1, np.int64, self.folder))
            block = block._replace(kept=empty)
        assert block.kept is not None
        ids, bounds = block.kept.ids, block.kept.bounds
        first = int(bounds[start])
        bounds[start + 1 : start + 1 + len(kept)] = first + kept.bounds[1:]
        end = first + len(kept.ids)
        if end > len(ids):
            ids, old = _array(max(end, 2 * len(ids)), np.int32, self.folder), ids
            ids[:first] = old[:first]
        ids[first:end] = kept.ids
        self.contents[self._last] = block._replace(kept=KeptSets(ids, bounds))

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
            number, start = self.append(tokens.part(begin, int(ends[last - 1])))
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
        self.contents[self._last] = _tokens(self._room, self.folder)
        self._living[self._last] = 0


def check_folder(folder: Path | None) -> None:
    """Whether tokens can be kept in a folder. Raises ConfigError."""
    if folder is not None:
        TokenBlocks(folder).append(_tokens(1, None))


def gather(contents: Mapping[int, Tokens], places: Places) -> Tokens:
    """The tokens of some answers, end to end; what lies end to end already is copied in one piece."""
    block, start, length = places
    if not len(block):
        return _tokens(0, None)
    apart = (block[1:] != block[:-1]) | (start[1:] != start[:-1] + length[:-1])
    first = np.flatnonzero(np.append(True, apart))
    last = np.append(first[1:], len(block)) - 1
    runs = zip(block[first].tolist(), start[first].tolist(), (start[last] + length[last]).tolist(), strict=True)
    return Tokens.joined([contents[number].part(begin, end) for number, begin, end in runs])


def _tokens(size: int, folder: Path | None) -> Tokens:
    """Room for so many tokens."""
    return Tokens(_array(size, np.int32, folder), _array(size, np.float32, folder), _array(size, np.bool_, folder))


def _array(size: int, dtype: type[np.generic], folder: Path | None) -> npt.NDArray:
    """Zeros, in RAM or in a file of a folder that is mapped into memory."""
    if folder is None or not size:
        # The system gives pages of zeros when they are touched, so room and marks that nobody sets take no memory.
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


def serials(count: int) -> range:
    """[count] serial numbers, which no answer of this process has had before."""
    global _given
    _given += count
    return range(_given - count, _given)


@dataclass(frozen=True, eq=False)
class Stored(Sequence[Trajectory]):
    """N stored answers as they are at one moment, whatever leaves or joins later.

    Attributes:
        columns: [N] each of `OF_TRAJECTORY` and `OF_PLACE`, by name; serial numbers rise.
        contents: the blocks that hold the tokens.
    """

    columns: Mapping[str, npt.NDArray]
    contents: Mapping[int, Tokens]

    def __len__(self) -> int:
        return len(self.columns["serial"])

    @overload
    def __getitem__(self, row: int) -> Trajectory: ...

    @overload
    def __getitem__(self, row: slice) -> list[Trajectory]: ...

    def __getitem__(self, row: int | slice) -> Trajectory | list[Trajectory]:
        """One answer, or those of a slice."""
        if isinstance(row, slice):
            return [self[i] for i in range(*row.indices(len(self)))]
        of_row = {name: self.columns[name].item(row) for name in OF_TRAJECTORY}
        block, start, length = (self.columns[name].item(row) for name in Places._fields)
        tokens = self.contents[block].part(start, start + length)
        return Trajectory(
            response=tokens.response,
            log_prob=tokens.log_prob,
            written=~tokens.observed if tokens.observed.any() else None,
            kept=tokens.kept if tokens.kept is not None and len(tokens.kept.ids) else None,
            behaviour=BEHAVIOURS[of_row.pop("behaviour")],
            **of_row,
        )

    @property
    def places(self) -> Places:
        """[N] where the tokens lie."""
        return Places(*(self.columns[name] for name in Places._fields))

    def tokens(self, rows: npt.NDArray) -> Tokens:
        """The tokens of some of them, end to end."""
        return gather(self.contents, Places(*(column[rows] for column in self.places)))


def pack(trajectories: Sequence[Trajectory], folder: Path | None = None) -> Stored:
    """Trajectories as columns, their tokens in RAM or in files of a folder; raises as `TokenBlocks.append`."""
    blocks = TokenBlocks(folder)
    placed = []
    for one in trajectories:
        observed = np.zeros(len(one.response), bool) if one.written is None else ~one.written
        placed.append(blocks.append(Tokens(one.response, one.log_prob, observed, one.kept)))
    found = {
        **{name: [getattr(one, name) for one in trajectories] for name in OF_TRAJECTORY},
        "behaviour": [BEHAVIOURS.index(one.behaviour) for one in trajectories],
        "serial": serials(len(trajectories)),
        "block": [block for block, _ in placed],
        "start": [start for _, start in placed],
        "length": [len(one.response) for one in trajectories],
    }
    columns = {name: np.array(found[name], dtype) for name, dtype in (OF_TRAJECTORY | OF_PLACE).items()}
    return Stored(columns, blocks.contents)
