"""The experience buffer on disk: append-only segments in safetensors format, named by the checksum of their content.

A save writes one new segment with the trajectories that no segment holds yet, and an index of those that are alive
(segment, row). So a save costs what is new, not what is stored. Only where more than half of a segment has died are its
living trajectories written again, into the new one: segments never hold more than twice what lives.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load, save

from exgrpo.train.common.durable import DamagedFileError, write_whole
from exgrpo.train.common.records import KeptSets
from exgrpo.train.replay.stored import OF_PLACE, OF_TRAJECTORY, Places, Stored, TokenBlocks, Tokens, gather, serials

SUFFIX = ".safetensors"
OF_FILE: dict[str, type[np.generic]] = {
    "length": np.int32,
    "question": np.int32,
    "finished": np.uint8,
    "reward": np.float64,
    "step": np.int32,
    "behaviour": np.uint8,
    "key": np.int64,
    "penalty": np.float64,
}
"""Columns of a file with a value of each answer."""
MOST_TOKENS = 1 << 24
"""Of a segment, about: a save and a load have one in memory at a time, 128 MiB."""
NOWHERE = -1
"""In the place of a segment or a row: no file holds the answer."""


def write_checked(folder: Path, arrays: dict[str, np.ndarray]) -> str:
    """Write arrays to a file that is named by its SHA-256, whole or not at all, and return that name."""
    content = save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
    name = hashlib.sha256(content).hexdigest()
    write_whole(folder / f"{name}{SUFFIX}", content)
    return name


def read_checked(folder: Path, name: str) -> dict[str, np.ndarray]:
    """Read what `write_checked` wrote.

    Raises:
        DamagedFileError: it is missing or its content has changed.
    """
    path = folder / f"{name}{SUFFIX}"
    if not path.is_file():
        raise DamagedFileError(f"{path} is missing")
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != name:
        raise DamagedFileError(f"{path} is damaged: its content does not have the checksum in its name")
    return load(content)


class ExperienceStore:
    """Keeps trajectories in a folder.

    Args:
        folder: of the segments; it is made where it is missing.
        tokens: folder of files for the tokens that are loaded; None: they are in RAM.
    """

    def __init__(self, folder: Path, tokens: Path | None = None) -> None:
        self.folder, self.tokens = folder, tokens
        folder.mkdir(parents=True, exist_ok=True)
        self._rows: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        self._latest = _Latest(np.empty(0, np.int64), [], np.empty(0, np.int32), np.empty(0, np.int32))

    def save(self, answers: Stored) -> dict[str, np.ndarray]:
        """Write the answers that are new and return the index of all given ones, in their order.

        Returns:
            segments: [S, 32] uint8, the names of the segments; segment and row: [N] int32, where each one lies.
        """
        names, segment, row = self._written(answers.columns["serial"])
        new = np.flatnonzero(segment < 0)
        for of_segment in _split(new, answers.columns["length"][new]):
            names.append(write_checked(self.folder, _packed(answers, of_segment)))
            self._note(names[-1], len(of_segment))
            segment[of_segment], row[of_segment] = len(names) - 1, np.arange(len(of_segment))
        used = sorted({names[number] for number in np.unique(segment).tolist()})
        position = {name: number for number, name in enumerate(used)}
        segment = np.array([position.get(name, NOWHERE) for name in names], np.int32)[segment]
        self._latest = _Latest(answers.columns["serial"], used, segment, row)
        return self._latest.index()

    def _written(self, serial: npt.NDArray[np.int64]) -> tuple[list[str], npt.NDArray, npt.NDArray]:
        """The segments of the latest index; and of each answer its segment and row there, `NOWHERE`: to be written.

        To be written are those that no segment holds, and those in segments that are not whole or of which less than
        half is alive.
        """
        latest = self._latest
        place = np.searchsorted(latest.serial, serial)
        there = np.append(latest.serial, NOWHERE)[place] == serial
        segment, row = np.full(len(serial), NOWHERE, np.int32), np.full(len(serial), NOWHERE, np.int32)
        segment[there], row[there] = latest.segment[place[there]], latest.row[place[there]]
        living = np.bincount(segment[there], minlength=len(latest.names)).tolist()
        for number, name in enumerate(latest.names):
            if not self._may_stay(name, living[number]):
                segment[segment == number] = NOWHERE
        return list(latest.names), segment, row

    def _may_stay(self, name: str, living: int) -> bool:
        try:
            # All checkpoints share a segment: one that was lost is written again while its rows are in memory.
            return self.size(name) == self._sizes[name] and 2 * living >= self._rows[name]
        except FileNotFoundError:
            return False

    def _note(self, name: str, rows: int) -> None:
        self._rows[name], self._sizes[name] = rows, self.size(name)

    def load(self, index: dict[str, np.ndarray]) -> Stored:
        """The answers of an index, in its order.

        Raises:
            DamagedFileError: a segment is missing or damaged.
            ConfigError: there is no space for their tokens.
        """
        names, size = segment_names(index), len(index["row"])
        columns = {name: np.zeros(size, dtype) for name, dtype in (OF_TRAJECTORY | OF_PLACE).items()}
        columns["serial"][:] = serials(size)
        blocks = TokenBlocks(self.tokens)
        order = np.argsort(index["segment"], kind="stable")
        ends = np.searchsorted(index["segment"][order], np.arange(len(names)), side="right").tolist()
        for name, begin, end in zip(names, [0, *ends], ends, strict=False):
            arrays = read_checked(self.folder, name)
            self._note(name, len(arrays["length"]))
            positions = order[begin:end]
            rows = index["row"][positions]
            for column in OF_TRAJECTORY:
                columns[column][positions] = arrays[column][rows]
            there = _places(arrays, rows)
            places = blocks.extend(gather({0: _tokens(arrays)}, there), there.length)
            for column in Places._fields:
                columns[column][positions] = getattr(places, column)
        self._latest = _Latest(columns["serial"], names, index["segment"], index["row"])
        return Stored(columns, blocks.contents)

    def size(self, name: str) -> int:
        """Bytes of a file of this store."""
        return (self.folder / f"{name}{SUFFIX}").stat().st_size

    def remove_unused(self, names: set[str]) -> None:
        """Delete the segments that are not among `names`."""
        for path in self.folder.iterdir():
            if path.name.removesuffix(SUFFIX) not in names:
                path.unlink()


def segment_names(index: dict[str, np.ndarray]) -> list[str]:
    """The names of the segments that an index refers to."""
    return [bytes(name).hex() for name in index["segments"]]


@dataclass(frozen=True, eq=False)
class _Latest:
    """What the latest index says: of N answers their serial numbers, and where they lie."""

    serial: npt.NDArray[np.int64]
    names: list[str]
    segment: npt.NDArray[np.int32]
    row: npt.NDArray[np.int32]

    def index(self) -> dict[str, np.ndarray]:
        names = np.array([list(bytes.fromhex(name)) for name in self.names], np.uint8).reshape(-1, 32)
        return {"segments": names, "segment": self.segment, "row": self.row}


def _split(rows: npt.NDArray, length: npt.NDArray) -> list[npt.NDArray]:
    """Rows of answers with so many tokens, in parts of about `MOST_TOKENS`."""
    part = np.cumsum(length) // MOST_TOKENS
    return np.split(rows, np.flatnonzero(np.diff(part)) + 1) if len(rows) else []


def _packed(answers: Stored, rows: npt.NDArray) -> dict[str, npt.NDArray]:
    """Some answers as arrays of a file; most runs have no observations and no sets, and no arrays of them."""
    tokens = answers.tokens(rows)
    some: dict[str, npt.NDArray] = {}
    if tokens.observed.any():
        some["written"] = (~tokens.observed).astype(np.uint8)
    if tokens.kept is not None and len(tokens.kept.ids):
        some |= {"kept": tokens.kept.ids, "kept_words": tokens.kept.sizes.astype(np.int32)}
    columns = {name: answers.columns[name][rows].astype(dtype) for name, dtype in OF_FILE.items()}
    return {**some, "response": tokens.response, "log_prob": tokens.log_prob, **columns}


def _tokens(arrays: dict[str, npt.NDArray]) -> Tokens:
    """What a file holds of tokens."""
    response, written = arrays["response"], arrays.get("written")
    observed = np.zeros(len(response), bool) if written is None else written == 0
    kept = KeptSets.of_sizes(arrays["kept_words"], arrays["kept"]) if "kept" in arrays else None
    return Tokens(response, arrays["log_prob"], observed, kept)


def _places(arrays: dict[str, npt.NDArray], rows: npt.NDArray) -> Places:
    """Where some answers lie in the tokens of their file."""
    length = arrays["length"].astype(np.int64)
    return Places(np.zeros(len(rows), np.int64), (np.cumsum(length) - length)[rows], length[rows])
