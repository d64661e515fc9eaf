"""The vocabulary split over the ranks of a process group."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class VocabShard:
    """Rows [offset, offset + size) of a weight [V, D], and what the ranks of its group have to agree on."""

    size: int
    """Rows held here; any number, 0 included."""
    offset: int
    vocabulary: int
    """V, the sum of all ranks' sizes."""
    largest: int
    """The largest size of any rank: the ranks' chunks must have the same rows."""
    group: "dist.ProcessGroup | None" = None

    @classmethod
    def whole(cls, size: int) -> "VocabShard":
        """The shard that is everything."""
        return cls(size, 0, size, size)

    @classmethod
    def exchange(cls, size: int, group: "dist.ProcessGroup | None", device: torch.device) -> "VocabShard":
        """Learns the other ranks' sizes; a collective call that waits for its result."""
        if group is None:
            return cls.whole(size)
        mine = torch.tensor([size], dtype=torch.int64, device=device)
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, mine, group=group)
        sizes = torch.cat(gathered).tolist()
        rank = dist.get_rank(group)
        return cls(size, sum(sizes[:rank]), sum(sizes), max(sizes), group)

    def locate(self, target: Tensor) -> tuple[Tensor, Tensor | None]:
        """Local index of each target, clamped into range, and where it lies on this rank (None: everywhere)."""
        if self.group is None:
            return target.clamp(0, self.size - 1), None
        local = target - self.offset
        held = (local >= 0) & (local < self.size)
        return local.clamp(0, max(0, self.size - 1)), held

    def largest_of(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Elementwise maximum over the ranks."""
        return self._reduce(values, dist.ReduceOp.MAX if self.group else None)

    def sum_of(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Elementwise sum over the ranks."""
        return self._reduce(values, dist.ReduceOp.SUM if self.group else None)

    def _reduce(self, values: tuple[Tensor, ...], operation: object) -> tuple[Tensor, ...]:
        if self.group is None:
            return values
        joined = torch.stack(values)
        dist.all_reduce(joined, op=operation, group=self.group)
        return joined.unbind()
