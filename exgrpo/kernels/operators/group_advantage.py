"""`torch.ops.exgrpo.group_advantage`, which has no derivatives."""

import torch
from torch import Tensor
from torch.library import custom_op

from exgrpo.kernels import dispatch
from exgrpo.kernels.operators.schema import WAITS
from exgrpo.kernels.trials import AdvantageTrial


@custom_op("exgrpo::group_advantage", mutates_args=(), tags=WAITS)
def group_advantage(reward: Tensor, group: Tensor, scale_by_std: bool, backend: str) -> Tensor:
    """Advantages [N] in float64."""
    taken = dispatch.take(backend, AdvantageTrial(reward.device, reward.dtype, scale_by_std), reward.numel())
    return taken.centre_groups(reward, group, scale_by_std)


@group_advantage.register_fake
def _(reward: Tensor, group: Tensor, scale_by_std: bool, backend: str) -> Tensor:
    return reward.new_empty(reward.shape, dtype=torch.float64)
