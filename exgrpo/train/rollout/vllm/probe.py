"""Compare the weights of a vLLM model with given ones, or replace them in place.

On CPUs vLLM packs matrices and may drop the originals, so weights cannot be read back: instead, each layer multiplies
a few random rows.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

ROWS = 8
# Bound for norm(difference) / norm(product) of two correct products in the dtype.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
LINEAR = ("ColumnParallelLinear", "MergedColumnParallelLinear", "QKVParallelLinear", "ReplicatedLinear")
PLAIN = (*LINEAR, "RowParallelLinear", "VocabParallelEmbedding", "ParallelLMHead", "RMSNorm")
"""vLLM's modules that compute with their parameters as they are."""


class Place(NamedTuple):
    """The rows `start` and following of a module's parameter that hold this rank's part of a weight."""

    name: str
    weight: torch.Tensor
    module: Any
    kind: str
    part: torch.Tensor
    start: int

    @property
    def whole(self) -> torch.Tensor:
        """The parameter."""
        parameter: torch.Tensor = getattr(self.module, self.kind)
        return parameter

    @property
    def held(self) -> torch.Tensor:
        """These rows of it."""
        return self.whole[self.start : self.start + len(self.part)]


@torch.no_grad()
def differing(model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Return the names of the given unsharded weights that differ from the model's, or from this rank's part of it.

    Skips weights without a counterpart of the same name (or fused by vLLM) and the same width.
    """
    names = []
    for place in _places(model, weights):
        name, weight, module, kind, part, start = place
        embedding = hasattr(module, "num_embeddings") and module is not model.lm_head
        if embedding or kind != "weight" or weight.ndim != 2:
            same = _equal(place.held, part)
        else:
            same = _multiplies_alike(module, part, start)
        if not same:
            names.append(name)
        if embedding and model.config.tie_word_embeddings:
            part = _part(model.lm_head, weight, repeated=False)
            if not _multiplies_alike(model.lm_head, part, 0):
                names.append(f"lm_head (tied to {name})")
    return names


@torch.no_grad()
def are_copies(model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> bool:
    """True if the parameters are exactly these weights, just loaded, and nothing in the model is derived from them.

    False if vLLM packs, quantises or converts a weight, and for attention with prepared matrices (MLA).
    """
    same, covered, rest = True, 0, iter(weights)
    try:
        for place in _places(model, rest):
            same &= type(place.module).__name__ in PLAIN and torch.equal(place.held, place.part.to(place.held))
            # Rows that fill up a vocabulary are never looked up, and their logits are cut off.
            covered += (place.whole if hasattr(place.module, "shard_indices") else place.part).numel()
    except (AttributeError, TypeError):  # a module of another kind, or one without this parameter
        same = False
        for _ in rest:  # ranks gather each weight together
            pass
    prepared = {type(one).__name__ for one in model.modules() if hasattr(one, "process_weights_after_loading")}
    return same and prepared <= {"Attention"} and covered == sum(one.numel() for one in model.parameters())


@torch.no_grad()
def copy_weights(model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Replace the parameters of a model for which `are_copies` was true."""
    for place in _places(model, weights):
        place.held.copy_(place.part)


def _places(model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Place]:
    fused = getattr(model, "packed_modules_mapping", {})
    wholes = {part: (whole, first) for whole, (first, *rest) in fused.items() for part in (first, *rest)}
    used: dict[str, int] = {}
    for name, weight in weights:
        path, _, kind = name.rpartition(".")
        parent, _, leaf = path.rpartition(".")
        whole, first = wholes.get(leaf, (leaf, leaf))
        whole = f"{parent}.{whole}" if parent else whole
        try:
            module = model.get_submodule(whole)
        except AttributeError:
            continue
        part = _part(module, weight, repeated=leaf != first)
        # Parts of a fused matrix come in the order in which vLLM stacks them.
        start = used.get(f"{whole}.{kind}", 0)
        used[f"{whole}.{kind}"] = start + len(part)
        yield Place(name, weight, module, kind, part, start)


def _part(module: Any, weight: torch.Tensor, *, repeated: bool) -> torch.Tensor:
    """Return this rank's part of a weight under tensor parallelism.

    `repeated`: True for keys and values, of which several ranks may have the same part.
    """
    ranks = getattr(module, "tp_size", 1)
    if ranks == 1:
        return weight
    if hasattr(module, "shard_indices"):
        rows = module.shard_indices
        return weight[rows.org_vocab_start_index : rows.org_vocab_end_index]
    if module.input_size_per_partition < module.input_size:  # the sum over ranks is the layer's product
        return weight.chunk(ranks, dim=1)[module.tp_rank] if weight.ndim == 2 else weight
    copies = getattr(module, "num_kv_head_replicas", 1) if repeated else 1
    return weight.chunk(ranks // copies)[module.tp_rank // copies]


def _multiplies_alike(module: Any, weight: torch.Tensor, start: int) -> bool:
    width = getattr(module, "input_size_per_partition", None) or module.embedding_dim
    if weight.shape[1] != width:  # the module stores the transpose
        return True
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(ROWS, weight.shape[1], generator=generator).to(weight)
    got = module.quant_method.apply(module, rows)[:, start : start + len(weight)]
    return _equal(got, rows @ weight.T)


def _equal(got: torch.Tensor, want: torch.Tensor) -> bool:
    tolerance = TOLERANCE[want.dtype]
    got, want = got.float(), want.float()
    return got.shape == want.shape and bool((got - want).norm() <= tolerance * want.norm())
