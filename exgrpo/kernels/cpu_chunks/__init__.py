"""Backend for CPUs: chunks of tokens, library products, and compiled kernels for everything between them."""

from exgrpo.kernels.cpu_chunks.cpu_fused import passes_of
from exgrpo.kernels.cpu_chunks.cpu_passes import ALLOWED_PART, allowed_passes_of
from exgrpo.kernels.cpu_chunks.cpu_tokens import centre_groups, segment_mean, token_objective
from exgrpo.kernels.objective import scale
from exgrpo.kernels.torch_chunks.torch_allowed import MaskedPasses as masked_passes_of
