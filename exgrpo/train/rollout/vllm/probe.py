"""Compare the weights of a vLLM model with given ones.

On CPUs vLLM packs matrices and may drop the originals, so weights cannot be read back: instead, each layer multiplies
a few random rows.
"""

from collections.abc import Iterable
from typing import Any

import torch

ROWS = 8
# Bound for norm(difference) / norm(product) of two correct products in the dtype.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@torch.no_grad()
def differing(model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Return the names of the given unsharded weights that differ from the model's, or from this rank's part of it.

    Skips weights without a counterpart of the same name (or fused by vLLM) and the same width.
    """
    fused = getattr(model, "packed_modules_mapping", {})
    wholes = {part: (whole, first) for whole, (first, *rest) in fused.items() for part in (first, *rest)}
    used: dict[str, int] = {}
    names = []
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
        embedding = hasattr(module, "num_embeddings") and module is not model.lm_head
        if embedding or kind != "weight" or weight.ndim != 2:
            same = _equal(getattr(module, kind)[start : start + len(part)], part)
        else:
            same = _multiplies_alike(module, part, start)
        if not same:
            names.append(name)
        if embedding and model.config.tie_word_embeddings:
            part = _part(model.lm_head, weight, repeated=False)
            if not _multiplies_alike(model.lm_head, part, 0):
                names.append(f"lm_head (tied to {name})")
    return names


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
