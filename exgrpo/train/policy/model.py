"""A causal LM whose head computes log-probs and the loss without any logits."""

import types
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from exgrpo.kernels import LogProb, PolicyLoss, linear_log_prob, linear_policy_loss
from exgrpo.train.policy.batch import MicroBatch


@dataclass(frozen=True)
class LossTerms:
    """How the loss of a micro-batch is formed; the same for all micro-batches of a mini-batch."""

    clip: tuple[float, float] | None
    beta: float | None
    entropy_coef: float
    normalizer: float
    temperature: float


class PolicyModel(nn.Module):
    """A Hugging Face causal LM that returns per-token results instead of logits.

    Args:
        model: any causal LM with `get_decoder()` and an output embedding.
        backend: backend of exgrpo.kernels.
    """

    def __init__(self, model: PreTrainedModel, backend: str = "auto") -> None:
        super().__init__()
        self.model = model
        self.softcap = getattr(model.config, "final_logit_softcapping", None)
        head = model.get_output_embeddings()
        # ZeRO-3 gathers a module's parameters around its own forward, so the fused call must happen inside it.
        head.forward = types.MethodType(partial(_fused_head, softcap=self.softcap, backend=backend), head)

    def forward(self, batch: MicroBatch, terms: float | LossTerms) -> LogProb | PolicyLoss:
        """Log-probs and entropies [B, L] of the targets at a temperature; of `LossTerms`, the loss and its parts."""
        decoder = self.model.get_decoder()
        hidden = decoder(input_ids=batch.tokens, use_cache=False).last_hidden_state
        return self.model.get_output_embeddings()(hidden, batch, terms)


def _fused_head(
    head: nn.Linear,
    hidden: torch.Tensor,
    batch: MicroBatch,
    terms: float | LossTerms,
    *,
    softcap: float | None,
    backend: str,
) -> LogProb | PolicyLoss:
    if not isinstance(terms, LossTerms):
        return linear_log_prob(
            hidden, head.weight, batch.target, bias=head.bias, temperature=terms, softcap=softcap, backend=backend
        )
    return linear_policy_loss(
        hidden,
        head.weight,
        batch.target,
        batch.old_log_prob,
        batch.advantage,
        replayed=batch.replayed,
        clip=terms.clip,
        beta=terms.beta,
        entropy_coef=terms.entropy_coef,
        normalizer=terms.normalizer,
        bias=head.bias,
        temperature=terms.temperature,
        softcap=softcap,
        backend=backend,
    )
