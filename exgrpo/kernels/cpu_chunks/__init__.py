"""Backend for CPUs: chunks of tokens, library products, and compiled kernels for everything between them."""

from exgrpo.kernels.cpu_chunks.fused import rows_of
from exgrpo.kernels.cpu_chunks.tokens import centre_groups, segment_mean, token_objective

__all__ = ["centre_groups", "rows_of", "segment_mean", "token_objective"]
