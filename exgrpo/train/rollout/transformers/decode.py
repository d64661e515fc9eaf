"""Decode a batch of answers token by token, dropping rows that have ended.

Keys and values are in a cache that grows in place and can drop rows. Shapes: N answers, M prompts, P tokens of the
longest prompt, R tokens of the longest answer, T tokens so far.
"""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from transformers import DynamicCache, DynamicLayer, PreTrainedModel

from exgrpo.train.common.errors import RolloutError
from exgrpo.train.common.records import AllowedTokens, Rollout, TokenIds
from exgrpo.train.rollout.engine import Enough, Sampling
from exgrpo.train.rollout.transformers.draws import Drawn, Noise, draw

KEPT = 0.8
"""Rows that have ended are dropped once less than this fraction is open, since dropping copies the cache."""
CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")
"""Names of a model's argument for the cache: of all since transformers 5.24; before, with and without attention."""


@torch.inference_mode()
def decode(
    model: PreTrainedModel,
    prompts: Sequence[TokenIds],
    prompt_of: npt.NDArray[np.int64],
    sampling: Sequence[Sampling],
    noise: Noise,
    *,
    eos: TokenIds,
    pad: int,
    shared: int,
    enough: Enough | None = None,
) -> Iterator[tuple[int, Rollout]]:
    """Sample answers and yield each with its index as soon as it is finished.

    Each prompt is computed once for all of its answers, and a prefix that all prompts share is computed once.

    Args:
        prompt_of: [N] index of the prompt of each answer.
        sampling: [N] sampling parameters; they may differ only in lengths and stop strings.
        pad: token id for padding prompts on the left.
        shared: length of the common prefix of all prompts; must be 0 unless `keeps_all`.
        enough: once it returns True, the other answers are yielded as they are.

    Raises:
        RolloutError: the model does not use the given cache.
    """
    state = _Rows(model, prompts, pad, shared)
    logits = state.read(state.tokens)
    state.select(prompt_of)
    logits = logits[torch.from_numpy(prompt_of).to(logits.device)]
    answers, open_ = np.arange(len(prompt_of)), np.ones(len(prompt_of), bool)
    limits = np.array([of_answer.max_tokens for of_answer in sampling])
    stops = any(of_answer.stop for of_answer in sampling)
    written = _Written(len(prompt_of), int(limits.max()))

    for position in range(int(limits.max())):
        drawn = draw(logits, torch.from_numpy(noise.at(position, answers)).to(logits.device), sampling[0])
        tokens = written.add(answers, position, drawn)
        last = (tokens[:, None] == eos).any(1)
        ended = open_ & (last | (limits[answers] == position + 1))
        for place in np.flatnonzero(open_ & ~ended) if stops else ():
            # Only detects a stop string; `Stops.cut` cuts the answer later.
            ended[place] = sampling[answers[place]].stop.reached(written.response[answers[place], : position + 1])
        for place in np.flatnonzero(ended):
            answer = int(answers[place])
            yield answer, written.rollout(answer, position + 1, sampling[answer], finished=bool(last[place]))
        open_ &= ~ended
        if enough and ended.any() and enough():
            for place in np.flatnonzero(open_):
                answer = int(answers[place])
                yield answer, written.rollout(answer, position + 1, sampling[answer], finished=False)
            break
        if not open_.any():
            break
        if open_.mean() < KEPT:
            left = np.flatnonzero(open_)
            answers, open_, tokens = answers[left], open_[left], tokens[left]
            state.select(left)
        logits = state.read(torch.from_numpy(tokens[:, None].astype(np.int64)))


class _Written:
    """Buffers of N answers of at most R tokens; `response`: [N, R] int32 token ids."""

    def __init__(self, answers: int, longest: int) -> None:
        shape = (answers, longest)
        self.response = np.empty(shape, np.int32)
        self._log_prob, self._entropy = np.empty(shape, np.float32), np.empty(shape, np.float32)
        self._allowed: list[list[TokenIds]] = [[] for _ in range(answers)]

    def add(self, answers: npt.NDArray[np.int64], position: int, drawn: Drawn) -> npt.NDArray[np.int64]:
        """Store the tokens drawn for some answers at a position, and return them on the CPU."""
        tokens = drawn.token.cpu().numpy()
        self.response[answers, position] = tokens
        self._log_prob[answers, position] = drawn.log_prob.cpu().numpy()
        self._entropy[answers, position] = drawn.entropy.cpu().numpy()
        if drawn.allowed_tokens is not None:
            for answer, of_token in zip(answers, drawn.allowed_tokens.lists(), strict=True):
                self._allowed[answer].append(of_token)
        return tokens

    def rollout(self, answer: int, length: int, sampling: Sampling, *, finished: bool) -> Rollout:
        response = self.response[answer, :length].copy()
        allowed_tokens = AllowedTokens.from_lists(self._allowed[answer]) if sampling.allowed_tokens else None
        if not sampling.log_prob:
            return Rollout(response, finished, allowed_tokens=allowed_tokens)
        log_prob, entropy = self._log_prob[answer, :length].copy(), self._entropy[answer, :length].copy()
        return Rollout(response, finished, log_prob, entropy, allowed_tokens=allowed_tokens)


