"""The public functions of tokens that have their log-probabilities, and of rewards; arguments are checked here."""

import torch
from torch import Tensor

from exgrpo.kernels import arguments, checks, derivatives, dispatch, objective, operators
from exgrpo.kernels.inputs import LossArguments, PolicyLoss, compute_dtype


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
        old_log_prob: those under the policy that generated the tokens, same shape. Constant. ``inf`` stands for the
            present policy: the ratio is 1. ``-inf`` only where a token is left out.
        advantage: same shape, or ``[B]``, one per row of a ``[B, L]`` batch. Constant.
        replayed: bool, same shape or ``[B]``; None: no token is replayed.
        clip: ``(low, high)``, both at least 0, low at most 1, or None.
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
        NotImplementedError: the call is differentiated otherwise than once by torch.autograd: in forward mode, by
            torch.func, or with ``create_graph=True``. :func:`exgrpo.kernels.reference.policy_loss` may be.

    Example::

        >>> log_prob = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]], requires_grad=True)
        >>> old_log_prob = torch.tensor([[-1.5, -2.0], [-0.5, -3.0]])
        >>> result = policy_loss(log_prob, old_log_prob, torch.tensor([1.0, -1.0]))
        >>> result.clipped.tolist()  # a ratio of e^0.5 with a positive advantage
        [[1.0, 0.0], [0.0, 0.0]]
        >>> result.loss.backward()
        >>> log_prob.grad.tolist()
        [[-0.0, -0.25], [0.25, 0.25]]

    Source:
        Mixed-policy objective with policy shaping of ExGRPO, arXiv 2510.02245; constant normaliser of Dr.GRPO.
    """
    arguments.same_tokens(log_prob, old_log_prob)
    if mask is not None:
        checks.alike("mask", mask, log_prob, "log_prob", (torch.bool,))
        mask = mask.reshape(-1)
    old_log_prob = checks.written(old_log_prob.detach().reshape(-1), lambda: None if mask is None else ~mask)
    given = LossArguments(replayed, clip, beta, entropy_coef, normalizer, mask)
    terms = arguments.policy_terms(old_log_prob, advantage, given, log_prob, "log_prob")
    dtype = compute_dtype(log_prob.dtype)
    if entropy is not None:
        checks.alike("entropy", entropy, log_prob, "log_prob")
    elif entropy_coef:
        raise ValueError(f"entropy: expected a tensor, since entropy_coef is {entropy_coef}, got None")
    entropy = None if entropy is None else entropy.to(dtype).reshape(-1)
    name = dispatch.requested_for_tokens(log_prob.device)
    loss, per_token = operators.policy_loss(log_prob.to(dtype).reshape(-1), entropy, terms, mask, name)
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

    Example::

        >>> importance_ratio(torch.tensor([-1.0, 0.0]), torch.tensor([-1.0, -100.0])).tolist()
        [1.0, 485165184.0]

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

    Example::

        >>> shape_ratio(torch.tensor([0.0, 0.1, 1.0]), 0.1)
        tensor([0.0000, 0.5000, 0.9091])

    Source:
        Policy shaping of ExGRPO, arXiv 2510.02245.
    """
    checks.tensor("ratio", ratio)
    return ratio / (ratio + checks.number("beta", beta, positive=True))


def group_advantage(reward: Tensor, group: Tensor, *, scale_by_std: bool = False) -> Tensor:
    r"""Advantage of each response: its reward minus the mean reward of its group.

    Args:
        reward: ``[N]``, floating, integer or bool. Constant.
        group: ``[N]``, int32 or int64: responses with the same number form a group. Groups may have any sizes and
            stand in any order.
        scale_by_std: divides by the group's sample standard deviation (N - 1 in the denominator) plus 1e-6. A group
            of one has advantage 0 either way.

    Returns:
        Tensor: advantages ``[N]``, float32 (float64 for float64 rewards); they sum to 0 in each group.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: the shapes or devices differ.
        NotImplementedError: the call is differentiated in forward mode or by torch.func.

    Example::

        >>> reward = torch.tensor([1.0, 0.0, 1.0, 1.0])
        >>> group_advantage(reward, torch.tensor([0, 0, 1, 1])).tolist()
        [0.5, -0.5, 0.0, 0.0]

    Source:
        Advantage of Dr.GRPO, the setting of ExGRPO, arXiv 2510.02245; with ``scale_by_std`` that of GRPO.
    """
    checks.tensor("reward", reward, (*checks.FLOATING, torch.int32, torch.int64, torch.bool))
    checks.tensor("group", group, (torch.int32, torch.int64))
    if reward.dim() != 1:
        raise ValueError(f"reward: expected shape [N], got {list(reward.shape)}")
    checks.shape("group", group, reward.shape)
    checks.device("group", group, reward, "reward")
    derivatives.check_constant("group_advantage", reward)
    name = dispatch.requested_for_tokens(reward.device)
    return operators.group_advantage(reward.detach(), group, scale_by_std, name).to(compute_dtype(reward.dtype))
