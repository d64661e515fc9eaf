"""Training batches of TRL that differ from the generated ones.

TRL's tensors hold the generated rows, and the stored answers that replaced one. A replay method may drop some of these
rows and append stored answers. Each process then trains on its remaining rows and a share of the appended ones. All
processes have the same number of rows, a multiple of the number of micro-batches: rows without tokens are padding.

This module needs no TRL. K answers per question, N rows per process, P prompt and C completion tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from exgrpo.train.common.step_batch import Floats, Ints, StepBatch
from exgrpo.train.config.objective import MethodOptions
from exgrpo.train.replay.groups import fill_advantages

Batch = dict[str, Tensor]
TOKEN_TENSORS = ("completion_ids", "completion_mask", "old_per_token_logps", "sampling_per_token_logps")
"""[N, C] tensors of a batch; `importance_sampling_ratio` is [N, C] or [N, 1]."""


def with_stored(rows: Sequence[int], values: Sequence[Any], stored: Mapping[int, Any]) -> list[Any]:
    """Merge `values` of the generated `rows` with stored rows, in row order; copies of the first row are padding."""
    by_row = {**dict(zip(reversed(rows), reversed(values), strict=True)), **stored}
    return [by_row[i] for i in range(len(by_row))]


def places(batch: StepBatch, planned: int, samples: int, before: Ints | int = 0) -> Ints:
    """[A] TRL's row of each of A answers, among the rows of all processes; -1: TRL has none.

    TRL has K = `samples` rows for each of the first `planned` groups. `before` [A]: rows of the group before the
    answer's.
    """
    position = np.arange(len(batch)) - np.searchsorted(batch.group, batch.group) + before
    return np.where((batch.group < planned) & (position < samples), samples * batch.group + position, -1)


def mixed_advantages(batch: StepBatch, place: Ints, given: Floats, options: MethodOptions) -> None:
    """Fill `advantage`: TRL's where a group is what TRL takes for one, and its replayed rows count in the mean.

    Args:
        batch: graded rows, and the groups that are trained on.
        place: of each row; see `places`.
        given: TRL's advantages, by place.
        options: K, and the advantages of other groups.
    """
    fill_advantages(batch, options.objective)
    counted = np.bincount(batch.group, (place >= 0) & np.isnan(batch.stored_advantage), batch.groups)
    rows = np.bincount(batch.group, minlength=batch.groups)
    of_trl = ((rows == options.samples) & (counted == options.samples))[batch.group]
    batch.advantage[of_trl] = given[place[of_trl]]


def deal(rows: Ints, place: Ints, per_process: int, processes: int) -> list[Ints]:
    """Return the `rows` of each process: those that TRL has there, in its order, then appended ones.

    Each appended row goes to the process with the fewest rows, to keep padding low. `place`: TRL's rows, see `places`.
    """
    rows = rows[np.argsort(place[rows], kind="stable")]
    dealt = [rows[place[rows] // per_process == process].tolist() for process in range(processes)]
    for row in rows[place[rows] < 0].tolist():
        min(dealt, key=len).append(row)
    return [np.array(of_process, np.int64) for of_process in dealt]


def rebuild(output: Batch, mine: StepBatch, place: Ints, size: int, collate: Callable[[StepBatch], Batch]) -> Batch:
    """Return TRL's batch `output` of this process with N = `size` rows: `mine`, in the order of `deal`, then padding.

    `place` [len(mine)] gives rows of `output`, below 0 for rows not there. `collate` pads A answers to `prompt_ids`,
    `prompt_mask` [A, P], on the left, and `completion_ids`, `completion_mask` [A, C], on the right. Padding rows copy
    the first row without completion tokens: they add nothing to loss, entropy or counts.
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
    """Overwrite the rows from `start` on, widening the batch for longer ones."""
    prompt = max(tensors["prompt_ids"].shape[1] for tensors in (batch, new))
    completion = max(tensors["completion_ids"].shape[1] for tensors in (batch, new))
    ratio = batch.get("importance_sampling_ratio")
    by_token = ratio is not None and ratio.shape[1] > 1
    of_tokens = [*TOKEN_TENSORS, *(["importance_sampling_ratio"] if by_token else [])]
    end = start + len(new["prompt_ids"])
    for tensors in (batch, new):
        for name in ("prompt_ids", "prompt_mask"):
            tensors[name] = functional.pad(tensors[name], (prompt - tensors[name].shape[1], 0))
        for name in of_tokens:
            if name in tensors:
                tensors[name] = functional.pad(tensors[name], (0, completion - tensors[name].shape[1]))
    for name, tensor in new.items():
        batch[name][start:end] = tensor
    if ratio is not None:  # stored answers are not from this generation's sampler
        batch["importance_sampling_ratio"][start:end] = 1


def _put_terms(batch: Batch, mine: StepBatch) -> None:
    """Set advantages, reference log-probs of the ratios, and masks of replayed rows and of the policy's own tokens."""
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
    batch["response_mask"] = torch.ones_like(mask)
    batch["response_mask"][inside] = torch.from_numpy(mine.response_mask).to(mask)
    # TRL averages entropies and clip ratios over this mask: the policy's fresh tokens.
    batch["tool_mask"] = batch["response_mask"] * ~replayed[:, None]
