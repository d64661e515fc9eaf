"""Sums over ragged segments, the same bits on every run: no scattered atomic additions."""

import torch
from torch import Tensor

STD_EPSILON = 1e-6


def segment_mean(values: Tensor, counted: Tensor, offsets: Tensor) -> Tensor:
    """Mean of the counted values [T] (bool [T]) of each segment [offsets[i], offsets[i + 1]); 0 if it has none."""
    offsets = offsets.long()

    def total(data: Tensor) -> Tensor:
        return torch.segment_reduce(data.double(), "sum", offsets=offsets, axis=0, initial=0, unsafe=True)

    return (total(values.masked_fill(~counted, 0)) / total(counted).clamp(min=1)).to(values.dtype)


def centre_groups(reward: Tensor, group: Tensor, scale_by_std: bool) -> Tensor:
    """Reward [N] minus the mean of its group, in float64, divided by the sample deviation if asked for."""
    order = group.argsort(stable=True)
    _, counts = group[order].unique_consecutive(return_counts=True)

    def mean(data: Tensor) -> Tensor:
        sums = torch.segment_reduce(data, "sum", lengths=counts, axis=0, initial=0, unsafe=True)
        return sums / counts

    def over_members(data: Tensor) -> Tensor:
        return data.repeat_interleave(counts)

    sorted_reward = reward.double()[order]
    centred = sorted_reward - over_members(mean(sorted_reward))
    if scale_by_std:
        variance = mean(centred.square()) * counts / (counts - 1).clamp(min=1)
        centred = centred / over_members(variance.sqrt() + STD_EPSILON)
    return torch.empty_like(centred).index_copy_(0, order, centred)
