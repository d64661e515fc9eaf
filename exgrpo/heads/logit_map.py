"""Softcap and scale that a causal LM of transformers applies to its logits, measured by sending numbers through it."""

import math
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from exgrpo.heads.forwards import replaced_forward

_PROBES = (2.0**-30, 2.0**40, -(2.0**40), 0.0, 0.5, -3.0, 20.0, -70.0)
_REMEDY = "use its logits with exgrpo.kernels.policy_loss"


class LogitMap(NamedTuple):
    """z -> cap(z) / temperature with cap(z) = softcap * tanh(z / softcap), the only map that the kernels support.

    Attributes:
        temperature: above 0.
        softcap: above 0, or None for no cap.
        memory: bytes that the kernels may take; None: the kernels' default.
    """

    temperature: float = 1.0
    softcap: float | None = None
    memory: int | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """Apply the map, elementwise."""
        capped = logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)
        return capped / self.temperature

    def options(self, temperature: float | Tensor) -> dict[str, Any]:
        """Return kernel arguments for the model's logits divided by a temperature, one number or one per token."""
        return {"temperature": temperature * self.temperature, "softcap": self.softcap, "memory": self.memory}


def measure(model: Any, *, direct: bool, memory: int | None = None) -> LogitMap:
    """Measure the map from the head's output to the logits of a causal LM.

    The model's own forward runs on a few tokens, while its decoder returns small numbers as hidden states and its head
    returns :func:`probes`. Neither needs its weights: they may be partitioned or on the meta device.

    Args:
        model: causal LM of transformers, also with adapters of peft; unchanged afterwards.
        direct: True if the caller itself passes the decoder's hidden states to the head. A model that changes them in
            between is then refused.
        memory: stored in the map.

    Returns:
        LogitMap: options with which the kernels compute the model's probabilities.

    Raises:
        ValueError: the model transforms its logits differently, calls its head several times or never, or changes the
            hidden states although ``direct``.
    """
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    passage = _pass_numbers(model)
    name = f"model: {type(model).__name__}"
    if len(passage.at_head) != 1:
        raise ValueError(f"{name} calls its head {len(passage.at_head)} times; {_REMEDY}")
    if direct and not _same(passage.at_head[0], passage.hidden):
        raise ValueError(f"{name} changes its hidden states between its decoder and its head; {_REMEDY}")
    logit_map = fitted(passage.sent, passage.received)
    if logit_map is None:
        raise ValueError(f"{name} does more with its logits than a softcap and a scale; {_REMEDY}")
    return logit_map._replace(memory=memory)


def probes(vocabulary: int, device: torch.device) -> Tensor:
    """Return numbers that identify a map, [1, P, vocabulary] float64: one per position, the same in all columns."""
    column = torch.tensor(_PROBES, dtype=torch.float64, device=device)
    return column[None, :, None].expand(1, len(_PROBES), vocabulary)


def fitted(sent: Tensor, received: Tensor) -> LogitMap | None:
    """Fit the map from ``sent`` to ``received``, both shaped like :func:`probes`; None if no map fits."""
    if received.shape != sent.shape:
        return None
    slope, at_largest = (received[0, :2, 0].double() / sent[0, :2, 0]).tolist()
    if not (math.isfinite(slope) and slope > 0):
        return None
    slope, limit = _as_written(slope), _as_written(received[0, 1, 0].item())
    logit_map = LogitMap(1 / slope, None if at_largest >= 0.5 * slope else limit / slope)
    # Tolerance for code that computes in float32; no map of another kind comes this close.
    same = torch.allclose(logit_map(sent), received.double(), rtol=1e-5, atol=1e-9)
    return logit_map if same else None


@dataclass(frozen=True, eq=False)
class _Passage:
    """Values that passed through a model's code.

    Attributes:
        hidden: output of the decoder, [1, P, D].
        at_head: input of each call of the head.
        sent: output of the head, [1, P, V].
        received: the model's logits for that output.
    """

    hidden: Tensor
    at_head: list[Tensor]
    sent: Tensor
    received: Tensor


@torch.no_grad()
def _pass_numbers(model: Any) -> _Passage:
    parameter, config = next(model.parameters()), model.config.get_text_config()
    device = torch.device("cpu") if parameter.is_meta else parameter.device
    sent, at_head = probes(config.vocab_size, device), []
    hidden = torch.arange(len(_PROBES) * config.hidden_size, device=device).remainder(7).to(parameter.dtype)
    hidden = hidden.view(1, len(_PROBES), config.hidden_size)

    def decoder_forward(decoder: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _decoder_output(hidden)

    def head_forward(head: nn.Module, hidden: Tensor) -> Tensor:
        at_head.append(hidden)
        return sent.clone()

    # A model calls its base model or the decoder in it. If they are the model itself, all of its code runs.
    decoders = {model.base_model, model.get_decoder()} - {model}
    with ExitStack() as stack:
        for decoder in decoders:
            stack.enter_context(replaced_forward(decoder, decoder_forward))
        stack.enter_context(replaced_forward(model.get_output_embeddings(), head_forward))
        tokens = torch.zeros(1, len(_PROBES), dtype=torch.int64, device=device)
        return _Passage(hidden, at_head, sent, model(input_ids=tokens).logits)


def _decoder_output(hidden: Tensor) -> Any:
    """Return an output for any kind of decoder; all fields other than the hidden states are None."""
    from transformers.modeling_outputs import BaseModelOutput

    class DecoderOutput(BaseModelOutput):
        def __getattr__(self, name: str) -> None:
            if name.startswith("_"):
                raise AttributeError(name)

    return DecoderOutput(last_hidden_state=hidden)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and not one.is_meta and torch.equal(one.double(), other.double())


def _as_written(number: float) -> float:
    """Round away floating-point noise: numbers in configurations have few digits."""
    return float(f"{number:.12g}")
