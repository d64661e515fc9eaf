"""Backend in plain PyTorch for any device: chunks of tokens, each through library products and in-place passes."""

from exgrpo.kernels.objective import centre_groups, scale, segment_mean, token_objective
from exgrpo.kernels.torch_chunks.torch_passes import TorchPasses as passes_of

__all__ = ["centre_groups", "passes_of", "scale", "segment_mean", "token_objective"]
