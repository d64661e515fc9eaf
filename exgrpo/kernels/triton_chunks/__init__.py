"""Backend for GPUs: chunks of tokens, library products, and Triton kernels for everything between them."""

from exgrpo.kernels.triton_chunks.rows import rows_of
from exgrpo.kernels.triton_chunks.tokens import centre_groups, segment_mean, token_objective

__all__ = ["centre_groups", "rows_of", "segment_mean", "token_objective"]
