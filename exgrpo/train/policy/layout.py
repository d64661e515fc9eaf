"""How sequences become the tensors of forward passes, and how they are spread over ranks and passes.

Padded: each sequence is a row, filled up on the right. Causal attention then needs no mask: no real token can see a
pad. Packed: all in one row without padding, and a prompt once for all its answers.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from exgrpo.train.policy.batch import IGNORED, Floats, MicroBatch, TokenBatch, TokenSequence, TrainingRow
from exgrpo.train.policy.segments import Block, segments
from exgrpo.train.records import TokenIds

LONG = 2048
"""Response tokens from which on a prompt is not shared: beside such an answer it costs little, and a whole row needs
no mask of its length squared."""
Plan = list[list[list[int]]]
"""For each rank its micro-batches, each a list of numbers of sequences. All ranks have the same number of them (empty
ones at the end), because ranks that disagree on the number of passes wait for each other for ever."""


class Layout(Protocol):
    """One way to do it."""

    def plan(self, sequences: Sequence[TokenSequence], budget: int, ranks: int) -> Plan:
        """Spread sequences over ranks and passes of at most `budget` tokens."""

    def tokens(self, sequences: Sequence[TokenSequence], device: torch.device) -> TokenBatch:
        """The tensors of a pass. No sequences: one of two tokens without a target, which weighs nothing."""

    def rows(self, rows: Sequence[TrainingRow], device: torch.device) -> MicroBatch:
        """The tensors of a pass with a loss; no rows as with `tokens`."""

    def places(self, sequences: Sequence[TokenSequence]) -> list[Any]:
        """For each sequence the index of the results for its response, in arrays shaped like the target."""


class Padded:
    """Rows of about the same length, padded on the right."""

    def plan(self, sequences: Sequence[TokenSequence], budget: int, ranks: int) -> Plan:
        """See `Layout`; rows * longest <= budget."""
        return schedule([sequence.length for sequence in sequences], budget, ranks)

    def tokens(self, sequences: Sequence[TokenSequence], device: torch.device) -> TokenBatch:
        """See `Layout`."""
        return pad_tokens(sequences, device)

    def rows(self, rows: Sequence[TrainingRow], device: torch.device) -> MicroBatch:
        """See `Layout`."""
        return pad_rows(rows, device)

    def places(self, sequences: Sequence[TokenSequence]) -> list[Any]:
        """See `Layout`."""
        return [(line, sequence.predicting) for line, sequence in enumerate(sequences)]


class Packed:
    """No padding, and each prompt once per pass; `segments` keeps the sequences apart."""

    def plan(self, sequences: Sequence[TokenSequence], budget: int, ranks: int) -> Plan:
        """See `Layout`; the answers to a prompt stay together as far as the budget goes."""
        units = _units(sequences, budget)
        costs = [_cost([sequences[i] for i in unit]) for unit in units]
        return [
            [[i for number in batch for i in units[number]] for batch in of_rank]
            for of_rank in schedule(costs, budget, ranks, padded=False)
        ]

    def tokens(self, sequences: Sequence[TokenSequence], device: torch.device) -> TokenBatch:
        """See `Layout`."""
        return pack_tokens(sequences, device)

    def rows(self, rows: Sequence[TrainingRow], device: torch.device) -> MicroBatch:
        """See `Layout`."""
        return pack_rows(rows, device)

    def places(self, sequences: Sequence[TokenSequence]) -> list[Any]:
        """See `Layout`."""
        ends = np.cumsum([len(sequence.response) for sequence in sequences]).tolist()
        return [slice(end - len(sequence.response), end) for end, sequence in zip(ends, sequences, strict=True)]


def schedule(lengths: Sequence[int], budget: int, ranks: int, *, padded: bool = True) -> Plan:
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


def pad_tokens(sequences: Sequence[TokenSequence], device: torch.device) -> TokenBatch:
    """Pad sequences to a batch. No sequences: one of two tokens without a target, which weighs nothing."""
    length = max((sequence.length for sequence in sequences), default=2)
    shape = (max(len(sequences), 1), length)
    tokens, target = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
    for i, sequence in enumerate(sequences):
        tokens[i, : sequence.length] = np.concatenate([sequence.prompt, sequence.response[:-1]])
        target[i, sequence.predicting] = sequence.target
    return TokenBatch(*_moved(device, tokens, target))


def pad_rows(rows: Sequence[TrainingRow], device: torch.device) -> MicroBatch:
    """Pad rows to a micro-batch; no rows are padded as by `pad_tokens`."""
    batch = pad_tokens(rows, device)
    shape = tuple(batch.tokens.shape)

    def padded(of_rows: Sequence[Floats]) -> Floats:
        values = np.zeros(shape, np.float32)
        for i, (row, of_row) in enumerate(zip(rows, of_rows, strict=True)):
            values[i, row.predicting] = of_row
        return values

    advantage = np.array([row.advantage for row in rows] or [0.0], np.float32)
    if any(row.weight is not None for row in rows):
        advantage = padded([row.advantage * _weight(row) for row in rows])
    replayed = np.array([row.replayed for row in rows] or [False])
    terms = _moved(device, padded([row.old_log_prob for row in rows]), advantage, replayed, _lengths(rows))
    return MicroBatch(batch.tokens, batch.target, *terms, reference_log_prob=_reference(rows, padded, device))


def _weight(row: TrainingRow) -> Floats:
    return np.ones(len(row.response), np.float32) if row.weight is None else row.weight


def _lengths(rows: Sequence[TrainingRow]) -> npt.NDArray[np.int64]:
    return np.array([row.tokens for row in rows], np.int64)


def _reference(
    rows: Sequence[TrainingRow], spread: Callable[[Sequence[Floats]], Floats], device: torch.device
) -> torch.Tensor | None:
    """The reference's log-probs by target, 0 in rows without any; None where no row has them."""
    of_rows = [row.reference_log_prob for row in rows]
    if all(of_row is None for of_row in of_rows):
        return None
    known = [
        np.zeros(len(row.response), np.float32) if of_row is None else of_row
        for row, of_row in zip(rows, of_rows, strict=True)
    ]
    return _moved(device, spread(known))[0]


