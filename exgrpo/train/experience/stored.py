"""Stored answers as columns, of which a `Trajectory` is made only when it is asked for.

Ten million objects with arrays of their own would take a kilobyte each beside their tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

import numpy as np
import numpy.typing as npt

from exgrpo.train.experience.tokens import Places, TokenBlocks, Tokens, gather
from exgrpo.train.records import Trajectory
from exgrpo.train.step_batch import BEHAVIOURS

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
    placed = [blocks.append(one.response, one.log_prob, one.observed) for one in trajectories]
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
