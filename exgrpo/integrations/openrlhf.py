"""OpenRLHF: log-probabilities and entropies of its actor without logits. Importable without OpenRLHF."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from exgrpo.heads.inputs import HeadInputs
from exgrpo.heads.inside import close_head, compute_during, open_head
from exgrpo.heads.logit_map import LogitMap, measure
from exgrpo.kernels import LogProb, linear_log_prob
from exgrpo.kernels.inputs import IGNORED

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def log_probs_from_hidden(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Return log-probabilities of labels from hidden states; OpenRLHF's ``log_probs_from_logits`` takes logits.

    Arguments, gradients and errors are those of :func:`exgrpo.kernels.linear_log_prob`, which returns entropies
    (OpenRLHF's ``compute_entropy``), too, at the cost of one. The hidden states are not modified, whereas OpenRLHF
    divides the caller's logits in place.

    Args:
        hidden: hidden states, ``[..., D]``.
        weight: the head, ``[V, D]``.
        labels: index of each token, ``[...]``, int64, in ``[0, V)``, or -100: such a position is 0 and costs nothing.
        temperature: divisor of the logits, above 0.

    Returns:
        Tensor: log-probabilities shaped like ``labels``, in nats, float32 (float64 for float64 inputs).
    """
    return linear_log_prob(hidden, weight, labels, temperature=temperature).log_prob


def patch_actor(actor: Any, *, memory: int | None = None) -> Callable[[], None]:
    """Make an OpenRLHF ``Actor`` compute log-probabilities and entropies in its head, without logits.

    The forward keeps its arguments and results: log-probabilities of actions or of all tokens, and with
    ``return_output`` the model's output with ``entropy``, whose ``logits`` are None. Without sample packing, positions
    outside the action mask skip the head; their entropies are 0. A call for logits (no action mask, no
    ``return_logprobs``) uses OpenRLHF's forward. The head's weight is used in the head's own forward, so that
    DeepSpeed's hooks gather it. A softcap or scale of the model's logits is measured here and applied.

    Args:
        actor: an ``openrlhf.models.Actor`` of a text model whose head is a plain ``torch.nn.Linear``, before or
            after DeepSpeed has wrapped its model.
        memory: bytes that the kernels may take, see :func:`exgrpo.kernels.linear_log_prob`.

    Returns:
        Callable[[], None]: restores the actor's own forward.

    Raises:
        TypeError: the head is no plain linear layer: it has LoRA or is quantised.
        ValueError: the actor is patched already, its model is a vision-language model, or its logits go through more
            than a softcap and a scale.
    """
    model = _text_model(actor)
    head = _plain_head(model)
    actor.forward = _ScoredActor(actor, head, measure(model, direct=False, memory=memory)).forward
    open_head(head)

    def undo() -> None:
        del actor.forward
        close_head(head)

    return undo


class _Tokens(NamedTuple):
    """The model's inputs, the labels to score, and a function that restores shape ``[B, L]``."""

    sequences: Tensor
    attention_mask: Tensor | None
    position_ids: Tensor
    labels: Tensor
    restore: Callable[[Tensor], Tensor]


class _ScoredActor:
    def __init__(self, actor: Any, head: nn.Module, logit_map: LogitMap) -> None:
        self.actor, self.head, self.logit_map = actor, head, logit_map
        self.actor_forward = actor.forward

    def forward(
        self,
        sequences: Tensor,
        action_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        return_output: bool = False,
        allgather_logits: bool = False,
        return_logprobs: bool = False,
        ring_attn_group: "ProcessGroup | None" = None,
        packed_seq_lens: list[int] | None = None,
        return_entropy: bool = False,
    ) -> Any:
        if action_mask is None and not return_logprobs:
            return self.actor_forward(
                sequences,
                attention_mask=attention_mask,
                return_output=return_output,
                allgather_logits=allgather_logits,
                ring_attn_group=ring_attn_group,
                packed_seq_lens=packed_seq_lens,
                return_entropy=return_entropy,
            )
        if attention_mask is None:
            attention_mask = torch.ones_like(sequences)
        if getattr(self.actor, "packing_samples", False):
            tokens = _packed(sequences, attention_mask, ring_attn_group)
        else:
            tokens = _padded(sequences, attention_mask, action_mask)
        inputs = {"attention_mask": tokens.attention_mask, "position_ids": tokens.position_ids}
        output, scores = compute_during(
            self.head, partial(self._score, tokens.labels), lambda: self.actor.model(tokens.sequences, **inputs)
        )
        log_probs, entropy = (tokens.restore(x)[:, :-1] for x in scores)
        output["logits"] = None
        if return_entropy:
            output.entropy = entropy
        if action_mask is not None:
            log_probs = log_probs[:, -action_mask.shape[1] :] * action_mask.float()
        return (log_probs, output) if return_output else log_probs

    def _score(self, labels: Tensor, head: HeadInputs) -> LogProb:
        options = self.logit_map.options(self.actor.temperature)
        return linear_log_prob(head.hidden, head.weight, labels, bias=head.bias, **options)


def _padded(sequences: Tensor, attention_mask: Tensor, action_mask: Tensor | None) -> _Tokens:
    position_ids = (attention_mask.long().cumsum(-1) - 1).masked_fill(attention_mask == 0, 1)
    labels = sequences.roll(-1, dims=1)
    if action_mask is not None:
        wanted = torch.zeros_like(labels, dtype=torch.bool)
        wanted[:, :-1][:, -action_mask.shape[1] :] = action_mask.bool()
        labels = labels.masked_fill(~wanted, IGNORED)
    return _Tokens(sequences, attention_mask, position_ids, labels, lambda scores: scores)


def _packed(sequences: Tensor, attention_mask: Tensor, ring_attn_group: "ProcessGroup | None") -> _Tokens:
    ring = importlib.import_module("openrlhf.models.ring_attn_utils")
    sliced = ring.unpad_and_slice_tensor(sequences, attention_mask, ring_attn_group)
    packed, position_ids, labels, ring_attn_pad_len, indices = sliced

    def restore(scores: Tensor) -> Tensor:
        return ring.gather_and_pad_tensor(scores, ring_attn_group, ring_attn_pad_len, indices, *sequences.shape)

    return _Tokens(packed, None, position_ids, labels, restore)


def _text_model(actor: Any) -> Any:
    """Return the actor's model without DeepSpeed's wrapper; a wrapper of peft may remain."""
    if "forward" in vars(actor):
        raise ValueError("actor: its forward is replaced already; call what patch_actor returned to undo that")
    if getattr(actor, "is_vlm", False):
        raise ValueError("actor: expected a text model, got a vision-language model; use OpenRLHF's own forward")
    return getattr(actor.model, "module", actor.model)


def _plain_head(model: Any) -> nn.Linear:
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise TypeError(
            f"actor: expected a head that is a torch.nn.Linear, got {type(head).__name__}; "
            "keep LoRA and quantisation away from the head (target_modules), or use OpenRLHF's own forward"
        )
    return head
