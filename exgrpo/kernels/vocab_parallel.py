"""The vocabulary split over the ranks of a process group."""

from dataclasses import dataclass
from typing import Any

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
    group_name: str = ""
    """Of the process group; empty: there is none."""

    @classmethod
    def whole(cls, size: int) -> "VocabShard":
        """The shard that is everything."""
        return cls(size, 0, size, size)

    @property
    def group(self) -> "dist.ProcessGroup | None":
        """The process group by its name: an operator's schema has names only."""
        resolve: Any = dist.distributed_c10d._resolve_process_group
        return resolve(self.group_name) if self.group_name else None

    @classmethod
    @torch._disable_dynamo  # a graph break: sizes of other ranks are no constants of a graph
    def exchange(cls, size: int, group: "dist.ProcessGroup", device: torch.device) -> "VocabShard":
        """Learns the other ranks' sizes; a collective call that waits for its result."""
        mine = torch.tensor([size], dtype=torch.int64, device=device)
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, mine, group=group)
        sizes = torch.cat(gathered).tolist()
        rank = dist.get_rank(group)
        return cls(size, sum(sizes[:rank]), sum(sizes), max(sizes), group.group_name)

    def locate(self, target: Tensor) -> tuple[Tensor, Tensor | None]:
        """Local index of each target, clamped into range, and where it lies on this rank (None: everywhere)."""
        if not self.group_name:
            return target.clamp(0, self.size - 1), None
        local = target - self.offset
        held = (local >= 0) & (local < self.size)
        return local.clamp(0, max(0, self.size - 1)), held

    def largest_of(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Elementwise maximum over the ranks."""
        return self._reduce(values, dist.ReduceOp.MAX if self.group_name else None)

    def sum_of(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Elementwise sum over the ranks."""
        return self._reduce(values, dist.ReduceOp.SUM if self.group_name else None)

    def _reduce(self, values: tuple[Tensor, ...], operation: object) -> tuple[Tensor, ...]:
        if not self.group_name:
            return values
        joined = torch.stack(values)
        dist.all_reduce(joined, op=operation, group=self.group)
        return joined.unbind()
