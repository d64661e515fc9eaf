"""Backend in plain PyTorch for any device: chunks of tokens, each through library products and in-place passes."""

from exgrpo.kernels.objective import centre_groups, scale, segment_mean, token_objective
from exgrpo.kernels.torch_chunks.torch_kept import KEPT_PART
from exgrpo.kernels.torch_chunks.torch_kept import KeptPasses as kept_passes_of
from exgrpo.kernels.torch_chunks.torch_kept import MaskedPasses as masked_passes_of
from exgrpo.kernels.torch_chunks.torch_passes import TorchPasses as passes_of

__all__ = [
    "KEPT_PART",
    "centre_groups",
    "kept_passes_of",
    "masked_passes_of",
    "passes_of",
    "scale",
    "segment_mean",
    "token_objective",
]
