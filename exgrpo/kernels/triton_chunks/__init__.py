"""Backend for GPUs: chunks of tokens, library products, and Triton kernels for everything between them."""

from exgrpo.kernels.chunks.head import ChunkedHead
from exgrpo.kernels.torch_chunks.torch_allowed import MaskedPasses as masked_passes_of
from exgrpo.kernels.triton_chunks.triton_allowed import ALLOWED_PART
from exgrpo.kernels.triton_chunks.triton_allowed import TritonAllowedPasses as allowed_passes_of
from exgrpo.kernels.triton_chunks.triton_fused import FusedTritonPasses
from exgrpo.kernels.triton_chunks.triton_passes import TritonPasses, plan_of
from exgrpo.kernels.triton_chunks.triton_tokens import centre_groups, scale, segment_mean, token_objective


def passes_of(head: ChunkedHead, fused: type[FusedTritonPasses] = FusedTritonPasses) -> TritonPasses:
    """Return the passes that the launch plan has for a head."""
    chosen = plan_of(head)
    return fused(head, chosen) if chosen.fused else TritonPasses(head, chosen)
