"""Backend for Hopper and datacenter Blackwell GPUs: the Triton backend, with CUDA C++ for what Triton cannot do.

A cluster of blocks holds a row while it is read once, see `cuda_passes`; and the epilogues of the fused product run
under the main loops of other tiles, see `cuda_fused`. The Triton kernels compute what neither can take.
"""

from exgrpo.kernels.chunks.head import ChunkedHead
from exgrpo.kernels.cuda_chunks.cuda_fused import FusedCudaPasses
from exgrpo.kernels.cuda_chunks.cuda_passes import CudaPasses
from exgrpo.kernels.triton_chunks.triton_passes import TritonPasses, plan_of
from exgrpo.kernels.triton_chunks.triton_tokens import centre_groups, segment_mean, token_objective


def passes_of(head: ChunkedHead) -> TritonPasses:
    """The passes that the launch table of the Triton backend has for a head."""
    chosen = plan_of(head)
    return FusedCudaPasses(head, chosen) if chosen.fused else CudaPasses(head, chosen)


__all__ = ["centre_groups", "passes_of", "segment_mean", "token_objective"]
