"""Layouts of rows in the tensors of forward passes, and their distribution over ranks and passes.

Padded: one row of the tensor for each row of the batch, padded on the right. Causal attention then needs no mask: no
real token can see a pad. Packed: one row without padding, with each prompt once for all its answers, and a common
prefix of all prompts once.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from exgrpo.train.common.records import TokenIds, shared_prefix
from exgrpo.train.common.step_batch import Ints, StepBatch
from exgrpo.train.policy.batch import IGNORED, MicroBatch, TokenBatch
from exgrpo.train.policy.segments import Block, moved, segments

LONG = 2048
"""Response tokens from which on a prompt is not shared: compared with such an answer it costs little, and a whole row
needs no mask of its length squared."""
Schedule = list[list[list[int]]]
"""For each rank its micro-batches, each a list of numbers of rows. All ranks have the same number of them (empty
ones at the end), because ranks that disagree on the number of passes wait for each other for ever."""


class Layout(ABC):
    """Base of the layouts. The rows of a pass are a batch of their own, of T response tokens."""

    @abstractmethod
    def plan(self, batch: StepBatch, budget: int, ranks: int) -> Schedule:
        """Spread rows over ranks and passes of at most `budget` tokens."""

    @abstractmethod
    def tokens(self, batch: StepBatch, device: torch.device) -> TokenBatch:
        """Return the tensors of a pass; without rows, one row of two tokens without a target, which adds nothing."""

    @abstractmethod
    def places(self, batch: StepBatch) -> Ints:
        """Return [T] the places of the response tokens in flattened arrays of the target's shape."""

    def rows(self, batch: StepBatch, device: torch.device) -> MicroBatch:
        """Return the tensors of a pass with a loss; without rows as `tokens`."""
        of_pass, places = self.tokens(batch, device), self.places(batch)

        def by_target(values: npt.NDArray[Any]) -> torch.Tensor:
            spread = np.zeros(of_pass.target.numel(), values.dtype)
            spread[places] = values
            return _moved(spread.reshape(of_pass.target.shape), device)

        advantage, weight = batch.by_token(batch.advantage.astype(np.float32)), None
        if batch.has("weight"):
            weight = batch.by_token(batch.weight.astype(np.float32)) * (batch.factor if batch.has("factor") else 1)
        elif batch.has("factor"):
            advantage = advantage * batch.factor
        replayed = batch.by_token(batch.replayed)
        reference = None
        if batch.has("reference_log_prob") and not replayed.all():
            reference = by_target(np.where(replayed, np.float32(0), batch.reference_log_prob))
        return MicroBatch(
            of_pass.tokens,
            of_pass.target,
            of_pass.targets,
            by_target(batch.ratio_log_prob),
            by_target(advantage),
            by_target(replayed),
            _moved(batch.num_tokens, device),
            int(np.count_nonzero(advantage[batch.response_mask])),
            segments=of_pass.segments,
            allowed_tokens=of_pass.allowed_tokens,
            weight=None if weight is None else by_target(weight),
            reference_log_prob=reference,
        )


class Padded(Layout):
    """Rows of about the same length, padded on the right."""

    def plan(self, batch: StepBatch, budget: int, ranks: int) -> Schedule:
        # rows * longest <= budget
        return schedule(_read(batch).tolist(), budget, ranks)

    def tokens(self, batch: StepBatch, device: torch.device) -> TokenBatch:
        shape = (max(len(batch), 1), _longest(batch))
        tokens, target = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
        for row, read in enumerate(_read(batch)):
            tokens[row, :read] = np.concatenate([batch.prompt[batch.group[row]], batch.token[batch.at(row)][:-1]])
        target.ravel()[self.places(batch)] = _target(batch)
        allowed_tokens = _kept(batch, self.places(batch), target.size, device)
        return TokenBatch(
            _moved(tokens, device),
            _moved(target, device),
            int(batch.response_mask.sum()),
            allowed_tokens=allowed_tokens,
        )

    def places(self, batch: StepBatch) -> Ints:
        # The last token of a prompt predicts the first one of its response.
        first = np.arange(len(batch)) * _longest(batch) + _read(batch) - batch.length
        return np.arange(len(batch.token)) + batch.by_token(first - batch.start[:-1])