def _units(sequences: Sequence[TokenSequence], budget: int) -> list[list[int]]:
    """Sequences with the same prompt together, in parts that fit into the budget."""
    units: list[list[int]] = []
    newest: dict[bytes, int] = {}
    for i, sequence in enumerate(sequences):
        number = None if _long(sequence) else newest.get(sequence.prompt.tobytes())
        if number is not None and _cost([*(sequences[j] for j in units[number]), sequence]) <= budget:
            units[number].append(i)
        else:
            newest[sequence.prompt.tobytes()] = len(units)
            units.append([i])
    return units


def _long(sequence: TokenSequence) -> bool:
    return len(sequence.response) >= LONG


def _cost(sequences: Sequence[TokenSequence]) -> int:
    """Tokens that the model reads of answers to one prompt."""
    return len(sequences[0].prompt) + sum(len(sequence.response) - 1 for sequence in sequences)


def pack_tokens(sequences: Sequence[TokenSequence], device: torch.device) -> TokenBatch:
    """Sequences in one row of tokens; of neighbours with the same prompt, only the first one has it."""
    if not sequences:
        return pad_tokens(sequences, device)
    tokens: list[TokenIds] = []
    blocks: list[Block] = []
    source: list[npt.NDArray[np.int64]] = []
    length, prompt, at = 0, None, 0
    for sequence in sequences:
        if _long(sequence):
            tokens.append(np.concatenate([sequence.prompt, sequence.response[:-1]]))
            blocks.append(Block(length, sequence.length, 0, 0))
            source.append(length + np.arange(sequence.length)[sequence.predicting])
            length += sequence.length
            continue
        if prompt is None or not np.array_equal(prompt, sequence.prompt):
            prompt, at = sequence.prompt, length
            tokens.append(prompt)
            blocks.append(Block(at, len(prompt), 0, 0))
            length += len(prompt)
        own = len(sequence.response) - 1
        # The prompt's last token predicts the first one of every answer.
        source.append(np.concatenate([[at + len(prompt) - 1], np.arange(length, length + own)]))
        if own:
            tokens.append(sequence.response[:-1])
            blocks.append(Block(length, own, at, len(prompt)))
            length += own
    target = np.concatenate([sequence.target for sequence in sequences])
    row = np.concatenate(tokens).astype(np.int64)[None]
    parts = segments(blocks, np.concatenate(source), device)
    return TokenBatch(*_moved(device, row, target), segments=parts)


def pack_rows(rows: Sequence[TrainingRow], device: torch.device) -> MicroBatch:
    """Rows in one row of tokens, with what their loss takes by target."""
    if not rows:
        return pad_rows(rows, device)
    batch = pack_tokens(rows, device)
    whole = [len(row.response) for row in rows]
    advantage = np.repeat(np.array([row.advantage for row in rows], np.float32), whole)
    if any(row.weight is not None for row in rows):
        advantage *= np.concatenate([_weight(row) for row in rows])
    replayed = np.repeat([row.replayed for row in rows], whole)
    terms = _moved(device, np.concatenate([row.old_log_prob for row in rows]), advantage, replayed, _lengths(rows))
    reference = _reference(rows, np.concatenate, device)
    return MicroBatch(batch.tokens, batch.target, *terms, segments=batch.segments, reference_log_prob=reference)


def _moved(device: torch.device, *arrays: npt.NDArray[Any]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.from_numpy(array).to(device, non_blocking=True) for array in arrays)
