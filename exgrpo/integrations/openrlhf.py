"""OpenRLHF: log-probabilities and entropies of its actor without logits. Importable without OpenRLHF."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from exgrpo.kernels import linear_log_prob
from exgrpo.kernels.inputs import IGNORED

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def log_probs_from_hidden(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probabilities of labels under a linear head: OpenRLHF's ``log_probs_from_logits`` one product earlier.

    Differentiable in ``hidden`` and ``weight``. For the entropies as well, its ``compute_entropy``, call
    :func:`exgrpo.kernels.linear_log_prob`, which gives both for the price of one.

    Args:
        hidden: hidden states, ``[..., D]``; float16, bfloat16, float32 or float64.
        weight: the head, ``[V, D]``, of the same dtype.
        labels: index of each token, ``[...]``, int64, in ``[0, V)``, or -100: such a position is 0 and costs nothing.
        temperature: what the logits are divided by, above 0. The hidden states stay as they are, where OpenRLHF
            divides the caller's logits in place.

    Returns:
        Tensor: log-probabilities shaped like ``labels``, in nats, float32 (float64 for float64 inputs).

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, device or value.
    """
    return linear_log_prob(hidden, weight, labels, temperature=temperature).log_prob


def patch_actor(actor: Any) -> Callable[[], None]:
    """Makes an OpenRLHF ``Actor`` compute log-probabilities and entropies in its head, without logits.

    Its forward is called as before and returns what it returned: action log-probabilities, or all of them, and with
    ``return_output`` the model's output with ``entropy``, whose ``logits`` are None. Without sample packing, positions
    that the action mask leaves out do not enter the head; their entropies are 0. A call that asks for logits (no
    action mask, no ``return_logprobs``) gets them from OpenRLHF's forward. The head's own weight is used in its own
    forward, so that DeepSpeed's hooks gather it.

    Args:
        actor: an ``openrlhf.models.Actor`` of a text model whose head is a plain ``torch.nn.Linear``, before or
            after DeepSpeed has wrapped its model.

    Returns:
        Callable[[], None]: gives the actor its own forward back.

    Raises:
        TypeError: the head is no plain linear layer: one with LoRA, or a quantised one.
        ValueError: the actor is patched already, or of a vision-language model. In the forward: the model changes the
            results of its head, by a softcap or a scale.
    """
    head = _plain_head(actor)
    scored = _ScoredActor(actor, head)
    actor.forward, head.forward = scored.forward, scored.score

    def undo() -> None:
        del actor.forward, head.forward

    return undo


@dataclass(frozen=True)
class _Tokens:
    """What the model gets, what its head scores, and the way back to ``[B, L]``."""

    sequences: Tensor
    attention_mask: Tensor | None
    position_ids: Tensor
    labels: Tensor
    restore: Callable[[Tensor], Tensor]


class _ScoredActor:
    """The forwards of an actor and of its head, and between them the labels of the call."""

    def __init__(self, actor: Any, head: Any) -> None:
        self.actor, self.head = actor, head
        self.actor_forward, self.head_forward = actor.forward, head.forward
        self.labels: Tensor | None = None
        self.scores: Tensor | None = None

    def score(self, hidden: Tensor) -> Tensor:
        """The head's forward: log-probabilities and entropies [..., 2] where there are labels, else logits."""
        if self.labels is None:
            return self.head_forward(hidden)
        options = {"bias": self.head.bias, "temperature": self.actor.temperature}
        self.scores = torch.stack(linear_log_prob(hidden, self.head.weight, self.labels, **options), dim=-1)
        return self.scores

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
        """The actor's forward; see :func:`patch_actor`."""
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
        output = self._scores(tokens)
        log_probs, entropy = (tokens.restore(x)[:, :-1] for x in output["logits"].unbind(-1))
        output["logits"] = None
        if return_entropy:
            output.entropy = entropy
        if action_mask is not None:
            log_probs = log_probs[:, -action_mask.shape[1] :] * action_mask.float()
        return (log_probs, output) if return_output else log_probs

    def _scores(self, tokens: _Tokens) -> Any:
        """The model's output, whose logits are the head's scores."""
        self.labels = tokens.labels
        try:
            inputs = {"attention_mask": tokens.attention_mask, "position_ids": tokens.position_ids}
            output = self.actor.model(tokens.sequences, **inputs)
            if self.scores is None or output["logits"].data_ptr() != self.scores.data_ptr():
                raise ValueError(
                    "actor: its model changes what its head returns (a softcap or a scale of the logits); "
                    "use OpenRLHF's own forward, or exgrpo.kernels.linear_log_prob with softcap and temperature"
                )
        finally:
            self.labels = self.scores = None
        return output


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


def _plain_head(actor: Any) -> Any:
    """The output embedding of the actor's model, which DeepSpeed or PEFT may have wrapped."""
    if "forward" in vars(actor):
        raise ValueError("actor: its forward is replaced already; call what patch_actor returned to undo that")
    if getattr(actor, "is_vlm", False):
        raise ValueError("actor: expected a text model, got a vision-language model; use OpenRLHF's own forward")
    model = getattr(actor.model, "module", actor.model)
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise TypeError(
            f"actor: expected a head that is a torch.nn.Linear, got {type(head).__name__}; "
            "keep LoRA and quantisation away from the head (target_modules), or use OpenRLHF's own forward"
        )
    return head
