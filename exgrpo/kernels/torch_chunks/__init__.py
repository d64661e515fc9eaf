"""Backend in plain PyTorch for any device: chunks of tokens, each through library products and in-place passes."""

from exgrpo.kernels.objective import centre_groups, scale, segment_mean, token_objective
from exgrpo.kernels.torch_chunks.torch_allowed import ALLOWED_PART
from exgrpo.kernels.torch_chunks.torch_allowed import AllowedPasses as allowed_passes_of
from exgrpo.kernels.torch_chunks.torch_allowed import MaskedPasses as masked_passes_of
from exgrpo.kernels.torch_chunks.torch_passes import TorchPasses as passes_of
