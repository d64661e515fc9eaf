"""Backend for Hopper and datacenter Blackwell GPUs: the Triton backend, with CUDA C++ for what Triton cannot do.

That is a row held by a cluster of blocks while it is read once, see `rows`, and a product whose epilogues run under
other tiles' main loops, see `product`. What neither can take is computed by the Triton kernels.
"""

from functools import partial

from exgrpo.kernels.chunks import log_prob, policy_loss
from exgrpo.kernels.chunks.head import ChunkedHead
from exgrpo.kernels.cuda_chunks.product import CudaFusedRows
from exgrpo.kernels.cuda_chunks.rows import CudaRows
from exgrpo.kernels.triton_chunks.rows import TritonRows, plan_of
from exgrpo.kernels.triton_chunks.tokens import centre_groups, segment_mean, token_objective


def rows_of(head: ChunkedHead) -> TritonRows:
    """The passes that the launch table of the Triton backend has for a head."""
    chosen = plan_of(head)
    return CudaFusedRows(head, chosen) if chosen.fused else CudaRows(head, chosen)


log_prob_forward = partial(log_prob.log_prob_forward, operations=rows_of)
log_prob_backward = partial(log_prob.log_prob_backward, operations=rows_of)
policy_loss_forward = partial(policy_loss.policy_loss_forward, operations=rows_of)

__all__ = [
    "centre_groups",
    "log_prob_backward",
    "log_prob_forward",
    "policy_loss_forward",
    "segment_mean",
    "token_objective",
]
