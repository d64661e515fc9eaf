"""Backend for Hopper and datacenter Blackwell GPUs: the Triton backend, with CUDA C++ for what Triton cannot do.

That is a row held by a cluster of blocks while it is read once, see `rows`, and a product whose epilogues run under
other tiles' main loops, see `product`. What neither can take is computed by the Triton kernels.
"""

from exgrpo.kernels.chunks.head import ChunkedHead
from exgrpo.kernels.cuda_chunks.product import CudaFusedRows
from exgrpo.kernels.cuda_chunks.rows import CudaRows
from exgrpo.kernels.triton_chunks.rows import TritonRows, plan_of
from exgrpo.kernels.triton_chunks.tokens import centre_groups, segment_mean, token_objective


def rows_of(head: ChunkedHead) -> TritonRows:
    """The passes that the launch table of the Triton backend has for a head."""
    chosen = plan_of(head)
    return CudaFusedRows(head, chosen) if chosen.fused else CudaRows(head, chosen)


__all__ = ["centre_groups", "rows_of", "segment_mean", "token_objective"]
