"""Attention implementations of transformers: over a row of packed sequences, and of one new token per row.

N tokens or rows, T tokens so far, H heads, G of them for each head of keys, D head width.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from exgrpo.train.policy.segments import Segments, Varlen

PACKED = "exgrpo_packed"
"""Name of the attention implementation; without segments it is "sdpa"."""
ONE_TOKEN = "exgrpo_one_token"
"""Name of the one for generation; it is "sdpa" where more than one token per row is new."""
varlen: Callable[..., Any] = varlen_attn
"""Torch's attention of variable lengths, without types: they are those of one version."""
SHARES = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
"""Argument that says that heads share keys; older versions infer it."""
AMPERE, WIDEST = (8, 0), 256
"""The first GPUs that it has kernels for, and the widest heads."""
_HARMLESS = frozenset(
    {"is_causal", "position_ids", "use_cache", "output_attentions", "cache_position", "sliding_window"}
)
"""Arguments that change nothing here, or that are heeded: segments and masks hold what the others say."""


@torch.compiler.disable  # its blocks and its backward's order of sums stay as they are in compiled layers
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

    On GPUs in 16 bits by attention of variable lengths, which needs no mask, elsewhere by padded rows with masks.

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
    if not dropout and _variable_lengths(query, key, value):
        return _by_block(query, key, value, segments.varlen, scaling, window), None
    return _masked(query, key, value, segments, dropout, scaling, window), None


def _masked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    dropout: float,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """`attend` by padded rows with masks, on any device and in any dtype."""
    heads, groups = query.shape[1], key.shape[1]
    # By token: the backward of a lookup adds up what a prompt's answers give.
    flat = [states[0].transpose(0, 1).flatten(1) for states in (query, key, value)]
    results = []
    for bucket in segments.buckets:
        lookups = (bucket.query, bucket.key, bucket.key)
        rows = [lookup(states) for lookup, states in zip(lookups, flat, strict=True)]
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
    return segments.place(torch.cat(results)).unflatten(-1, (heads, -1))[None]


def _by_block(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    parts: Varlen,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """`attend` by torch's kernel, whose causal mask ends at the last query and key of each block; [1, N, H, D]."""
    queries, keys, values = (states[0].transpose(0, 1) for states in (query, key, value))
    keys, values = (parts.key(states.flatten(1)).unflatten(-1, states.shape[1:]) for states in (keys, values))
    blocks = (parts.query_ends, parts.key_ends, parts.most_queries, parts.most_keys)
    bounds = (-1 if window is None else window - 1, 0)
    result: torch.Tensor = varlen(queries, keys, values, *blocks, scale=scaling, window_size=bounds, **SHARES)
    return result[None]


def _variable_lengths(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Return True if torch's attention of variable lengths (FlashAttention 2, GPUs, 16 bits) takes such states."""
    width = query.shape[-1]
    if query.device.type != "cuda" or query.element_size() != 2 or width != value.shape[-1]:
        return False
    return width <= WIDEST and width % 8 == 0 and torch.cuda.get_device_capability(query.device) >= AMPERE


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
    """Return the width of the attention window, from the further options that a model passes.

    Raises:
        NotImplementedError: the model gives something that changes the result in an unknown way.
    """
    if unknown := _unknown(options):
        raise NotImplementedError(f"attention with {', '.join(unknown)}")
    return options.get("sliding_window")


def _unknown(options: dict[str, Any]) -> list[str]:
    return [name for name in options.keys() - _HARMLESS if options[name] is not None]


AttentionInterface.register(PACKED, attend)
AttentionInterface.register(ONE_TOKEN, attend_one)
AttentionMaskInterface.register(PACKED, sdpa_mask)
AttentionMaskInterface.register(ONE_TOKEN, sdpa_mask)
