"""Stored answers as columns, of which a `Trajectory` is made only when it is asked for.

Ten million objects with arrays of their own would take a kilobyte each beside their tokens.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args, overload
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from exgrpo.train.experience.tokens import Places, TokenBlocks, Tokens, gather
from exgrpo.train.records import Behaviour, Trajectory

BEHAVIOURS: tuple[Behaviour, ...] = get_args(Behaviour)
"""By their numbers in a column."""
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
Columns = Mapping[str, npt.NDArray]
Known = MutableMapping[int, Trajectory]
"""The trajectories that somebody holds, by their serial numbers."""
_given = 0


def serials(count: int) -> range:
    """[count] serial numbers, which no answer of this process has had before."""
    global _given
    _given += count
    return range(_given - count, _given)


def values_of(trajectory: Trajectory) -> tuple[int, int, float, int, float, bool, int]:
    """Its `OF_TRAJECTORY`."""
    one = trajectory
    behaviour = BEHAVIOURS.index(one.behaviour)
    return one.question, one.step, one.reward, one.key, one.penalty, one.finished, behaviour


@dataclass(frozen=True, eq=False)
class Stored(Sequence[Trajectory]):
    """N stored answers as they are at one moment, whatever leaves or joins later.

    Attributes:
        columns: [N] each of `OF_TRAJECTORY` and `OF_PLACE`, by name; serial numbers rise.
        contents: the blocks that hold the tokens.
        known: an answer that somebody holds is not made again.
    """

    columns: Columns
    contents: Mapping[int, Tokens]
    known: Known = field(default_factory=WeakValueDictionary)

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
        serial = int(self.columns["serial"][row])
        return self.known.get(serial) or self.known.setdefault(serial, self._made(row))

    def _made(self, row: int) -> Trajectory:
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
    of_place = {
        "serial": serials(len(trajectories)),
        "block": [block for block, _ in placed],
        "start": [start for _, start in placed],
        "length": [len(one.response) for one in trajectories],
    }
    values = zip(*map(values_of, trajectories), strict=True) if trajectories else ([] for _ in OF_TRAJECTORY)
    found = {**of_place, **dict(zip(OF_TRAJECTORY, values, strict=True))}
    columns = {name: np.array(found[name], dtype) for name, dtype in (OF_TRAJECTORY | OF_PLACE).items()}
    known: Known = WeakValueDictionary(zip(columns["serial"].tolist(), trajectories, strict=True))
    return Stored(columns, blocks.contents, known)
