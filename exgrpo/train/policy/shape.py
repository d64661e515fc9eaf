"""The sizes of a causal LM, from its configuration alone, and what they take: parameters, FLOPs, bytes.

Counted for decoders of the Llama family (RMSNorm, rotary positions, gated MLP, grouped-query attention).
D width, F width of the MLP, H heads and G key/value heads of width d, V vocabulary.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from exgrpo.kernels.chunks import chunking
from exgrpo.train.common.errors import ModelError
from exgrpo.train.config.policy import LoraConfig
from exgrpo.train.policy.flops import EXPERTS, ForwardFlops, forward_flops
from exgrpo.train.policy.segments import SIMILAR

NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
FP32 = 4


@dataclass(frozen=True, kw_only=True)
class ModelShape(ForwardFlops):
    """The sizes of a model. Bytes are per token where `item` is the bytes of an element in the compute dtype.

    Attributes:
        parameters: elements of each parameter, tied ones once.
        mlp, kv_heads: F, G.
        sides: inputs and outputs of the decoder's linear layers, added up by the last part of their names.
    """

    parameters: tuple[int, ...]
    mlp: int
    kv_heads: int
    sides: Mapping[str, int]

    @property
    def total(self) -> int:
        """Number of parameters."""
        return sum(self.parameters)

    def sharded(self, ranks: int) -> int:
        """Elements of one rank's shard: ZeRO-3 cuts every parameter by itself and rounds up."""
        return sum(-(-elements // ranks) for elements in self.parameters)

    def adapters(self, options: LoraConfig) -> int:
        """Elements of the adapters."""
        layers = options.targets or self.sides
        head = self.width + self.vocabulary if options.head else 0
        return options.rank * (sum(self.sides.get(name, 0) for name in layers) + head)

    def trained(self, options: LoraConfig, ranks: int) -> int:
        """Elements of one rank's shard of what is trained: the adapters if there are any, else the model."""
        return -(-self.adapters(options) // ranks) if options.rank else self.sharded(ranks)

    def whole(self, threshold: int) -> int:
        """Elements of the parameters that are small enough to stay whole on every rank."""
        return sum(elements for elements in self.parameters if elements <= threshold)

    def kv_bytes(self, item: int) -> int:
        """Bytes of keys and values that a cache holds per token."""
        return 2 * self.layers * self.kv_heads * self.head_width * item

    def kv_working_bytes(self, item: int) -> int:
        """Bytes per token beside the cache itself while rows are chosen, or one layer attends to it.

        The keys and values of one layer are there twice while their rows are chosen or their room grows. A layer's
        products with the keys and what softmax makes of them are its largest tensors besides.
        """
        return self.kv_bytes(item) // self.layers + 2 * self.heads * item

    def layer_bytes(self, item: int, *, eager_length: int = 0) -> int:
        """Bytes per token that one layer saves for its backward pass.

        Each of the two norms: its input in fp32, its scale, its result before and after the weight. Attention: queries,
        keys, values, result, one fp32 statistic per head. MLP: gate, its activation, the other factor, their product.

        Args:
            item: bytes of an element.
            eager_length: tokens of a sequence, with eager attention, which repeats keys and values and saves its
                probabilities [H, length] in fp32 and, where that is not fp32, in the compute dtype.
        """
        norms = 2 * (FP32 * self.width + FP32 + 2 * item * self.width)
        keys = self.heads if eager_length else self.kv_heads
        attention = 2 * item * self.head_width * (self.heads + keys)
        if eager_length:
            attention += self.heads * eager_length * (FP32 + (item if item != FP32 else 0))
        else:
            attention += FP32 * self.heads
        return norms + attention + 4 * item * self.mlp

    def packed_bytes(self, item: int, keys: float, longest: int) -> float:
        """Bytes per token that a layer saves on a GPU beyond `layer_bytes`, where rows share their prompts ("sdpa").

        Queries, keys, values and results stand in rows that are padded to the longest of those that are similar, keys
        and values once for each head of queries, and the mask of each row is there in the compute dtype. Attention of
        variable lengths takes less, which is not counted on: a GPU may lack it.

        Args:
            item: bytes of an element.
            keys: tokens that are seen, of all rows, per token of the pass.
            longest: tokens that a row sees at most.
        """
        rows = self.head_width * self.heads * (2 + 2 * keys) + longest
        return item * (rows / SIMILAR - self.head_width * (self.heads + 2 * self.kv_heads))

    def saved_bytes(self, item: int, *, checkpointing: bool, eager_length: int = 0) -> int:
        """Bytes per token that the decoder saves for its backward pass: of each layer all, or its input alone."""
        layer = item * self.width if checkpointing else self.layer_bytes(item, eager_length=eager_length)
        token_id, final_norm = 8, FP32 * self.width + FP32 + item * self.width
        return token_id + self.layers * layer + final_norm

    def gradient_bytes(self, item: int) -> int:
        """Bytes per token of the gradients in flight inside a layer: three as wide as the MLP, two of width D."""
        return item * (3 * self.mlp + 2 * self.width)

    def head_bytes(
        self, item: int, tokens: int, device: str = "cuda", *, frozen: bool = False, memory: int | None = None
    ) -> int:
        """Peak bytes of loss, forward and backward of the fused head when every token is a target.

        In the forward a chunk of logits with its scratch (on a GPU their exponentials in 16 bits, within the call's
        `memory`) and its tiles, and the sums of both gradients in fp32. In the backward the sums, and in 16 bits their
        products with the upstream gradient. There is none of the weight where that is ``frozen``, or added elsewhere.
        """
        kind = torch.device(device)
        if kind.type == "cuda":
            row = FP32 + (item if item < FP32 else 0)
            chunk = min(row * tokens, (memory or chunking.GPU_MEMORY) // self.vocabulary)
        else:
            step = min(tokens, chunking.chunk_rows(self.vocabulary, torch.float32, kind))
            chunk = FP32 * (step + min(step, chunking.block_rows(FP32 * self.vocabulary, kind)))
        alone = 0  # one chunk writes the weight's gradient in 16 bits, and takes the bytes of its sum in fp32
        if kind.type == "cuda" and item < FP32 and not frozen:
            whole, weight = row * tokens * self.vocabulary, self.width * self.vocabulary
            fits = whole <= (memory or chunking.GPU_MEMORY) + FP32 * weight
            alone = whole + item * weight + FP32 * self.width * tokens if fits else 0
        gradients = self.width * (tokens if frozen else self.vocabulary + tokens)
        sums = FP32 * gradients
        per_token = 24 * FP32 * tokens  # inputs in fp32, statistics and results, places of targets
        tiles = 1 if frozen else 2  # of the weight, and of its gradient
        forward = self.vocabulary * chunk + tiles * chunking.TILE_BYTES + sums
        scaled = item * gradients if item < FP32 else 0
        return per_token + max(forward, alone, sums + scaled)


def shape_of(config: Any) -> ModelShape:
    """The shape of the model that a Hugging Face configuration describes, counted on the meta device.

    Raises:
        ModelError: it is not of the family that is counted here.
    """
    missing = [name for name in NEEDED if not isinstance(getattr(config, name, None), int)]
    experts = [name for name in EXPERTS if getattr(config, name, None)]
    if missing or experts:
        why = f"has no {', '.join(missing)}" if missing else "is a mixture of experts"
        raise ModelError(f"model {config.model_type!r} {why}: only dense decoders of the Llama family are counted")
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise ModelError(f"model {config.model_type!r} is no causal LM: {str(error).splitlines()[0]}") from error
    flops = forward_flops(model)
    return ModelShape(
        **vars(flops),
        parameters=tuple(parameter.numel() for parameter in model.parameters()),
        sides=_sides(model),
        mlp=config.intermediate_size,
        kv_heads=getattr(config, "num_key_value_heads", None) or flops.heads,
    )


def _sides(model: PreTrainedModel) -> Mapping[str, int]:
    found = Counter[str]()
    for path, module in model.get_decoder().named_modules():
        if isinstance(module, nn.Linear):
            found[path.rpartition(".")[2]] += module.in_features + module.out_features
    return found
