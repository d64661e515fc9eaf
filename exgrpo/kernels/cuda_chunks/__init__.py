"""Backend for Hopper GPUs: the Triton backend, with a fused product in CUDA C++ for its fused one.

Its epilogues run under the main loops of other tiles, which Triton cannot do; see `cuda_fused`.
"""

from functools import partial

from exgrpo.kernels import triton_chunks
from exgrpo.kernels.cuda_chunks.cuda_fused import FusedCudaPasses
from exgrpo.kernels.triton_chunks import (
    ALLOWED_PART,
    allowed_passes_of,
    centre_groups,
    masked_passes_of,
    scale,
    segment_mean,
    token_objective,
)

passes_of = partial(triton_chunks.passes_of, fused=FusedCudaPasses)
