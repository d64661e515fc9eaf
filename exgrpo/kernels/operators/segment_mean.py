"""`torch.ops.exgrpo.segment_mean`, which has no derivatives."""

from torch import Tensor
from torch.library import custom_op

from exgrpo.kernels import dispatch
from exgrpo.kernels.trials import SegmentTrial


@custom_op("exgrpo::segment_mean", mutates_args=())
def segment_mean(values: Tensor, counted: Tensor, offsets: Tensor, backend: str) -> Tensor:
    """Mean of the counted values [T] of each segment [offsets[i], offsets[i + 1]), [N]; 0 if it has none."""
    taken = dispatch.take(backend, SegmentTrial(values.device, values.dtype), values.numel())
    return taken.segment_mean(values, counted, offsets)


@segment_mean.register_fake
def _(values: Tensor, counted: Tensor, offsets: Tensor, backend: str) -> Tensor:
    return values.new_empty(offsets.shape[0] - 1)
