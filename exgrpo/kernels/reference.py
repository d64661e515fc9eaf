"""The oracle: the public functions written plainly on full logits in the input's dtype, differentiated by autograd.

Run it in float64. Memory is [tokens, vocabulary], several times over. Arguments and results are those of
:mod:`exgrpo.kernels` without ``vocab_group`` and ``backend``. The products of 16-bit inputs, and those under autocast,
are rounded to 16 bits, as torch.nn.functional.linear does; all that follows is in float32. Derivatives of any order, in
both modes of autograd and by torch.func, are right.
"""

import torch
from torch import Tensor

from exgrpo.kernels.inputs import IGNORED, PRESENT, HeadArguments, LogProb, LossArguments, PolicyLoss, compute_dtype

MAX_LOG_RATIO = 20.0


def linear_log_prob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    allowed_tokens: tuple[Tensor, Tensor] | None = None,
    ignore_index: int = IGNORED,
) -> LogProb:
    """Return log-probabilities and entropies, as :func:`exgrpo.kernels.linear_log_prob` does."""
    dtype = compute_dtype(hidden.dtype)
    flat = target.reshape(-1)
    active = (flat != ignore_index).nonzero(as_tuple=True)
    logits = torch.nn.functional.linear(hidden.reshape(len(flat), hidden.shape[-1])[active], weight).to(dtype)
    if bias is not None:
        logits = logits + bias.to(dtype)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if isinstance(temperature, Tensor):
        temperature = temperature.detach().to(dtype).expand(target.shape).reshape(-1)[active].unsqueeze(-1)
    logits = logits / temperature
    if allowed_tokens is not None:
        logits = logits.masked_fill(~_allowed(allowed_tokens, weight.shape[0])[active], -torch.inf)
    log_probs = torch.log_softmax(logits, -1)
    probs = log_probs.exp()
    # p log p is 0 at p = 0, where log p may be -inf.
    entropy = -(probs * log_probs.masked_fill(probs == 0, 0)).sum(-1)
    log_prob = log_probs.gather(-1, flat[active].unsqueeze(-1)).squeeze(-1)
    zeros = hidden.new_zeros(len(flat), dtype=dtype)
    return LogProb(*(zeros.index_put(active, values).reshape(target.shape) for values in (log_prob, entropy)))


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    *,
    replayed: Tensor | None = None,
    clip: tuple[float, float] | None = (0.2, 0.2),
    beta: float | None = 0.1,
    entropy_coef: float = 0.0,
    normalizer: float | Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    allowed_tokens: tuple[Tensor, Tensor] | None = None,
    ignore_index: int = IGNORED,
) -> PolicyLoss:
    """Return the loss from hidden states, as :func:`exgrpo.kernels.linear_policy_loss` does."""
    active = target != ignore_index if mask is None else (target != ignore_index) & mask
    target = target.masked_fill(~active, ignore_index)
    given = HeadArguments(bias, temperature, softcap, allowed_tokens, ignore_index)
    log_prob, entropy = linear_log_prob(hidden, weight, target, **given._asdict())
    terms = LossArguments(replayed, clip, beta, entropy_coef, normalizer, active)
    return policy_loss(log_prob, old_log_prob, advantage, entropy=entropy, **terms._asdict())


def policy_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    *,
    replayed: Tensor | None = None,
    clip: tuple[float, float] | None = (0.2, 0.2),
    beta: float | None = 0.1,
    entropy: Tensor | None = None,
    entropy_coef: float = 0.0,
    normalizer: float | Tensor | None = None,
    mask: Tensor | None = None,
) -> PolicyLoss:
    """Return the loss from log-probabilities, as :func:`exgrpo.kernels.policy_loss` does."""
    everywhere = torch.ones_like(log_prob, dtype=torch.bool)
    mask = everywhere if mask is None else mask
    entropy = torch.zeros_like(log_prob) if entropy is None else entropy
    replayed = ~everywhere if replayed is None else _per_token(replayed, log_prob)
    tokens = (log_prob, entropy, old_log_prob.detach(), _per_token(advantage.detach(), log_prob))
    dtype = compute_dtype(log_prob.dtype)
    log_prob, entropy, old_log_prob, advantage = (values.to(dtype).masked_fill(~mask, 0) for values in tokens)
    old_log_prob = torch.where(old_log_prob == PRESENT, log_prob.detach(), old_log_prob)

    ratio = importance_ratio(log_prob, old_log_prob)
    fresh = ratio * advantage
    clipped = torch.zeros_like(mask)
    if clip is not None:
        limited = ratio.clamp(1 - clip[0], 1 + clip[1]) * advantage
        clipped = (limited < fresh) & ~replayed
        fresh = torch.minimum(fresh, limited)
    past = ratio if beta is None else shape_ratio(ratio, beta)
    objective = torch.where(replayed, past * advantage, fresh)
    count = mask.sum().clamp(min=1) if normalizer is None else normalizer
    count = count.detach() if isinstance(count, Tensor) else count
    loss = -(objective.sum() + entropy_coef * entropy.sum()) / count
    metrics = (log_prob, entropy, ratio.masked_fill(~mask, 0), clipped.to(dtype))
    return PolicyLoss(loss.to(dtype), *(values.detach() for values in metrics))


def importance_ratio(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """Return the ratios, as :func:`exgrpo.kernels.importance_ratio` does."""
    dtype = compute_dtype(log_prob.dtype)
    return (log_prob.to(dtype) - old_log_prob.to(dtype)).clamp(max=MAX_LOG_RATIO).exp()


def shape_ratio(ratio: Tensor, beta: float) -> Tensor:
    """Return shaped ratios, as :func:`exgrpo.kernels.shape_ratio` does."""
    return ratio / (ratio + beta)


def group_advantage(reward: Tensor, group: Tensor, *, scale_by_std: bool = False) -> Tensor:
    """Return advantages, as :func:`exgrpo.kernels.group_advantage` does."""
    reward = reward.to(compute_dtype(reward.dtype))
    advantage = torch.zeros_like(reward)
    for identity in group.unique():
        member = group == identity
        centred = reward[member] - reward[member].mean()
        if scale_by_std:
            deviation = reward[member].std() if member.sum() > 1 else reward.new_zeros(())
            centred = centred / (deviation + 1e-6)
        advantage[member] = centred
    return advantage


def sequence_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    cu_seqlens: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    allowed_tokens: tuple[Tensor, Tensor] | None = None,
    ignore_index: int = IGNORED,
) -> Tensor:
    """Return mean entropies, as :func:`exgrpo.kernels.sequence_entropy` does."""
    given = HeadArguments(bias, temperature, softcap, allowed_tokens, ignore_index)
    with torch.no_grad():
        entropy = linear_log_prob(hidden, weight, target, **given._asdict()).entropy
    means = []
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        active = target[start:end] != ignore_index
        means.append(entropy[start:end][active].sum() / active.sum().clamp(min=1))
    return torch.stack(means) if means else entropy.new_zeros(0)


def _allowed(allowed_tokens: tuple[Tensor, Tensor], vocabulary: int) -> Tensor:
    """Return the words over which each token's softmax is, bool [T, V]."""
    ids, offsets = allowed_tokens
    sizes = offsets.diff()
    allowed = (sizes == 0).unsqueeze(1).repeat(1, vocabulary)
    allowed[torch.repeat_interleave(sizes), ids.long()] = True
    return allowed


def _per_token(values: Tensor, like: Tensor) -> Tensor:
    return values.unsqueeze(1).expand(like.shape) if values.dim() < like.dim() else values
