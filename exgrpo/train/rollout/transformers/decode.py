"""Answers token by token: a batch of rows, of which those that have ended are left out.

Keys and values are in a cache that grows in place, and whose rows can be chosen. N answers of the batch, M prompts, P
tokens of the longest prompt, R tokens of the longest answer, T tokens so far.
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
from exgrpo.train.common.records import KeptSets, Rollout, TokenIds
from exgrpo.train.rollout.engine import Sampling
from exgrpo.train.rollout.transformers.draws import Drawn, Noise, draw

KEPT = 0.8
"""Rows that have ended stay until fewer than this fraction is left: to leave them out copies the cache."""
CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")
"""By which models take their cache: all since transformers 5.24, those with attention and those without before."""


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
) -> Iterator[tuple[int, Rollout]]:
    """Sample answers and give each with its number as soon as it is finished.

    The prompts are read once each, whatever number of answers they have, and what they begin with once.

    Args:
        model: on the device where it computes.
        prompts: M prompts.
        prompt_of: [N], which prompt each answer belongs to.
        sampling: [N], how; they differ in lengths and stop strings alone.
        noise: of N answers.
        eos: token ids that end an answer.
        pad: fills up, on the left, what prompts have for themselves.
        shared: tokens that all prompts begin with, which are read once; 0 for a model that does not keep all.

    Raises:
        RolloutError: the model does not use the cache that it is given.
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
            # A token in which a stop string ends; what is to be cut is found later.
            ended[place] = sampling[answers[place]].stop.reached(written.response[answers[place], : position + 1])
        for place in np.flatnonzero(ended):
            answer = int(answers[place])
            yield answer, written.rollout(answer, position + 1, sampling[answer], finished=bool(last[place]))
        open_ &= ~ended
        if not open_.any():
            break
        if open_.mean() < KEPT:
            left = np.flatnonzero(open_)
            answers, open_, tokens = answers[left], open_[left], tokens[left]
            state.select(left)
        logits = state.read(torch.from_numpy(tokens[:, None].astype(np.int64)))


class _Written:
    """What has been written of N answers of at most R tokens; `response`: [N, R] int32 token ids."""

    def __init__(self, answers: int, longest: int) -> None:
        shape = (answers, longest)
        self.response = np.empty(shape, np.int32)
        self._log_prob, self._entropy = np.empty(shape, np.float32), np.empty(shape, np.float32)
        self._words: list[list[TokenIds]] = [[] for _ in range(answers)]

    def add(self, answers: npt.NDArray[np.int64], position: int, drawn: Drawn) -> npt.NDArray[np.int64]:
        """Take in the tokens that were drawn for some answers at a position, and give them."""
        tokens = drawn.token.cpu().numpy()
        self.response[answers, position] = tokens
        self._log_prob[answers, position] = drawn.log_prob.cpu().numpy()
        self._entropy[answers, position] = drawn.entropy.cpu().numpy()
        if drawn.kept is not None:
            for answer, of_token in zip(answers, drawn.kept.lists(), strict=True):
                self._words[answer].append(of_token)
        return tokens

    def rollout(self, answer: int, length: int, sampling: Sampling, *, finished: bool) -> Rollout:
        """An answer of so many tokens."""
        response = self.response[answer, :length].copy()
        kept = KeptSets.of(self._words[answer]) if sampling.kept else None
        if not sampling.log_prob:
            return Rollout(response, finished, kept=kept)
        log_prob, entropy = self._log_prob[answer, :length].copy(), self._entropy[answer, :length].copy()
        return Rollout(response, finished, log_prob, entropy, kept=kept)


class _Rows:
    """What the model has read of each row, at first of what all prompts begin with.

    `tokens`: [M, P] int64, the prompts behind that, with pads on their left.
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
        """[N, V] logits behind the last of [N, R] new tokens."""
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
        # Without a mask nothing need be looked for. A model without attention takes that of new tokens only.
        plain = mask.all() or (len(new) == 1 and not self._attends)
        output: Any = self._model(
            input_ids=tokens.to(device),
            attention_mask=None if plain else torch.from_numpy(mask.astype(np.int64)).to(device),
            use_cache=True,
            **{name: value for name, value in known.items() if name in self._accepted},
        )
        # A model that has made a cache of its own has read the new tokens alone.
        if not any(value is self._cache for value in output.values()):
            raise RolloutError(
                f"rollout.engine: {type(self._model).__name__} of transformers {transformers.__version__} does not use "
                "the cache that it is given; take rollout.engine vllm, or a version that docs/compatibility.md lists"
            )
        return output.logits[:, -1]

    def select(self, rows: npt.NDArray[np.int64]) -> None:
        """Go on with some of the rows, in this order."""
        self._cache.reorder_cache(torch.from_numpy(rows).to(self._model.device))
        self._pads = self._pads[rows]


def grown(length: int) -> int:
    """Tokens that a layer gets room for when it has to hold so many: growing often would copy often."""
    return length + length // 4 + 32


class Room:
    """Memory [N, heads, R, width] in which a tensor [N, heads, T, width] grows in place, T <= R.

    The tensor is in the hands of transformers, whose methods may put another one in its place. The room counts only
    while the tensor is the view that was made last.
    """

    def __init__(self) -> None:
        self._room = self._view = torch.empty(0, 0)

    def append(self, held: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
        """Return what is held with the states [N, heads, T', width] of new tokens behind it."""
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
        """Return rows of what is held, some of them several times or not at all; as it is while nothing is held."""
        if held is None or not held.numel():
            return held
        if held is not self._view:
            return held.index_select(0, rows.to(held.device))
        self._room = self._room.index_select(0, rows.to(held.device))
        self._view = self._room[..., : held.shape[-2], :]
        return self._view


class RoomyLayer(DynamicLayer):
    """Keys and values [N, heads, T, head_dim] of a layer; a token is written into room that is there already.

    The layer of transformers copies all that it holds for every token.
    """

    keys: torch.Tensor | None
    values: torch.Tensor | None

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._rooms = Room(), Room()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the states of new tokens; returns those of all tokens, which are views."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self._rooms
        appended = keys.append(self.keys, key_states), values.append(self.values, value_states)
        self.keys, self.values = appended
        return appended

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Take rows of the cache, which keep their room."""
        keys, values = self._rooms
        self.keys, self.values = keys.select(self.keys, beam_idx), values.select(self.values, beam_idx)


def keeps_all(config: Any) -> bool:
    """Whether a model keeps the keys and values of all tokens in all layers, so that pads may stand between tokens."""
    return all(type(layer) is RoomyLayer for layer in roomy_cache(config).layers)


def roomy_cache(config: Any) -> DynamicCache:
    """An empty cache for a model; layers of other kinds (sliding windows, states) stay as transformers makes them."""
    cache = DynamicCache(config=config)
    cache.layers = [RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
