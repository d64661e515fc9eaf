"""The operations as PyTorch sees them: `torch.ops.exgrpo`, each with its fake and its derivative.

torch.compile takes an operation as one node, without a graph break; what happens inside, chunks and the waits for their
number included, is a matter of the backend. Derivatives other than the first are refused: see `derivatives`.
"""

from exgrpo.kernels.operators.linear_log_prob import linear_log_prob
from exgrpo.kernels.operators.linear_policy_loss import linear_policy_loss
from exgrpo.kernels.operators.tokens import group_advantage, policy_loss, segment_mean

__all__ = ["group_advantage", "linear_log_prob", "linear_policy_loss", "policy_loss", "segment_mean"]