class Packed(Layout):
    """No padding; each prompt and their common prefix once per pass. `segments` keeps the rows apart."""

    def plan(self, batch: StepBatch, budget: int, ranks: int) -> Schedule:
        # The answers to a prompt stay together as far as the budget allows, which counts prompts whole.
        parts, costs = _parts(batch, budget)
        return [
            [[row for number in of_pass for row in parts[number]] for of_pass in of_rank]
            for of_rank in schedule(costs, budget, ranks, padded=False)
        ]

    def tokens(self, batch: StepBatch, device: torch.device) -> TokenBatch:
        # Of neighbours with the same prompt, only the first one contains it.
        if not len(batch):
            return Padded().tokens(batch, device)
        tokens: list[TokenIds] = []
        blocks: list[Block] = []
        source: list[Ints] = []

        def add(ids: TokenIds, before: Block | None = None) -> Block:
            block = Block(blocks[-1].end if blocks else 0, len(ids), before)
            tokens.append(ids)
            blocks.append(block)
            return block

        short = np.unique(batch.group[batch.length < LONG])
        prompts = {batch.question[group]: batch.prompt[group] for group in short}
        shared = shared_prefix(list(prompts.values()))
        begin = add(batch.prompt[short[0]][:shared]) if shared else None
        question, asked = -1, None
        for row, group in enumerate(batch.group):
            prompt, response = batch.prompt[group], batch.token[batch.at(row)]
            if len(response) >= LONG:
                whole = add(np.concatenate([prompt, response[:-1]]))
                source.append(whole.start + np.arange(len(prompt) - 1, whole.length))
                continue
            if asked is None or question != batch.question[group]:
                question, asked = batch.question[group], add(prompt[shared:], begin)
            # The prompt's last token predicts the first one of every answer.
            source.append(np.array([asked.end - 1]))
            if len(response) > 1:
                own = add(response[:-1], asked)
                source.append(np.arange(own.start, own.end))
        row_of_all = np.concatenate(tokens).astype(np.int64)[None]
        parts = segments(blocks, np.concatenate(source), device)
        target = _moved(_target(batch), device)
        allowed_tokens = _kept(batch, self.places(batch), len(target), device)
        return TokenBatch(
            _moved(row_of_all, device),
            target,
            int(batch.response_mask.sum()),
            segments=parts,
            allowed_tokens=allowed_tokens,
        )

    def places(self, batch: StepBatch) -> Ints:
        return np.arange(len(batch.token))


def schedule(lengths: Sequence[int], budget: int, ranks: int, *, padded: bool = True) -> Schedule:
    """Spread rows over ranks and into micro-batches.

    Longest first, each row goes to the rank with the fewest tokens so far; each rank then groups its rows, which
    are sorted by length, so that rows * longest <= budget, or without padding the sum of lengths.
    """
    load = [0] * ranks
    share: list[list[int]] = [[] for _ in range(ranks)]
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = load.index(min(load))
        load[rank] += lengths[i]
        share[rank].append(i)
    batches = [_group(indices, lengths, budget, padded=padded) for indices in share]
    most = max(len(of_rank) for of_rank in batches)
    return [of_rank + [[] for _ in range(most - len(of_rank))] for of_rank in batches]


def _group(indices: Sequence[int], lengths: Sequence[int], budget: int, *, padded: bool) -> list[list[int]]:
    groups: list[list[int]] = []
    for i in indices:
        tokens = 0
        if groups:
            together = [*groups[-1], i]
            tokens = lengths[together[0]] * len(together) if padded else sum(lengths[j] for j in together)
        if 0 < tokens <= budget:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _parts(batch: StepBatch, budget: int) -> tuple[list[list[int]], list[int]]:
    """Group rows with the same prompt in parts that fit into the budget; return them and the tokens read of each."""
    parts: list[list[int]] = []
    costs: list[int] = []
    newest: dict[int, int] = {}
    columns = (batch.question[batch.group].tolist(), batch.length.tolist(), _read(batch).tolist())
    for row, (question, length, read) in enumerate(zip(*columns, strict=True)):
        number = None if length >= LONG else newest.get(question)
        if number is not None and costs[number] + length - 1 <= budget:
            parts[number].append(row)
            costs[number] += length - 1
        else:
            if length < LONG:
                newest[question] = len(parts)
            parts.append([row])
            costs.append(read)
    return parts, costs


def _read(batch: StepBatch) -> Ints:
    """[N] tokens read of each row: the last response token is predicted, never read."""
    return np.array([len(batch.prompt[group]) for group in batch.group], np.int64) + batch.length - 1


def _longest(batch: StepBatch) -> int:
    return int(_read(batch).max(initial=0)) or 2


def _target(batch: StepBatch) -> Ints:
    return np.where(batch.response_mask, batch.token, IGNORED).astype(np.int64)


def _kept(
    batch: StepBatch, places: Ints, targets: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Sets of tokens that the response tokens at `places` were drawn from; None: the whole vocabulary."""
    if not batch.has("allowed_tokens") or not len(batch.allowed_tokens.ids):
        return None
    ends = np.zeros(targets + 1, np.int64)
    ends[1 + places] = batch.allowed_tokens.sizes
    return _moved(batch.allowed_tokens.ids, device), _moved(np.cumsum(ends), device)


def _moved(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    return moved(device, array)[0]
