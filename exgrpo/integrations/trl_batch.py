"""The batch that a generation in TRL is trained on, where it is not the one that was generated.

TRL's tensors hold the rows that were generated, and the stored answers that took the place of one. A method of replay
may leave some of these rows out, and may add stored answers. Then each process trains on rows of its own, and on a
share of what is added. Every process has the same number of rows, a multiple of the number of micro-batches: rows
without a token fill up.

It needs no TRL. K answers per question, N rows of this process, P prompt and C completion tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from exgrpo.train.common.step_batch import Floats, Ints, StepBatch
from exgrpo.train.config.replay import Setting
from exgrpo.train.replay.advantages import fill_advantages

Batch = dict[str, Tensor]
OF_TOKENS = ("completion_ids", "completion_mask", "old_per_token_logps", "sampling_per_token_logps")
"""[N, C] tensors of a batch; `importance_sampling_ratio` is [N, C] or [N, 1]."""


def with_stored(rows: Sequence[int], values: Sequence[Any], stored: Mapping[int, Any]) -> list[Any]:
    """The values of all rows of this process.

    Args:
        rows: those that were generated; the first one comes again at the end to fill up.
        values: of each of them.
        stored: those of the other rows, by row.
    """
    by_row = {**dict(zip(reversed(rows), reversed(values), strict=True)), **stored}
    return [by_row[i] for i in range(len(by_row))]


def places(batch: StepBatch, planned: int, samples: int, before: Ints | int = 0) -> Ints:
    """[A] the place of each of A answers: its row among those of all processes that TRL has; -1: it is not there.

    Args:
        batch: the answers.
        planned: TRL has K rows of each of so many groups, the first ones.
        samples: K.
        before: [A] how many rows of its group are before those in the batch.
    """
    position = np.arange(len(batch)) - np.searchsorted(batch.group, batch.group) + before
    return np.where((batch.group < planned) & (position < samples), samples * batch.group + position, -1)


def mixed_advantages(batch: StepBatch, place: Ints, given: Floats, setting: Setting) -> None:
    """Fill `advantage`: TRL's where a group is what TRL takes for one, and its replayed rows count in the mean.

    Args:
        batch: graded rows, and the groups that are trained on.
        place: of each row; see `places`.
        given: TRL's advantages, by place.
        setting: K, and the advantages of other groups.
    """
    fill_advantages(batch, setting)
    counted = np.bincount(batch.group, (place >= 0) & np.isnan(batch.stored_advantage), batch.groups)
    rows = np.bincount(batch.group, minlength=batch.groups)
    of_trl = ((rows == setting.samples) & (counted == setting.samples))[batch.group]
    batch.advantage[of_trl] = given[place[of_trl]]


def deal(rows: Ints, place: Ints, per_process: int, processes: int) -> list[Ints]:
    """The rows of each process: first those that it has already, in TRL's order, and then those that it adds.

    What is added goes to the process with the fewest rows, so that few rows are needed to fill up.

    Args:
        rows: the numbers of all that are trained on.
        place: of each row of the batch; see `places`.
        per_process: rows that TRL has on each process.
        processes: their number.
    """
    rows = rows[np.argsort(place[rows], kind="stable")]
    dealt = [rows[place[rows] // per_process == process].tolist() for process in range(processes)]
    for row in rows[place[rows] < 0].tolist():
        min(dealt, key=len).append(row)
    return [np.array(of_process, np.int64) for of_process in dealt]


def rebuild(output: Batch, mine: StepBatch, place: Ints, size: int, collate: Callable[[StepBatch], Batch]) -> Batch:
    """TRL's batch of this process with the rows that are trained on.

    Rows that fill up are copies of the first one without a completion token: they have no loss, no entropy and no part
    in a number of tokens.

    Args:
        output: TRL's batch, with `old_per_token_logps`.
        mine: the rows of this process, as `deal` orders them, with all that the loss needs.
        place: [len(mine)] rows of `output`; below 0: it does not have them.
        size: N, at least len(mine).
        collate: A answers as `prompt_ids`, `prompt_mask` [A, P], padded on the left, `completion_ids` and
            `completion_mask` [A, C], padded on the right.
    """
    kept = place[place >= 0]
    index = torch.from_numpy(np.pad(kept, (0, size - len(kept)))).to(output["completion_ids"].device)
    batch = {name: tensor[index] if tensor.dim() else tensor for name, tensor in output.items() if name != "tool_mask"}
    if len(kept) < len(mine):
        _put(batch, collate(mine.take(place < 0)), len(kept))
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


def _put_terms(batch: Batch, mine: StepBatch) -> None:
    """Advantages, the log-probs that ratios refer to, which rows are replayed, and which tokens the policy wrote."""
    mask, old = batch["completion_mask"], batch["old_per_token_logps"]
    length, replayed, advantage = (
        torch.from_numpy(np.pad(values, (0, len(mask) - len(mine)))).to(mask.device)
        for values in (mine.length, mine.replayed, mine.advantage.astype(np.float32))
    )
    inside = torch.arange(mask.shape[1], device=mask.device) < length[:, None]
    old[inside] = torch.from_numpy(mine.ratio_log_prob).to(old)
    if mine.has("factor"):
        advantage = advantage[:, None].repeat(1, mask.shape[1])
        advantage[inside] *= torch.from_numpy(mine.factor).to(advantage)
    batch["advantages"] = advantage
    batch["replayed"] = replayed
    batch["own"] = torch.ones_like(mask)
    batch["own"][inside] = torch.from_numpy(mine.own).to(mask)
    # TRL's entropies and clip ratios are means over the tokens that this mask leaves: the policy's fresh ones.
    batch["tool_mask"] = batch["own"] * ~replayed[:, None]
