"""A cache of keys and values that grows in place, and whose rows can be chosen.

N rows, T tokens so far.
"""

from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


def grown(length: int) -> int:
    """Tokens that a layer gets room for when it has to hold so many: growing often would copy often."""
    return length + length // 4 + 32


class RoomyLayer(DynamicLayer):
    """Keys and values [N, heads, T, head_dim] of a layer; a token is written into room that is there already.

    The layer of transformers copies all that it holds for every token.
    """

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make room for the first tokens."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self._length = 0
        self._rooms = [state.new_empty(0) for state in (key_states, value_states)]
        self.keys, self.values = key_states[..., :0, :], value_states[..., :0, :]
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the states of new tokens; returns those of all tokens, which are views."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, self._length = self._length, self._length + key_states.shape[-2]
        states = (key_states, value_states)
        if not self._rooms[0].numel() or self._length > self._rooms[0].shape[-2]:
            self._rooms = [self._moved(old, new) for old, new in zip(self._held(), states, strict=True)]
        for room, new in zip(self._rooms, states, strict=True):
            room[..., start : self._length, :] = new
        self.keys, self.values = (room[..., : self._length, :] for room in self._rooms)
        return self.keys, self.values

    def _held(self) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def _moved(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """A larger room with what the old one holds."""
        room = new.new_empty(*new.shape[:-2], grown(self._length), new.shape[-1])
        room[..., : old.shape[-2], :] = old
        return room

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Take rows of the cache, some of them several times or not at all."""
        self._rooms = [room.index_select(0, beam_idx) for room in self._rooms]
        self.keys, self.values = (room[..., : self._length, :] for room in self._rooms)


def roomy_cache(config: Any) -> DynamicCache:
    """An empty cache for a model; layers of other kinds (sliding windows, states) stay as transformers makes them."""
    cache = DynamicCache(config=config)
    cache.layers = [RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
