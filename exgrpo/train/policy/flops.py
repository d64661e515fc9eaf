"""The FLOPs that the mathematics of a causal LM asks for, and those of what a step reads and writes with it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from exgrpo.train.common.records import TokenIds, shared_prefix
from exgrpo.train.common.step_batch import Ints, StepBatch

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""The names under which configurations say how many experts a layer chooses from."""


@dataclass(frozen=True, kw_only=True)
class ForwardFlops:
    """The sizes of a causal LM on which its FLOPs depend. A backward pass takes twice the forward.

    Attributes:
        linear: elements of the matrices of all decoder layers that a token goes through: of the experts of a layer only
            those that are chosen for it.
        layers: those with attention over the tokens before.
        width, heads, head_width, vocabulary: D, number of heads, their width, V.
        windows: of those layers whose attention reaches back only so far, how many tokens.
    """

    linear: int
    layers: int
    width: int
    heads: int
    head_width: int
    vocabulary: int
    windows: tuple[int, ...] = ()

    def decoder_flops(self, tokens: float) -> float:
        """FLOPs of the decoder layers over one sequence; causal attention counts half of its square.

        What n tokens after a prompt take is the difference of two calls.
        """
        pairs = (self.layers - len(self.windows)) * tokens**2 / 2
        for window in self.windows:
            full = min(tokens, window)
            pairs += full**2 / 2 + (tokens - full) * window
        return 2 * self.linear * tokens + 4 * self.heads * self.head_width * pairs

    def head_flops(self, tokens: float) -> float:
        """FLOPs of one product with the output embedding, for so many tokens that are predicted."""
        return 2 * self.width * self.vocabulary * tokens


def forward_flops(model: PreTrainedModel) -> ForwardFlops:
    """Count a model, which may be on the meta device; what its configuration does not say counts nothing."""
    config = model.config.get_text_config()
    head = model.get_output_embeddings().weight
    heads = getattr(config, "num_attention_heads", 0)
    window = getattr(config, "sliding_window", None)
    alike = ["sliding_attention"] * getattr(config, "num_hidden_layers", 0)
    types = getattr(config, "layer_types", None) or alike
    return ForwardFlops(
        linear=matrix_elements(model.get_decoder(), config),
        layers=sum(kind.endswith("attention") and not kind.startswith("linear") for kind in types),
        width=head.shape[1],
        heads=heads,
        head_width=_head_width(config, heads),
        vocabulary=head.shape[0],
        windows=tuple(window for kind in types if window and kind == "sliding_attention"),
    )


def matrix_elements(decoder: nn.Module, config: Any) -> int:
    """Elements of the matrices that one token is multiplied with; embeddings are looked up."""
    experts = next((count for name in EXPERTS if (count := getattr(config, name, None))), 0)
    chosen = getattr(config, "num_experts_per_tok", None) or experts
    elements = 0
    for module in decoder.modules():
        if isinstance(module, nn.Embedding):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() < 2 or name.endswith("bias"):
                continue
            of_experts = parameter.dim() == 3 and parameter.shape[0] == experts
            elements += parameter[0].numel() * chosen if of_experts else parameter.numel()
    return elements


def _head_width(config: Any, heads: int) -> int:
    if getattr(config, "qk_head_dim", None):
        return int(config.qk_head_dim + config.v_head_dim) // 2
    return int(getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // max(heads, 1))


@dataclass(frozen=True)
class Reading:
    """A prompt that is needed once, and the responses to it, each read or written after it.

    Attributes:
        prompt: tokens of the prompt.
        responses: tokens of each response.
        known: tokens at the beginning of the prompt that another reading has, too.
    """

    prompt: int
    responses: tuple[int, ...]
    known: int = 0

    @property
    def written(self) -> int:
        """Response tokens."""
        return sum(self.responses)

    @property
    def read(self) -> int:
        """Tokens of the rows that the model reads: the prompt, once per response, and all of it but its last token."""
        return sum(self.prompt + response - 1 for response in self.responses)

    def flops(self, model: ForwardFlops) -> float:
        """FLOPs of a forward pass; the first tokens of all responses are predicted from the end of the one prompt."""
        prompt = model.decoder_flops(self.prompt)
        own = prompt - model.decoder_flops(self.known)
        behind = sum(model.decoder_flops(self.prompt + response - 1) - prompt for response in self.responses)
        return own + behind + model.head_flops(1 + self.written - len(self.responses))


Work = Mapping[str, Sequence[Reading]]
"""By phase, what the model reads or writes in it: select, generate, score, update. Empty where a step does without."""


def together(batch: StepBatch, rows: Ints | None = None) -> list[Reading]:
    """Some rows, or all of them; those of the same question as one, in the order of their first ones.

    The first one has what all their prompts begin with.
    """
    readings: dict[int, tuple[TokenIds, list[int]]] = {}
    for row in range(len(batch)) if rows is None else rows:
        group = batch.group[row]
        _, responses = readings.setdefault(int(batch.question[group]), (batch.prompt[group], []))
        responses.append(int(batch.length[row]))
    shared = shared_prefix([prompt for prompt, _ in readings.values()])
    return [
        Reading(len(prompt), tuple(responses), shared if number else 0)
        for number, (prompt, responses) in enumerate(readings.values())
    ]
