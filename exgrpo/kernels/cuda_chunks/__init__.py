"""Backend for Hopper GPUs: the Triton backend, with a fused product in CUDA C++ for its fused one.

Its epilogues run under the main loops of other tiles, which Triton cannot do; see `cuda_fused`. The Triton kernels
compute the rest.
"""

from exgrpo.kernels.chunks.head import ChunkedHead
from exgrpo.kernels.cuda_chunks.cuda_fused import FusedCudaPasses
from exgrpo.kernels.torch_chunks.torch_allowed import MaskedPasses as masked_passes_of
from exgrpo.kernels.triton_chunks.triton_allowed import ALLOWED_PART
from exgrpo.kernels.triton_chunks.triton_allowed import TritonAllowedPasses as allowed_passes_of
from exgrpo.kernels.triton_chunks.triton_passes import TritonPasses, plan_of
from exgrpo.kernels.triton_chunks.triton_tokens import centre_groups, scale, segment_mean, token_objective


def passes_of(head: ChunkedHead) -> TritonPasses:
    """Return the passes that the launch plan of the Triton backend has for a head."""
    chosen = plan_of(head)
    return FusedCudaPasses(head, chosen) if chosen.fused else TritonPasses(head, chosen)


__all__ = [
    "ALLOWED_PART",
    "allowed_passes_of",
    "centre_groups",
    "masked_passes_of",
    "passes_of",
    "scale",
    "segment_mean",
    "token_objective",
]
