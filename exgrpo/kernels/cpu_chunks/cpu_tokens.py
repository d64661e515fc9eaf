"""The small operations around the head, over tokens and responses, as one compiled kernel each."""

import torch
from torch import Tensor

from exgrpo.kernels.chunks.softmax import PolicyRows
from exgrpo.kernels.extension import OPERATORS


def finish(gap: Tensor, rest: Tensor, moment: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U, log p_y and H from the sums of each row, all [rows] fp32 or fp64: `chunks.softmax.finished`."""
    mean, log_prob, entropy = OPERATORS.finish(gap.contiguous(), rest.contiguous(), moment.contiguous())
    return mean, log_prob, entropy


def policy_rows(
    gap: Tensor,
    rest: Tensor,
    moment: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    replayed: Tensor | None,
    *,
    clip: tuple[float, float] | None,
    beta: float | None,
    entropy_coef: float,
    normalizer: Tensor,
    temperature: Tensor | None,
    softcapped: bool,
) -> PolicyRows:
    """Statistics, objective and row factors of each row: `chunks.softmax.policy_rows`."""
    like = gap.dtype
    results = OPERATORS.policy_rows(
        gap.contiguous(),
        rest.contiguous(),
        moment.contiguous(),
        _vector(old_log_prob, like),
        _vector(advantage, like),
        _vector(replayed, torch.bool),
        _vector(temperature, like),
        normalizer.to(like),
        *_bounds(clip),
        beta,
        entropy_coef,
        not entropy_coef and not softcapped,
    )
    return PolicyRows(*results)


def token_objective(
    log_prob: Tensor,
    entropy: Tensor | None,
    old_log_prob: Tensor,
    advantage: Tensor,
    replayed: Tensor | None,
    mask: Tensor | None,
    clip: tuple[float, float] | None,
    beta: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The objective of tokens [T] whose log-probabilities are known: `objective.token_objective`."""
    like = log_prob.dtype
    sums, results, derivatives = OPERATORS.token_objective(
        _vector(log_prob, like),
        _vector(entropy, like),
        _vector(old_log_prob, like),
        _vector(advantage, like),
        _vector(replayed, torch.bool),
        _vector(mask, torch.bool),
        *_bounds(clip),
        beta,
    )
    return sums, results, derivatives


def centre_groups(reward: Tensor, group: Tensor, scale_by_std: bool) -> Tensor:
    """Reward [N] minus the mean of its group, in float64, divided by the sample deviation if asked for."""
    return OPERATORS.centre_groups(_vector(reward, torch.float64), _vector(group, torch.int64), scale_by_std)


def segment_mean(values: Tensor, counted: Tensor, offsets: Tensor) -> Tensor:
    """Mean of the counted values [T] (bool [T]) of each segment [offsets[i], offsets[i + 1]); 0 if it has none."""
    return OPERATORS.segment_mean(values.contiguous(), counted.contiguous(), _vector(offsets, torch.int64))


def _vector(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """As the kernels take it."""
    return None if tensor is None else tensor.detach().to(dtype).contiguous()


def _bounds(clip: tuple[float, float] | None) -> tuple[float | None, float | None]:
    """The lowest and the highest ratio that are not clipped."""
    return (None, None) if clip is None else (1 - clip[0], 1 + clip[1])
