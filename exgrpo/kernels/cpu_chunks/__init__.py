"""Backend for CPUs: chunks of tokens, library products, and compiled kernels for everything between them."""

from functools import partial

from exgrpo.kernels.chunks import log_prob, policy_loss
from exgrpo.kernels.cpu_chunks.fused import rows_of
from exgrpo.kernels.cpu_chunks.tokens import centre_groups, segment_mean, token_objective

log_prob_forward = partial(log_prob.log_prob_forward, operations=rows_of)
log_prob_backward = partial(log_prob.log_prob_backward, operations=rows_of)
policy_loss_forward = partial(policy_loss.policy_loss_forward, operations=rows_of)

__all__ = [
    "centre_groups",
    "log_prob_backward",
    "log_prob_forward",
    "policy_loss_forward",
    "segment_mean",
    "token_objective",
]
