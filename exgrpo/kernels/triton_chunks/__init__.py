"""Backend for GPUs: chunks of tokens, library products, and Triton kernels for everything between them."""

from functools import partial

from exgrpo.kernels.torch_chunks import log_prob, policy_loss
from exgrpo.kernels.torch_chunks.policy_loss import policy_loss_backward
from exgrpo.kernels.triton_chunks.rows import TritonRows

log_prob_forward = partial(log_prob.log_prob_forward, operations=TritonRows)
log_prob_backward = partial(log_prob.log_prob_backward, operations=TritonRows)
policy_loss_forward = partial(policy_loss.policy_loss_forward, operations=TritonRows)

__all__ = ["log_prob_backward", "log_prob_forward", "policy_loss_backward", "policy_loss_forward"]
