"""Which weights does a vLLM model compute with?

On CPUs vLLM packs matrices for its products and drops or keeps the originals, so a weight cannot be read back: each
layer is asked for its product with a few random rows instead.
"""

from collections.abc import Iterable
from typing import Any

import torch

ROWS = 8
# Norm of the difference by that of the product: what two right products in the dtype stay below.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@torch.no_grad()
def differing(model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """The names of the given weights with which the model does not compute.

    Weights of modules that have no counterpart of the same name (or of one that vLLM fuses) and the same width are
    passed over.
    """
    wholes = {part: whole for whole, parts in getattr(model, "packed_modules_mapping", {}).items() for part in parts}
    used: dict[str, int] = {}
    names = []
    for name, weight in weights:
        path, _, kind = name.rpartition(".")
        parent, _, leaf = path.rpartition(".")
        whole = f"{parent}.{wholes.get(leaf, leaf)}" if parent else leaf
        try:
            module = model.get_submodule(whole)
        except AttributeError:
            continue
        # Parts come in the order in which vLLM stacks them.
        start = used.get(f"{whole}.{kind}", 0)
        used[f"{whole}.{kind}"] = start + len(weight)
        embedding = hasattr(module, "num_embeddings") and module is not model.lm_head
        if embedding or kind != "weight" or weight.ndim != 2:
            same = _equal(getattr(module, kind)[start : start + len(weight)], weight)
        else:
            same = _multiplies_alike(module, weight, start)
        if not same:
            names.append(name)
        if embedding and model.config.tie_word_embeddings and not _multiplies_alike(model.lm_head, weight, 0):
            names.append(f"lm_head (tied to {name})")
    return names


def _multiplies_alike(module: Any, weight: torch.Tensor, start: int) -> bool:
    width = getattr(module, "input_size", None) or module.embedding_dim
    if weight.shape[1] != width:  # stored the other way round
        return True
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(ROWS, weight.shape[1], generator=generator).to(weight.dtype)
    got = module.quant_method.apply(module, rows)[:, start : start + len(weight)]
    return _equal(got, rows @ weight.T)


def _equal(got: torch.Tensor, want: torch.Tensor) -> bool:
    tolerance = TOLERANCE[want.dtype]
    got, want = got.float(), want.float()
    return got.shape == want.shape and bool((got - want).norm() <= tolerance * want.norm())
