"""The batch that a generation in TRL is trained on, where it is not the one that was generated.

TRL's tensors hold the rows that were generated, and the stored answers that took the place of one. A method of replay
may leave some of these rows out, and may add stored answers. Then each process trains on rows of its own, and on a
share of what is added. Every process has the same number of rows, a multiple of the number of micro-batches: rows
without a token fill up.

It needs no TRL. K answers per question, N rows of this process, P prompt and C completion tokens.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from exgrpo.train.experience.weighing import Weighed
from exgrpo.train.policy.batch import advantages
from exgrpo.train.records import Group, Trajectory

Batch = dict[str, Tensor]
OF_TOKENS = ("completion_ids", "completion_mask", "old_per_token_logps", "sampling_per_token_logps")
"""[N, C] tensors of a batch; `importance_sampling_ratio` is [N, C] or [N, 1]."""


class TrainedRow(NamedTuple):
    """An answer that is trained on.

    Attributes:
        trajectory: the answer.
        advantage: as it counts in this generation.
        term: of a replayed answer; None: it is fresh.
        place: its row among those of all processes that TRL has; None: TRL does not have it.
    """

    trajectory: Trajectory
    advantage: float
    term: Weighed | None = None
    place: int | None = None


def group_advantages(
    trained: Sequence[Group], groups: Sequence[Group], given: Sequence[float], samples: int, *, scale_by_std: bool
) -> list[list[float]]:
    """The advantages of the rows of each trained group.

    They are TRL's where the group is what TRL takes for one, and its replayed rows count in the mean.

    Args:
        trained: the groups that are trained on.
        groups: those that TRL has K rows of, in their order.
        given: [K len(groups)] TRL's advantages.
        samples: K.
        scale_by_std: other groups' are divided by the standard deviation of their rewards.
    """
    own = {
        id(group): list(given[samples * i : samples * (i + 1)])
        for i, group in enumerate(groups)
        if len(group.rows) == samples and not group.stored_advantage
    }
    return [own.get(id(group)) or advantages([group], scale_by_std=scale_by_std)[0] for group in trained]


def trained_rows(
    trained: Sequence[Group],
    groups: Sequence[Group],
    of_groups: Sequence[Sequence[float]],
    terms: Sequence[Weighed],
    samples: int,
) -> list[TrainedRow]:
    """The rows of all trained groups, in their order.

    Args:
        trained: the groups that are trained on.
        groups: those that TRL has K rows of: the first K of each.
        of_groups: the advantages of the rows of each trained group.
        terms: of all replayed rows of the trained groups, in their order.
        samples: K.
    """
    # An answer of this generation that was stored at once may also be replayed: these are two rows.
    place = {
        (id(row), j >= len(group.fresh)): samples * i + j
        for i, group in enumerate(groups)
        for j, row in enumerate(group.rows[:samples])
    }
    left = iter(terms)
    rows = []
    for group, of_group in zip(trained, of_groups, strict=True):
        for j, (row, advantage) in enumerate(zip(group.rows, of_group, strict=True)):
            replayed = j >= len(group.fresh)
            term = next(left) if replayed else None
            if term is not None and term.advantage is not None:
                advantage = term.advantage
            rows.append(TrainedRow(row, advantage, term, place.pop((id(row), replayed), None)))
    return rows


def deal(rows: Sequence[TrainedRow], per_process: int, processes: int) -> list[list[TrainedRow]]:
    """The rows of each process: first those that it has already, in TRL's order, and then those that it adds.

    What is added goes to the process with the fewest rows, so that few rows are needed to fill up.

    Args:
        rows: all that is trained on.
        per_process: rows that TRL has on each process.
        processes: their number.
    """
    dealt: list[list[TrainedRow]] = [[] for _ in range(processes)]
    for row in sorted(rows, key=lambda row: -1 if row.place is None else row.place):
        if row.place is not None:
            dealt[row.place // per_process].append(row)
    for row in rows:
        if row.place is None:
            min(dealt, key=len).append(row)
    return dealt


def rebuild(
    output: Batch, mine: Sequence[TrainedRow], size: int, first: int, collate: Callable[[Sequence[Trajectory]], Batch]
) -> Batch:
    """TRL's batch of this process with the rows that are trained on.

    Rows that fill up are copies of the first one without a completion token: they have no loss, no entropy and no part
    in a number of tokens.

    Args:
        output: TRL's batch, with `old_per_token_logps`.
        mine: the rows of this process, as `deal` gives them.
        size: N, at least len(mine).
        first: the place of the first row of `output`.
        collate: answers as `prompt_ids`, `prompt_mask` [A, P], padded on the left, `completion_ids` and
            `completion_mask` [A, C], padded on the right.
    """
    kept = [row.place - first for row in mine if row.place is not None]
    added = [row.trajectory for row in mine if row.place is None]
    index = torch.tensor([*kept, *([0] * (size - len(kept)))], device=output["completion_ids"].device)
    batch = {name: tensor[index] if tensor.dim() else tensor for name, tensor in output.items()}
    if added:
        _put(batch, collate(added), len(kept))
    batch["completion_mask"][len(mine) :] = 0
    _put_terms(batch, mine)
    return batch


def _put(batch: Batch, new: Batch, start: int) -> None:
    """Write rows over those of a batch from `start` on, which is widened where they are longer."""
    prompt = max(tensors["prompt_ids"].shape[1] for tensors in (batch, new))
    completion = max(tensors["completion_ids"].shape[1] for tensors in (batch, new))
    of_tokens = [*OF_TOKENS, *(["importance_sampling_ratio"] if _by_token(batch) else [])]
    end = start + len(new["prompt_ids"])
    for tensors in (batch, new):
        for name in ("prompt_ids", "prompt_mask"):
            tensors[name] = functional.pad(tensors[name], (prompt - tensors[name].shape[1], 0))
        for name in of_tokens:
            if name in tensors:
                tensors[name] = functional.pad(tensors[name], (0, completion - tensors[name].shape[1]))
    for name, tensor in new.items():
        batch[name][start:end] = tensor
    if "importance_sampling_ratio" in batch:  # the sampler of this generation did not write them
        batch["importance_sampling_ratio"][start:end] = 1


def _by_token(batch: Batch) -> bool:
    ratio = batch.get("importance_sampling_ratio")
    return ratio is not None and ratio.shape[1] > 1


def _put_terms(batch: Batch, mine: Sequence[TrainedRow]) -> None:
    """Advantages, the log-probs that ratios of replayed rows refer to, and which rows these are."""
    mask = batch["completion_mask"]
    replayed = torch.zeros(len(mask), dtype=torch.bool, device=mask.device)
    advantage = torch.zeros_like(batch["advantages"])
    advantage[: len(mine)] = torch.tensor([row.advantage for row in mine], dtype=advantage.dtype)
    if any(row.term is not None and row.term.factor is not None for row in mine):
        advantage = advantage[:, None].repeat(1, mask.shape[1])
    for i, row in enumerate(mine):
        length = len(row.trajectory.response)
        if row.term is not None:
            replayed[i] = True
            batch["old_per_token_logps"][i, :length] = torch.from_numpy(row.term.reference).to(mask.device)
            if row.term.factor is not None:
                advantage[i, :length] *= torch.from_numpy(row.term.factor).to(mask.device)
        elif row.place is None:
            batch["old_per_token_logps"][i, :length] = torch.from_numpy(row.trajectory.log_prob).to(mask.device)
    batch["advantages"] = advantage
    batch["replayed"] = replayed
    # TRL's entropies and clip ratios are means over the tokens that this mask leaves: the fresh ones.
    batch["tool_mask"] = torch.ones_like(mask) * ~replayed[:, None]
