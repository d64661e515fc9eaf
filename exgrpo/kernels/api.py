"""The public functions: arguments are checked here, results are computed by the backends."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exgrpo.kernels import arguments, checks, dispatch, objective, ops, reference
from exgrpo.kernels.inputs import IGNORED, LEFT_OUT, compute_dtype
from exgrpo.kernels.results import LogProb, PolicyLoss

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def linear_log_prob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    ignore_index: int = IGNORED,
    vocab_group: "ProcessGroup | None" = None,
    backend: str = "auto",
) -> LogProb:
    r"""Log-probability of each target under a linear head, and the entropy of each token's distribution.

    With logits :math:`z = \mathrm{cap}(h W^\top + b) / \tau` the results are
    :math:`\log p_y = z_y - \log \sum_v e^{z_v}` and :math:`H = -\sum_v p_v \log p_v` over the whole vocabulary, both
    in nats and both differentiable in ``hidden``, ``weight`` and ``bias``. The logits are formed for a chunk of
    tokens at a time, in float32 whatever the dtype of the inputs, and formed again in the backward.

    Args:
        hidden: hidden states, ``[..., D]``; float16, bfloat16, float32 or float64.
        weight: the head, ``[V, D]``, of the same dtype. Under ``torch.autocast`` the two may differ and are both
            rounded to the dtype of autocast, as by ``torch.nn.functional.linear`` (float64 is left alone). The
            tensor is saved for the backward as it is, so engines that shard parameters can gather it anew.
        target: index of each token, ``[...]``, int64, in ``[0, V)`` or ``ignore_index``.
        bias: ``[V]``, any of these floating dtypes.
        temperature: :math:`\tau > 0`, a number or a tensor shaped like ``target`` (or with no dimensions). Constant.
        softcap: caps the logits to ``softcap * tanh(logits / softcap)`` before the temperature, as Gemma 2 does.
        ignore_index: targets with this value are left out: their results are 0, they get no gradient, and they
            enter no matrix product.
        vocab_group: process group over whose ranks ``weight`` and ``bias`` are split along V, in rank order, in any
            sizes (0 included). ``hidden`` and ``target`` (which indexes the whole vocabulary) are the same on all
            ranks, and so are the results. Each rank computes the same loss from them and calls backward: it
            gets the gradient of that one loss, whole for ``hidden``, its own part for ``weight`` and ``bias``.
        backend: ``"auto"``, ``"torch"``, ``"triton"``, ``"cpu"``, ``"cuda"`` or ``"reference"``; see
            :mod:`exgrpo.kernels.dispatch`.

    Returns:
        LogProb: ``log_prob`` and ``entropy`` shaped like ``target``, float32 (float64 for float64 inputs).

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, device or value, or there is no such backend. Values on a GPU
            are checked without waiting for it, so there a bad target fails like one of
            ``torch.nn.functional.cross_entropy``; with ``EXGRPO_CHECK=1`` in the environment it is a ValueError.

    Shape:
        ``...`` is any number of dimensions, ``[T]`` or ``[B, L]`` for instance; it may hold no token at all.

    Source:
        The log-probabilities of the importance ratio and the entropy of the trajectory selection in ExGRPO,
        arXiv 2510.02245.
    """
    head = arguments.head(hidden, weight, target, bias, temperature, softcap, ignore_index, vocab_group)
    name = dispatch.requested(backend, hidden.device, vocab_group)
    if name == dispatch.REFERENCE:
        result = reference.linear_log_prob(
            hidden,
            weight,
            target,
            bias=bias,
            temperature=temperature,
            softcap=softcap,
            ignore_index=ignore_index,
        )
    else:
        result = ops.linear_log_prob(head, name)
    dtype = compute_dtype(hidden.dtype)
    return LogProb(*(values.to(dtype).reshape(target.shape) for values in result))


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
    vocab_group: "ProcessGroup | None" = None,
    backend: str = "auto",
) -> PolicyLoss:
    r"""The ExGRPO loss of a batch of tokens straight from the hidden states.

    The value is that of :func:`policy_loss` on the results of :func:`linear_log_prob`. The gradients are formed
    during the forward, chunk by chunk, so that the logits are computed once; the backward multiplies them
    by the upstream gradient. Only tokens with a gradient enter the two gradient products: not those that are left
    out, nor (with ``entropy_coef`` 0) those that are clipped or have advantage 0. Between forward and backward the
    call holds the gradients of ``weight`` and ``hidden`` in float32; on a CPU, those of bfloat16 tensors in bfloat16.

    A batch without any token, or with all of them left out, has loss 0 and gradients 0, attached to the graph.

    Args:
        hidden: hidden states, ``[..., D]``, as in :func:`linear_log_prob`.
        weight: the head, ``[V, D]``.
        target: index of each token, ``[...]``, int64, in ``[0, V)``, or -100 to leave the position out.
        old_log_prob: log-probability of each token under the policy that generated it, in nats, shaped like
            ``target``. Constant.
        advantage: shaped like ``target``, or ``[B]``, one per row of a ``[B, L]`` batch. Constant.
        replayed: bool, shaped like ``target`` or ``[B]``: tokens of replayed trajectories. None: none are.
        clip: ``(low, high)``: fresh ratios are clipped to ``[1 - low, 1 + high]``; None: no clipping.
        beta: replayed ratios are shaped by :math:`f(w) = w / (w + \beta)`; None: the plain ratio.
        entropy_coef: weight of the sum of entropies.
        normalizer: what the sum over tokens is divided by, above 0: a number, or a tensor without dimensions. None: the
            number of tokens that are not left out.
        mask: bool, shaped like ``target``; False leaves the position out.
        bias: ``[V]``.
        temperature: a number or a tensor shaped like ``target``.
        softcap: caps the logits before the temperature.
        vocab_group: process group over whose ranks ``weight`` and ``bias`` are split; all other arguments are the same
            on all ranks. Conventions as in :func:`linear_log_prob`.
        backend: as in :func:`linear_log_prob`.

    Returns:
        PolicyLoss: the differentiable scalar ``loss``, and ``log_prob``, ``entropy``, ``ratio`` and ``clipped``,
        detached and shaped like ``target``; all float32 (float64 for float64 inputs).

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, device or value; see :func:`linear_log_prob`.

    Source:
        Mixed-policy objective with policy shaping of ExGRPO, arXiv 2510.02245; constant normaliser of Dr.GRPO.
    """
    head = arguments.head(hidden, weight, target, bias, temperature, softcap, IGNORED, vocab_group)
    name = dispatch.requested(backend, hidden.device, vocab_group)
    checks.tensor("old_log_prob", old_log_prob)
    checks.shape("old_log_prob", old_log_prob, target.shape)
    checks.device("old_log_prob", old_log_prob, target, "target")
    terms = arguments.terms(target, old_log_prob, advantage, replayed, clip, beta, entropy_coef, normalizer)
    dtype = compute_dtype(hidden.dtype)
    if mask is not None:
        checks.mask(mask, target)
        head = head._replace(target=head.target.masked_fill(~mask.reshape(-1), LEFT_OUT))
    if name != dispatch.REFERENCE:
        loss, per_token = ops.linear_policy_loss(head, terms, name)
    else:
        loss, *whole = reference.linear_policy_loss(
            hidden,
            weight,
            target,
            old_log_prob,
            advantage,
            replayed=replayed,
            clip=clip,
            beta=beta,
            entropy_coef=entropy_coef,
            normalizer=normalizer,
            mask=mask,
            bias=bias,
            temperature=temperature,
            softcap=softcap,
        )
        per_token = torch.stack(whole)
    return PolicyLoss(loss.to(dtype), *(values.to(dtype).reshape(target.shape) for values in per_token))


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
    r"""The ExGRPO loss of a batch of tokens from their log-probabilities.

    With :math:`w = \exp(\mathrm{log\_prob} - \mathrm{old\_log\_prob})`, the exponent at most 20 (beyond that the
    ratio stays at :math:`e^{20}` and has no gradient), the objective of a token is

    .. math::
        \begin{cases}
        \min(w A, \mathrm{clip}(w, 1 - \mathrm{low}, 1 + \mathrm{high}) A)
            & \text{fresh, or } w A \text{ without clip} \\
        f(w) A, \quad f(w) = w / (w + \beta) & \text{replayed, or } w A \text{ without beta}
        \end{cases}

    and the loss is ``-(sum of objectives + entropy_coef * sum of entropies) / normalizer``. The objective of a
    replayed token is computed without exponentiating the log-ratio; its derivative is :math:`A f (1 - f)`.

    Args:
        log_prob: log-probabilities under the current policy, in nats, ``[...]``, any floating dtype.
        old_log_prob: those under the policy that generated the tokens, same shape. Constant.
        advantage: same shape, or ``[B]``, one per row of a ``[B, L]`` batch. Constant.
        replayed: bool, same shape or ``[B]``; None: no token is replayed.
        clip: ``(low, high)``, both at least 0, or None.
        beta: above 0, or None.
        entropy: entropy of each token's distribution, in nats, same shape; needed where ``entropy_coef`` is not 0.
        entropy_coef: weight of the sum of entropies.
        normalizer: a number above 0, or a tensor without dimensions; None: the number of unmasked tokens (at least 1).
        mask: bool, same shape; positions that are False are left out, whatever they hold (NaN included).

    Returns:
        PolicyLoss: ``loss``, differentiable in ``log_prob`` and ``entropy``; the rest detached, 0 where left out.
        float32 (float64 for float64 log-probabilities).

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, device or value.

    Source:
        Mixed-policy objective with policy shaping of ExGRPO, arXiv 2510.02245; constant normaliser of Dr.GRPO.
    """
    arguments.same_tokens(log_prob, old_log_prob)
    terms = arguments.terms(
        log_prob, old_log_prob, advantage, replayed, clip, beta, entropy_coef, normalizer, "log_prob"
    )
    dtype = compute_dtype(log_prob.dtype)
    if entropy is not None:
        checks.tensor("entropy", entropy)
        checks.shape("entropy", entropy, log_prob.shape)
        checks.device("entropy", entropy, log_prob, "log_prob")
    elif entropy_coef:
        raise ValueError(f"entropy: expected a tensor, since entropy_coef is {entropy_coef}, got None")
    if mask is not None:
        checks.mask(mask, log_prob, "log_prob")
        mask = mask.reshape(-1)
    entropy = None if entropy is None else entropy.to(dtype).reshape(-1)
    name = dispatch.requested_for_tokens(log_prob.device)
    loss, per_token = ops.token_objective(log_prob.to(dtype).reshape(-1), entropy, terms, mask, name)
    return PolicyLoss(loss.to(dtype), *(values.reshape(log_prob.shape) for values in per_token))


def importance_ratio(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    r"""Importance ratio of each token, :math:`\exp(\min(\mathrm{log\_prob} - \mathrm{old\_log\_prob}, 20))`.

    Args:
        log_prob: log-probabilities under the current policy, in nats, ``[...]``.
        old_log_prob: those under the policy that generated the tokens, same shape.

    Returns:
        Tensor: the ratios, same shape, float32 (float64 for float64 inputs), in ``[0, e^20]``; differentiable, with
        gradient 0 beyond the bound.

    Raises:
        TypeError: an argument is no tensor of floating dtype.
        ValueError: the shapes or devices differ.

    Source:
        Importance weights :math:`w_t` and :math:`w^*_t` of ExGRPO, arXiv 2510.02245.
    """
    arguments.same_tokens(log_prob, old_log_prob)
    dtype = compute_dtype(log_prob.dtype)
    return objective.bounded_ratio(log_prob.to(dtype) - old_log_prob.to(dtype))


def shape_ratio(ratio: Tensor, beta: float) -> Tensor:
    r"""Shaped importance ratio of replayed tokens, :math:`f(w) = w / (w + \beta)`.

    It amplifies the gradient of tokens that the policy has become unlikely to say and damps that of those
    it already says: :math:`\mathrm{d}f / \mathrm{d}\log w = f (1 - f)` is at most 1/4, at :math:`w = \beta`.

    Args:
        ratio: importance ratios, at least 0, any shape.
        beta: above 0; 0.1 in the paper.

    Returns:
        Tensor: same shape and dtype as ``ratio``, in ``[0, 1]``; differentiable.

    Raises:
        TypeError: ``ratio`` is no tensor of floating dtype, or ``beta`` no number.
        ValueError: ``beta`` is not above 0.

    Source:
        Policy shaping of ExGRPO, arXiv 2510.02245.
    """
    checks.tensor("ratio", ratio)
    return ratio / (ratio + checks.number("beta", beta, positive=True))


def group_advantage(reward: Tensor, group: Tensor, *, scale_by_std: bool = False) -> Tensor:
    r"""Advantage of each response: its reward minus the mean reward of its group.

    Args:
        reward: ``[N]``, floating, integer or bool.
        group: ``[N]``, int32 or int64: responses with the same number form a group. Groups may have any sizes and
            stand in any order.
        scale_by_std: divides by the group's sample standard deviation (N - 1 in the denominator) plus 1e-6. A group
            of one has advantage 0 either way.

    Returns:
        Tensor: advantages ``[N]``, float32 (float64 for float64 rewards); they sum to 0 in each group.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: the shapes or devices differ.

    Source:
        Advantage of Dr.GRPO, the setting of ExGRPO, arXiv 2510.02245; with ``scale_by_std`` that of GRPO.
    """
    checks.tensor("reward", reward, (*checks.FLOATING, torch.int32, torch.int64, torch.bool))
    checks.tensor("group", group, (torch.int32, torch.int64))
    if reward.dim() != 1:
        raise ValueError(f"reward: expected shape [N], got {list(reward.shape)}")
    checks.shape("group", group, reward.shape)
    checks.device("group", group, reward, "reward")
    name = dispatch.requested_for_tokens(reward.device)
    return ops.group_advantage(reward.detach(), group, scale_by_std, name).to(compute_dtype(reward.dtype))


def sequence_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    cu_seqlens: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    ignore_index: int = IGNORED,
    vocab_group: "ProcessGroup | None" = None,
    backend: str = "auto",
) -> Tensor:
    r"""Mean token entropy of each packed sequence, over the targets that are not ignored. Forward only.

    Args:
        hidden: hidden states of all sequences, one after the other, ``[T, D]``.
        weight: the head, ``[V, D]``.
        target: index of each token, ``[T]``, int64. Only whether it is ``ignore_index`` has an influence.
        cu_seqlens: bounds of the sequences, ``[N + 1]``, int32 or int64, ascending from 0 to T: sequence i is
            ``[cu_seqlens[i], cu_seqlens[i + 1])``.
        bias: ``[V]``.
        temperature: a number or a tensor shaped like ``target``.
        softcap: caps the logits before the temperature.
        ignore_index: targets with this value are left out.
        vocab_group: process group over whose ranks ``weight`` and ``bias`` are split; see :func:`linear_log_prob`.
        backend: as in :func:`linear_log_prob`.

    Returns:
        Tensor: mean entropies ``[N]`` in nats, float32 (float64 for float64 inputs), detached. 0 for a sequence
        without any token that counts.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, device or value; see :func:`linear_log_prob`.

    Source:
        Trajectory selection of ExGRPO, arXiv 2510.02245: the stored trajectory of lowest entropy is replayed.
    """
    checks.tensor("target", target, (torch.int64,))
    if target.dim() != 1:
        raise ValueError(f"target: expected shape [T], packed sequences, got {list(target.shape)}")
    checks.sequence_bounds(cu_seqlens, target)
    with torch.no_grad():
        entropy = linear_log_prob(
            hidden,
            weight,
            target,
            bias=bias,
            temperature=temperature,
            softcap=softcap,
            ignore_index=ignore_index,
            vocab_group=vocab_group,
            backend=backend,
        ).entropy
        name = dispatch.requested_for_tokens(target.device)
        return ops.segment_mean(entropy, target != ignore_index, cu_seqlens, name)
