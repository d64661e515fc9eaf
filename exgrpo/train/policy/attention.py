"""Attention over a row of packed sequences, as an attention implementation of transformers.

N tokens, H heads, G of them for each head of keys, D head width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from exgrpo.train.policy.segments import Segments

PACKED = "exgrpo_packed"
"""Name of the attention implementation; without segments it is "sdpa"."""
_HARMLESS = frozenset({"is_causal", "position_ids", "use_cache", "output_attentions", "cache_position"})
"""Arguments that change nothing here: segments hold what they say."""


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    segments: Segments | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Softmax(query key') value, where the tokens of a segment see those of their prompt and their own earlier ones.

    Args:
        module: the layer.
        query: [1, H, N, D].
        key: [1, H / G, N, D].
        value: the same, of perhaps another width.
        attention_mask: of a padded batch.
        dropout: probability.
        scaling: of the products; None: 1 / sqrt(D).
        segments: which tokens see each other; None: the batch is padded.
        kwargs: what else the model gives; `sliding_window` bounds how far a token sees.

    Returns:
        [1, N, H, D], and no weights.

    Raises:
        NotImplementedError: the model gives something that changes the result in an unknown way.
    """
    if segments is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    window = kwargs.pop("sliding_window", None)
    if unknown := [name for name in kwargs.keys() - _HARMLESS if kwargs[name] is not None]:
        raise NotImplementedError(f"attention with {', '.join(unknown)}")
    heads, groups = query.shape[1], key.shape[1]
    # By token, so that an embedding's lookup takes the rows and its backward adds up what a prompt's answers give.
    flat = [states[0].transpose(0, 1).flatten(1) for states in (query, key, value)]
    results = []
    for bucket in segments.buckets:
        index = (bucket.query, bucket.key, bucket.key)
        rows = [F.embedding(i, states) for i, states in zip(index, flat, strict=True)]
        q, k, v = (
            row.unflatten(-1, (count, -1)).transpose(1, 2)
            for row, count in zip(rows, (heads, groups, groups), strict=True)
        )
        seen = bucket.distance >= 0
        if window is not None:
            seen &= bucket.distance < window
        on_cpu = q.device.type == "cpu"
        if not on_cpu:  # kernels of GPUs share keys between heads only without a mask
            k, v = (repeat_kv(states, heads // groups) for states in (k, v))
        result = F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen[:, None], dropout_p=dropout, scale=scaling, enable_gqa=on_cpu and heads != groups
        )
        results.append(result.transpose(1, 2).flatten(0, 1).flatten(1))
    return F.embedding(segments.place, torch.cat(results)).unflatten(-1, (heads, -1))[None], None


AttentionInterface.register(PACKED, attend)
AttentionMaskInterface.register(PACKED, sdpa_mask)
