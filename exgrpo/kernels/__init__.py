"""Fused operations for reinforcement learning of language models: the head, its log-probabilities and the policy loss.

None of them holds the logits [tokens, vocabulary]. PyTorch is the only dependency.
"""

from exgrpo.kernels import reference
from exgrpo.kernels.api import linear_log_prob, linear_policy_loss, sequence_entropy
from exgrpo.kernels.api_tokens import group_advantage, importance_ratio, policy_loss, shape_ratio
from exgrpo.kernels.inputs import LogProb, PolicyLoss

__all__ = [
    "LogProb",
    "PolicyLoss",
    "group_advantage",
    "importance_ratio",
    "linear_log_prob",
    "linear_policy_loss",
    "policy_loss",
    "reference",
    "sequence_entropy",
    "shape_ratio",
]