class _Rows:
    """Rows of a batch with their cache, which at first holds the shared prefix.

    `tokens`: [M, P] int64, the prompts after the shared prefix, padded on the left.
    """

    def __init__(self, model: PreTrainedModel, prompts: Sequence[TokenIds], pad: int, shared: int) -> None:
        self._model = model
        self._cache = roomy_cache(model.config)
        self._attends = any(isinstance(layer, DynamicLayer) for layer in self._cache.layers)
        width = max(len(prompt) for prompt in prompts)
        tokens = np.full((len(prompts), width), pad, np.int64)
        pads = np.array([width - len(prompt) for prompt in prompts])
        for row, prompt in enumerate(prompts):
            tokens[row, shared + pads[row] :] = prompt[shared:]
        self.tokens = torch.from_numpy(tokens[:, shared:])
        self._length, self._shared, self._pads = 0, shared, pads
        self._accepted = set(inspect.signature(model.forward).parameters)
        if shared:
            self._pads = np.zeros(1, np.int64)
            self.read(torch.from_numpy(prompts[0][None, :shared].astype(np.int64)))
            self.select(np.zeros(len(prompts), np.int64))
            self._pads = pads

    def read(self, tokens: torch.Tensor) -> torch.Tensor:
        """Run the model on [N, R] new tokens; returns [N, V] logits after the last."""
        new = np.arange(self._length, self._length + tokens.shape[1])
        self._length += tokens.shape[1]
        behind = np.arange(self._length) - self._shared
        mask = (behind < 0) | (behind >= self._pads[:, None])
        position = np.maximum(new - self._pads[:, None], 0)
        device = self._model.device
        known: dict[str, Any] = {
            "position_ids": torch.from_numpy(position).to(device),
            "logits_to_keep": 1,
            "output_router_logits": False,
            **dict.fromkeys(CACHE_ARGUMENTS, self._cache),
        }
        # Without a mask attention is faster. A model without attention takes a mask of the new tokens only.
        plain = mask.all() or (len(new) == 1 and not self._attends)
        output: Any = self._model(
            input_ids=tokens.to(device),
            attention_mask=None if plain else torch.from_numpy(mask.astype(np.int64)).to(device),
            use_cache=True,
            **{name: value for name, value in known.items() if name in self._accepted},
        )
        # A model that made its own cache has seen the new tokens alone, so its logits are wrong.
        if not any(value is self._cache for value in output.values()):
            raise RolloutError(
                f"rollout.engine: {type(self._model).__name__} of transformers {transformers.__version__} does not use "
                "the given cache; take rollout.engine vllm, or a version that docs/compatibility.md lists"
            )
        return output.logits[:, -1]

    def select(self, rows: npt.NDArray[np.int64]) -> None:
        """Keep only these rows, in this order."""
        self._cache.reorder_cache(torch.from_numpy(rows).to(self._model.device))
        self._pads = self._pads[rows]


def grown(length: int) -> int:
    """Return the capacity in tokens to allocate for `length` tokens: more, since each growth copies the cache."""
    return length + length // 4 + 32


class Room:
    """Buffer [N, heads, R, width] in which a tensor [N, heads, T, width] grows in place, T <= R.

    Methods of transformers may replace the tensor, so the buffer is used only while the tensor is its latest view.
    """

    def __init__(self) -> None:
        self._room = self._view = torch.empty(0, 0)

    def append(self, held: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
        """Append the states [N, heads, T', width] of new tokens to `held` and return all."""
        if held is None or not held.numel():
            held = new[..., :0, :]
        start, length = held.shape[-2], held.shape[-2] + new.shape[-2]
        if held is not self._view or length > self._room.shape[-2]:
            self._room = new.new_empty(*new.shape[:-2], grown(length), new.shape[-1])
            self._room[..., :start, :] = held
        self._room[..., start:length, :] = new
        self._view = self._room[..., :length, :]
        return self._view

    def select(self, held: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor | None:
        """Return rows of `held` by index, with repetition or without; an empty `held` is returned as it is."""
        if held is None or not held.numel():
            return held
        if held is not self._view:
            return held.index_select(0, rows.to(held.device))
        self._room = self._room.index_select(0, rows.to(held.device))
        self._view = self._room[..., : held.shape[-2], :]
        return self._view


class RoomyLayer(DynamicLayer):
    """Cache layer with keys and values [N, heads, T, head_dim] that appends tokens in place.

    `DynamicLayer` copies the whole cache for every token.
    """

    keys: torch.Tensor | None
    values: torch.Tensor | None

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._rooms = Room(), Room()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the states of new tokens; returns views of the states of all tokens."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self._rooms
        appended = keys.append(self.keys, key_states), values.append(self.values, value_states)
        self.keys, self.values = appended
        return appended

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Keep rows of the cache, with their spare capacity."""
        keys, values = self._rooms
        self.keys, self.values = keys.select(self.keys, beam_idx), values.select(self.values, beam_idx)


def keeps_all(config: Any) -> bool:
    """True if all layers cache the keys and values of all tokens, so that padding between tokens can be masked."""
    return all(type(layer) is RoomyLayer for layer in roomy_cache(config).layers)


def roomy_cache(config: Any) -> DynamicCache:
    """Return an empty cache for a model; other kinds of layers (sliding windows, states) are those of transformers."""
    cache = DynamicCache(config=config)
    cache.layers = [RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
