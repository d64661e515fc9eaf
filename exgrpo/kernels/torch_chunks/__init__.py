"""Backend in plain PyTorch for any device: chunks of tokens, each through library products and in-place passes."""

from exgrpo.kernels.torch_chunks.log_prob import log_prob_backward, log_prob_forward
from exgrpo.kernels.torch_chunks.policy_loss import policy_loss_backward, policy_loss_forward

__all__ = ["log_prob_backward", "log_prob_forward", "policy_loss_backward", "policy_loss_forward"]
