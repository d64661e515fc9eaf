"""Attention implementations of transformers: over a row of packed sequences, and of one new token per row.

N tokens or rows, T tokens so far, H heads, G of them for each head of keys, D head width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import flash_attention_mask, sdpa_mask

from exgrpo.train.policy.segments import Segments

PACKED = "exgrpo_packed"
"""Name of the attention implementation; without segments it is "sdpa"."""
PACKED_FLASH = "exgrpo_packed_varlen"
"""The same with flash attention."""
PACKING = {"sdpa": PACKED, "flash_attention_2": PACKED_FLASH}
"""What packs in the place of an attention implementation of transformers."""
ONE_TOKEN = "exgrpo_one_token"
"""Name of the one for generation; it is "sdpa" where more than one token per row is new."""
_HARMLESS = frozenset(
    {"is_causal", "position_ids", "use_cache", "output_attentions", "cache_position", "sliding_window"}
)
"""Arguments that change nothing here, or that are heeded: segments and masks hold what the others say."""


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
    window = _window(kwargs)
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
        causal = bucket.causal and window is None
        on_cpu = q.device.type == "cpu"
        if not on_cpu and not causal:  # kernels of GPUs share keys between heads only without a mask
            k, v = (repeat_kv(states, heads // groups) for states in (k, v))
        result = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if causal else bucket.seen(window),
            is_causal=causal,
            dropout_p=dropout,
            scale=scaling,
            enable_gqa=k.shape[1] != heads,
        )
        results.append(result.transpose(1, 2).flatten(0, 1).flatten(1))
    return F.embedding(segments.place, torch.cat(results)).unflatten(-1, (heads, -1))[None], None


def attend_flash(
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
    """`attend` by flash attention, whose causal mask ends at the last query and the last key of each block."""
    if segments is None:
        return flash_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]  # only for GPUs

    window, parts = _window(kwargs), segments.varlen
    queries, keys, values = (states[0].transpose(0, 1) for states in (query, key, value))
    result = flash_attn_varlen_func(
        queries,
        *(F.embedding(parts.key, states.flatten(1)).unflatten(-1, states.shape[1:]) for states in (keys, values)),
        parts.query_ends,
        parts.key_ends,
        parts.most_queries,
        parts.most_keys,
        dropout_p=dropout,
        softmax_scale=scaling,
        causal=True,
        window_size=(-1, -1) if window is None else (window - 1, 0),
    )
    return result[None], None


def attend_one(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Softmax(query key') value for one new token per row, where heads that share keys do not copy them.

    Args:
        module: the layer.
        query: [N, H, R, D]; R new tokens.
        key: [N, H / G, T, D].
        value: the same.
        attention_mask: [N, 1, R, T] bool, where a token may look; None: everywhere.
        dropout: 0.
        scaling: of the products; None: 1 / sqrt(D).
        kwargs: what else the model gives.

    Returns:
        [N, R, H, D], and no weights.
    """
    rows, heads, new, width = query.shape
    if new != 1 or dropout or _unknown(kwargs):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    groups = key.shape[1]
    scale = width**-0.5 if scaling is None else scaling
    scores = torch.matmul(query.reshape(rows, groups, heads // groups, width) * scale, key.transpose(-1, -2))
    if attention_mask is not None:
        scores.masked_fill_(~attention_mask, float("-inf"))
    return torch.matmul(scores.softmax(-1), value).view(rows, 1, heads, value.shape[-1]), None


def _window(options: dict[str, Any]) -> int | None:
    """How far a token sees, of what a model gives beside the usual.

    Raises:
        NotImplementedError: the model gives something that changes the result in an unknown way.
    """
    if unknown := _unknown(options):
        raise NotImplementedError(f"attention with {', '.join(unknown)}")
    return options.get("sliding_window")


def _unknown(options: dict[str, Any]) -> list[str]:
    """Names of what a model gives that may change the result."""
    return [name for name in options.keys() - _HARMLESS if options[name] is not None]


AttentionInterface.register(PACKED, attend)
AttentionInterface.register(PACKED_FLASH, attend_flash)
AttentionInterface.register(ONE_TOKEN, attend_one)
AttentionMaskInterface.register(PACKED_FLASH, flash_attention_mask)
AttentionMaskInterface.register(PACKED, sdpa_mask)
AttentionMaskInterface.register(ONE_TOKEN, sdpa_mask)
