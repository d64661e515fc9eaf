"""Backend in plain PyTorch for any device: chunks of tokens, each through library products and in-place passes."""

from functools import partial

from exgrpo.kernels.chunks import log_prob, policy_loss
from exgrpo.kernels.objective import token_objective
from exgrpo.kernels.segments import centre_groups, segment_mean
from exgrpo.kernels.torch_chunks.rows import TorchRows

log_prob_forward = partial(log_prob.log_prob_forward, operations=TorchRows)
log_prob_backward = partial(log_prob.log_prob_backward, operations=TorchRows)
policy_loss_forward = partial(policy_loss.policy_loss_forward, operations=TorchRows)

__all__ = [
    "centre_groups",
    "log_prob_backward",
    "log_prob_forward",
    "policy_loss_forward",
    "segment_mean",
    "token_objective",
]
