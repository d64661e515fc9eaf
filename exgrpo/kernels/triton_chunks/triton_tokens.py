"""The functions of `chunks.softmax` and `objective`, as one kernel each; nothing waits for the device."""

import math

import torch
import triton
from torch import Tensor

from exgrpo.kernels import objective
from exgrpo.kernels.chunks.softmax import PolicyRows, RowTerms, Statistics, Sums
from exgrpo.kernels.inputs import LogProb, PolicyTokens, ScoredTokens, Surrogate
from exgrpo.kernels.objective import TokenObjective
from exgrpo.kernels.triton_chunks.token_kernels import (
    centre_groups_kernel,
    finish_kernel,
    policy_objective_kernel,
    policy_rows_kernel,
    scale_kernel,
    segment_mean_kernel,
)

BLOCK = 128
"""Tokens of a program: few enough that a chunk's are spread over a GPU."""
SEGMENT_BLOCK = 1024
"""Tokens of a segment that are read at once."""
GROUP_TILE = (8, 256)
"""Responses of a program, and those they are compared with at once."""
SCALE_BLOCK, MOST_PROGRAMS = 4096, 2048
"""Entries that are scaled at once, and programs that do it: several for each multiprocessor."""
MOST_PAIRED = 65_536
"""Responses of which all pairs are compared."""


def finished(sums: Sums) -> tuple[Statistics, LogProb]:
    anchor, gap, rest, moment = sums
    results = gap.new_empty(3, gap.numel())
    with torch.cuda.device_of(gap):
        finish_kernel[_grid(gap)](
            gap.contiguous(), rest.contiguous(), moment.contiguous(), results, gap.numel(), BLOCK=BLOCK
        )
    mean, log_prob, entropy = results
    return Statistics(anchor, gap, rest, mean), LogProb(log_prob, entropy)


def policy_rows(
    sums: Sums,
    tokens: PolicyTokens,
    terms: RowTerms,
    temperature: Tensor | None,
    out: Tensor,
    matrix: Tensor | None = None,
    target: Tensor | None = None,
) -> PolicyRows:
    """Statistics, objective and row factors of each row: `chunks.softmax.policy_rows`.

    The sums are fp32 or fp64; the numbers of the tokens and the temperature may have any floating dtype. A ``matrix``
    [rows, V] that is F but for the ``target`` [rows] of each row, -1: none, gets F there.
    """
    gap, surrogate = sums.gap, terms.surrogate
    with torch.cuda.device_of(gap):
        policy_rows_kernel[_grid(gap)](
            gap.contiguous(),
            sums.rest.contiguous(),
            sums.moment.contiguous(),
            tokens.old_log_prob.contiguous(),
            tokens.advantage.contiguous(),
            _contiguous(tokens.replayed),
            _contiguous(temperature),
            terms.normalizer,
            out,
            matrix,
            target,
            gap.numel(),
            out.stride(0),
            0 if matrix is None else matrix.stride(0),
            *ratio_numbers(surrogate),
            terms.entropy_coef,
            HAS_CLIP=surrogate.clip is not None,
            HAS_BETA=surrogate.beta is not None,
            PLAIN=terms.plain,
            BLOCK=BLOCK,
        )
    return PolicyRows(*out)


def token_objective(scored: ScoredTokens, surrogate: Surrogate) -> TokenObjective:
    log_prob, entropy, tokens, mask = scored
    grid = _grid(log_prob)
    results = log_prob.new_empty(4, log_prob.numel())
    coefficients = torch.empty_like(log_prob, memory_format=torch.contiguous_format)
    partials = log_prob.new_empty(3, *grid, dtype=torch.float64)
    with torch.cuda.device_of(log_prob):
        policy_objective_kernel[grid](
            log_prob.contiguous(),
            _contiguous(entropy),
            tokens.old_log_prob.contiguous(),
            tokens.advantage.contiguous(),
            _contiguous(tokens.replayed),
            _contiguous(mask),
            results,
            coefficients,
            partials,
            log_prob.numel(),
            *ratio_numbers(surrogate),
            HAS_CLIP=surrogate.clip is not None,
            HAS_BETA=surrogate.beta is not None,
            BLOCK=BLOCK,
        )
    return TokenObjective(partials.sum(1), results, coefficients)


def centre_groups(reward: Tensor, group: Tensor, scale_by_std: bool) -> Tensor:
    """Reward [N] minus the mean of its group (int [N]), in float64, divided by the sample deviation if asked for.

    All pairs are compared: no sort, and no wait for the number of groups. That is a dozen instructions a pair and pass,
    by count some 50 microseconds of an H200 at 10,000 responses, as much as sorting, a dozen launches and a wait take.
    Beyond MOST_PAIRED responses it sorts.
    """
    if reward.numel() > MOST_PAIRED:
        return objective.centre_groups(reward, group, scale_by_std)
    centred = reward.new_empty(reward.shape, dtype=torch.float64)
    rows, columns = GROUP_TILE
    with torch.cuda.device_of(reward):
        centre_groups_kernel[(triton.cdiv(reward.numel(), rows),)](
            reward.contiguous(),
            group.contiguous(),
            centred,
            reward.numel(),
            SCALE_BY_STD=scale_by_std,
            ROWS=rows,
            COLUMNS=columns,
        )
    return centred


def scale(values: Tensor, factor: Tensor) -> None:
    """Multiply contiguous values in place by a factor [], which the host does not ask for: 1 costs a launch alone."""
    grid = (min(MOST_PROGRAMS, triton.cdiv(values.numel(), SCALE_BLOCK)),)
    if values.numel():
        with torch.cuda.device_of(values):
            scale_kernel[grid](values, factor, values.numel(), BLOCK=SCALE_BLOCK)


def segment_mean(values: Tensor, counted: Tensor, offsets: Tensor) -> Tensor:
    means = values.new_empty(offsets.numel() - 1)
    with torch.cuda.device_of(values):
        segment_mean_kernel[means.shape](
            values.contiguous(), counted.contiguous(), offsets.contiguous(), means, BLOCK=SEGMENT_BLOCK
        )
    return means


def _grid(tokens: Tensor) -> tuple[int]:
    return (triton.cdiv(tokens.numel(), BLOCK),)


def ratio_numbers(surrogate: Surrogate) -> tuple[float, float, float]:
    """The lowest and the highest ratio that are not clipped, and log beta; 0 for what the kernel does not use."""
    low, high = surrogate.bounds or (0.0, 0.0)
    return low, high, 0.0 if surrogate.beta is None else math.log(surrogate.beta)


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()
