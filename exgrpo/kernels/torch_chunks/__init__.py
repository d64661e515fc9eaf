"""Backend in plain PyTorch for any device: chunks of tokens, each through library products and in-place passes."""

from functools import partial

from exgrpo.kernels.torch_chunks import log_prob, policy_loss
from exgrpo.kernels.torch_chunks.policy_loss import policy_loss_backward
from exgrpo.kernels.torch_chunks.rows import TorchRows

log_prob_forward = partial(log_prob.log_prob_forward, operations=TorchRows)
log_prob_backward = partial(log_prob.log_prob_backward, operations=TorchRows)
policy_loss_forward = partial(policy_loss.policy_loss_forward, operations=TorchRows)

__all__ = ["log_prob_backward", "log_prob_forward", "policy_loss_backward", "policy_loss_forward"]
