"""Attention of one new token per row, where heads that share keys do not copy them.

N rows, T tokens so far, H heads, G of them for each head of keys, D head width.
"""

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ONE_TOKEN = "exgrpo_one_token"
"""Name of the attention implementation; it is "sdpa" where more than one token per row is new."""
_PLAIN = frozenset({"is_causal", "position_ids", "use_cache", "sliding_window", "output_attentions", "cache_position"})
"""Arguments that change nothing here: the mask holds what they say."""


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Softmax(query key') value as an attention implementation of transformers.

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
    if new != 1 or dropout or any(kwargs[name] is not None for name in kwargs.keys() - _PLAIN):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    groups = key.shape[1]
    scale = width**-0.5 if scaling is None else scaling
    scores = torch.matmul(query.reshape(rows, groups, heads // groups, width) * scale, key.transpose(-1, -2))
    if attention_mask is not None:
        scores.masked_fill_(~attention_mask, float("-inf"))
    return torch.matmul(scores.softmax(-1), value).view(rows, 1, heads, value.shape[-1]), None


AttentionInterface.register(ONE_TOKEN, attend)
AttentionMaskInterface.register(ONE_TOKEN, sdpa_mask)
