"""Flat columns that grow at their end, in RAM or in files that are mapped into memory.

Values that are there neither change nor move, so that views of a column stay what they are when it grows.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from exgrpo.train.common.columns import COLUMNS, Ints, columns_of
from exgrpo.train.common.errors import ConfigError
from exgrpo.train.common.records import AllowedTokens

FEWEST, MOST = 1 << 12, 1 << 22
"""Values by which an array grows: as many as it has, but not fewer, and in a file not more."""


class FlatArray:
    """An array that grows.

    Args:
        values: first ones; in RAM they are not copied.
        folder: of a temporary file that holds it, and that the system may keep out of RAM; None: it is in RAM. The file
            has no name: it goes with the process.

    Attributes:
        values: all of them, as a view.

    Raises:
        ConfigError: there is no space in the folder.
    """

    def __init__(self, values: npt.NDArray, folder: Path | None = None) -> None:
        self.folder = folder
        self._file: Any = None
        self._room = self.values = values if folder is None else values[:0]
        if folder is not None:
            self.append(values)

    def append(self, values: npt.NDArray) -> None:
        """Append values; raise ConfigError if there is no space."""
        size = len(self.values)
        end = size + len(values)
        if end > len(self._room):
            self._grow(end)
        self._room[size:end] = values
        self.values = self._room[:end]

    def _grow(self, size: int) -> None:
        room = max(size, len(self._room) + max(FEWEST, len(self._room)))
        if self.folder is None:
            # The system gives pages of zeros when they are touched, so that room takes no memory.
            grown = np.zeros(room, self._room.dtype)
            grown[: len(self.values)] = self.values
            self._room = grown
            return
        room = max(size, min(room, len(self._room) + MOST))
        space = (room - len(self._room)) * self._room.itemsize
        try:
            self._file = self._file or tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115 -- it stays open
            # A mapped file without space on its disk would end the process when it is written to.
            self._file.seek(0, 2)
            self._file.write(bytes(space))
            self._file.flush()
            # As a plain array, of which a part is made in a tenth of the time.
            self._room = np.asarray(np.memmap(self._file, self._room.dtype, "r+", 0, room))
        except OSError as error:
            raise ConfigError(
                f"experience.folder {self.folder}: {error.strerror or error}; name a folder that can be written to, "
                f"with {space / 1e6:.0f} MB of space or more, or leave experience.folder out"
            ) from error


class FlatSets:
    """Sets of allowed tokens that grow; see `FlatArray`."""

    def __init__(self, values: AllowedTokens, folder: Path | None = None) -> None:
        self._ids, self._bounds = FlatArray(values.ids, folder), FlatArray(values.bounds, folder)

    @property
    def values(self) -> AllowedTokens:
        """All sets, as views."""
        return AllowedTokens(self._ids.values, self._bounds.values)

    def append(self, values: AllowedTokens) -> None:
        """Append sets; raise ConfigError if there is no space."""
        self._bounds.append(values.bounds[1:] + len(self._ids.values))
        self._ids.append(values.ids)


class TokenColumns:
    """The stored columns of tokens of many answers, end to end; one without a value but its default is missing.

    Attributes:
        size: how many tokens there are.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder, self.size = folder, 0
        self._columns: dict[str, Any] = {}

    def append(self, tokens: Mapping[str, Any], size: int) -> None:
        """Append so many tokens; a missing column has its default. The first ones are not copied in RAM."""
        for name, column in columns_of("token", stored=True).items():
            given = tokens.get(name)
            if name in self._columns:
                self._columns[name].append(column.filled(size) if given is None else given)
            elif given is not None and not column.is_default(given):
                kind = FlatSets if column.dtype is AllowedTokens else FlatArray
                first = column.joined([column.filled(self.size), given]) if self.size else given
                self._columns[name] = kind(first, self.folder)
        self.size += size

    def read(self, name: str, start: int, end: int) -> Any:
        """Return a column of tokens `start` to before `end`, as a view of what there is."""
        return self._columns[name].values[start:end] if name in self._columns else COLUMNS[name].filled(end - start)

    def part(self, start: int, end: int) -> dict[str, Any]:
        """Return the columns of tokens `start` to before `end`, as views; a missing one is missing."""
        return {name: self.read(name, start, end) for name in self._columns}

    def gather(self, start: Ints, length: Ints) -> dict[str, Any]:
        """Return the columns of the tokens of some answers, end to end; a missing one is missing."""
        runs = [slice(*bounds) for bounds in zip(start.tolist(), (start + length).tolist(), strict=True)]
        values = {name: flat.values for name, flat in self._columns.items()}
        return {
            name: COLUMNS[name].joined([column[:0], *(column[run] for run in runs)]) for name, column in values.items()
        }


def check_folder(folder: Path | None) -> None:
    """Check that tokens can be kept in a folder. Raises ConfigError."""
    FlatArray(np.zeros(1, np.int32), folder)
