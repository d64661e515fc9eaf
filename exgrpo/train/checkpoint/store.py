"""The buffer on disk: files in safetensors format, named by the checksum of their content.

A file holds a block of tokens. Full blocks never change, so that a save writes them once, and again only the block that
was filled since; the columns of rows are arrays of each checkpoint.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from safetensors.numpy import load, save

from exgrpo.train.common.columns import columns_of, renamed
from exgrpo.train.common.durable import DamagedFileError, write_whole
from exgrpo.train.common.records import AllowedTokens
from exgrpo.train.replay.blocks import Places, TokenBlock
from exgrpo.train.replay.table import Stored

SUFFIX = ".safetensors"
ROW = "row."
"""Begins the names of the columns of rows among a checkpoint's arrays."""


def write_checked(folder: Path, arrays: Mapping[str, np.ndarray]) -> str:
    """Write arrays to a file that is named by its SHA-256, whole or not at all, and return that name."""
    content = save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
    name = hashlib.sha256(content).hexdigest()
    write_whole(folder / f"{name}{SUFFIX}", content)
    return name


def read_checked(folder: Path, name: str) -> dict[str, np.ndarray]:
    """Read what `write_checked` wrote; raise DamagedFileError if it is missing or has changed."""
    path = folder / f"{name}{SUFFIX}"
    if not path.is_file():
        raise DamagedFileError(f"{path} is missing")
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != name:
        raise DamagedFileError(f"{path} is damaged: its content does not have the checksum in its name")
    return load(content)


class ExperienceStore:
    """Keeps stored answers in a folder.

    Args:
        folder: of the files; it is made where it is missing.
        tokens: folder of files for the tokens that are loaded; None: they are in RAM.
    """

    def __init__(self, folder: Path, tokens: Path | None = None) -> None:
        self.folder, self.tokens = folder, tokens
        folder.mkdir(parents=True, exist_ok=True)
        self._written: WeakKeyDictionary[TokenBlock, tuple[str, int, int]] = WeakKeyDictionary()

    def save(self, answers: Stored) -> dict[str, np.ndarray]:
        """Write the blocks that are new or have grown, and return the arrays from which `load` gives all answers."""
        numbers, block = np.unique(answers.columns["block"], return_inverse=True)
        names = [self._name(answers.blocks[number]) for number in numbers.tolist()]
        rows = {**answers.columns, "block": block}
        digests = np.array([list(bytes.fromhex(name)) for name in names], np.uint8).reshape(-1, 32)
        return {"blocks": digests, **{f"{ROW}{name}": values for name, values in rows.items()}}

    def _name(self, block: TokenBlock) -> str:
        """Return the name of a block's file, which is written where it lacks something."""
        name, used, size = self._written.get(block, ("", 0, 0))
        try:
            # All checkpoints share a file: one that was lost is written again while its tokens are in memory.
            if name and used == block.used and self.size(name) == size:
                return name
        except FileNotFoundError:
            pass
        return self._note(write_checked(self.folder, _packed(block)), block)

    def _note(self, name: str, block: TokenBlock) -> str:
        self._written[block] = name, block.used, self.size(name)
        return name

    def load(self, arrays: Mapping[str, np.ndarray]) -> Stored:
        """Return the answers of a checkpoint's arrays.

        Raises:
            DamagedFileError: a file is missing or damaged.
            ConfigError: there is no space for their tokens.
        """
        if "segments" in arrays:
            return self._load_segments(arrays)
        blocks = {}
        for number, name in enumerate(file_names(arrays)):
            found = renamed(read_checked(self.folder, name))
            sets = {n: AllowedTokens.from_sizes(found[f"{n}.sizes"], found[n]) for n in found if f"{n}.sizes" in found}
            blocks[number] = self._block({**found, **sets})
            self._note(name, blocks[number])
        arrays = renamed(arrays)
        size = len(arrays[f"{ROW}length"])
        columns = {name: column.filled(size) for name, column in columns_of("group", "row", stored=True).items()}
        columns |= {name: arrays.get(f"{ROW}{name}", columns.get(name)) for name in (*columns, *Places._fields)}
        return Stored(columns, blocks)

    def _block(self, columns: Mapping[str, Any]) -> TokenBlock:
        size = len(columns["token"])
        block = TokenBlock(size, self.tokens)
        block.append(columns, size)
        return block

    def _load_segments(self, arrays: Mapping[str, np.ndarray]) -> Stored:
        """Read format 5: a file holds tokens and rows, and `segment` and `row` say which of its rows are alive."""
        size = len(arrays["row"])
        columns = {name: column.filled(size) for name, column in columns_of("group", "row", stored=True).items()}
        columns |= {name: np.zeros(size, np.int64) for name in Places._fields}
        columns |= {name: arrays[name] for name in ("advantage", "successes", "answers", "replays")}
        blocks = {}
        for number, name in enumerate(file_names(arrays)):
            found = renamed(read_checked(self.folder, name))
            tokens: dict[str, Any] = {"token": found["response"], "old_log_prob": found["log_prob"]}
            if "response_mask" in found:
                tokens["response_mask"] = found["response_mask"] != 0
            if "allowed_tokens" in found:
                tokens["allowed_tokens"] = AllowedTokens.from_sizes(found["kept_words"], found["allowed_tokens"])
            blocks[number] = self._block(tokens)
            length = found["length"].astype(np.int64)
            rows = {**found, "start": np.cumsum(length) - length, "block": np.full(len(length), number)}
            place = np.flatnonzero(arrays["segment"] == number)
            for column in columns.keys() & rows.keys():
                columns[column][place] = rows[column][arrays["row"][place]]
        return Stored(columns, blocks)

    def size(self, name: str) -> int:
        """Return the bytes of a file of this store."""
        return (self.folder / f"{name}{SUFFIX}").stat().st_size

    def remove_unused(self, names: set[str]) -> None:
        """Delete the files that are not among `names`."""
        for path in self.folder.iterdir():
            if path.name.removesuffix(SUFFIX) not in names:
                path.unlink()


def file_names(arrays: Mapping[str, np.ndarray]) -> list[str]:
    """Return the names of the files that a checkpoint's arrays refer to."""
    return [bytes(name).hex() for name in arrays["segments" if "segments" in arrays else "blocks"]]


def _packed(block: TokenBlock) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    for name in block.columns:
        values = block.part(name, 0, block.used)
        sets = isinstance(values, AllowedTokens)
        arrays |= {name: values.ids, f"{name}.sizes": values.sizes.astype(np.int32)} if sets else {name: values}
    return arrays
