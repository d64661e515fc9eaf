"""The public functions on a head: check arguments, have a backend compute."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exgrpo.kernels import arguments, checks, derivatives, dispatch, operators, reference
from exgrpo.kernels.inputs import IGNORED, LEFT_OUT, HeadArguments, LogProb, LossArguments, PolicyLoss, compute_dtype

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
    allowed_tokens: tuple[Tensor, Tensor] | None = None,
    ignore_index: int = IGNORED,
    vocab_group: "ProcessGroup | None" = None,
    memory: int | None = None,
    counts: tuple[int, int] | None = None,
    weight_grad: Tensor | None = None,
    backend: str = "auto",
) -> LogProb:
    r"""Log-probability of each target under a linear head, and the entropy of each token's distribution.

    With logits :math:`z = \mathrm{cap}(h W^\top + b) / \tau` the results are
    :math:`\log p_y = z_y - \log \sum_v e^{z_v}` and :math:`H = -\sum_v p_v \log p_v` over the whole vocabulary, both
    in nats and both differentiable in ``hidden``, ``weight`` and ``bias``. The logits are formed for a chunk of
    tokens at a time, in float32 whatever the dtype of the inputs, and formed again in the backward.

    D is the hidden size, V the vocabulary. ``...`` is any number of dimensions, ``[T]`` or ``[B, L]`` for instance; it
    may hold no token at all.

    Args:
        hidden: hidden states, ``[..., D]``; float16, bfloat16, float32 or float64.
        weight: the head, ``[V, D]``, of the same dtype. Under ``torch.autocast`` the two may differ and are both
            rounded to the dtype of autocast, as by ``torch.nn.functional.linear`` (float64 is left alone). The
            tensor is saved for the backward as it is, so engines that shard parameters can gather it anew.
        target: index of each token, ``[...]``, int64, in ``[0, V)`` or ``ignore_index``.
        bias: ``[V]``, any of these floating dtypes.
        temperature: :math:`\tau > 0`, a number or a tensor shaped like ``target`` (or with no dimensions). Constant.
        softcap: caps the logits to ``softcap * tanh(logits / softcap)`` before the temperature, as Gemma 2 does.
        allowed_tokens: ``(ids, offsets)``, the sets that the targets were sampled from (top-p, top-k, min-p); int32
            ``[M]`` and int64 ``[T + 1]``, where T is the number of targets. The softmax and the entropy of target t, in
            the order of ``target.flatten()``, are over the token ids ``ids[offsets[t]:offsets[t + 1]]``: distinct, in
            any order, the target among them; an empty set means the whole vocabulary. Constant. A target that is alone
            in its set has log-probability 0, entropy 0 and no gradient, and enters no product. For others a call takes
            one small product for each id of a set, and the host waits for a GPU; where a set is a large part of the
            vocabulary, a target costs what it costs without one. None: every softmax is over the whole vocabulary.
        ignore_index: targets with this value are left out: their results are 0, they get no gradient, and they
            enter no matrix product.
        vocab_group: process group over whose ranks ``weight`` and ``bias`` are split along V, in rank order, in any
            sizes (0 included). ``hidden`` and ``target`` (which indexes the whole vocabulary) are the same on all
            ranks, and so are the results. Each rank computes the same loss from them and calls backward: it
            gets the gradient of that one loss, whole for ``hidden``, its own part for ``weight`` and ``bias``.
        memory: bytes that the call, and its backward, may allocate besides their inputs, their results and the
            gradients, which are summed in float32: above all a chunk of logits or of their exponentials. It bounds the
            peak: one chunk alone, whose gradient of the weight needs no sum, may take the bytes of that. None: 1 GiB by
            ``"triton"`` and ``"cuda"``, or a 16th of its memory if that is less; by the others
            logits of 128 MiB on a CPU and of 1 GiB on a GPU, and their scratch memory.
            ``backend="reference"`` holds all logits, whatever is said here.
        counts: how many targets are not left out, and how many of them have a gradient at most (where it is not known:
            as many), if the caller knows. A host that has to ask a GPU waits for it, once in the forward and once in
            the backward; without that wait, a call by ``"triton"`` or ``"cuda"`` can be captured in a CUDA graph. Other
            numbers than these are an error, as a bad target is. With ``vocab_group``, ranks exchange their sizes in any
            case.
        weight_grad: ``[V, D]``, contiguous, float32 (float64 for a float64 weight): the gradient of ``weight`` is added
            to it by the backward, and autograd gets none. So large a tensor is then neither made, nor rounded to the
            dtype of the weight, nor added to others: micro-batches add up in float32. Not under
            ``torch.compile``. Ignored where ``weight`` needs no gradient. None: autograd gets the gradient.
        backend: ``"auto"``, ``"torch"``, ``"triton"``, ``"cpu"``, ``"cuda"`` or ``"reference"``; see
            :mod:`exgrpo.kernels.dispatch`.

    Returns:
        LogProb: ``log_prob`` and ``entropy`` shaped like ``target``, float32 (float64 for float64 inputs).

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, device or value, there is no such backend, or ``memory`` is too
            small for one tile of the logits (the message names the least). Values on a GPU
            are checked without waiting for it, so there a bad target fails like one of
            ``torch.nn.functional.cross_entropy``; with ``EXGRPO_CHECK=1`` in the environment it is a ValueError.
            That a set of ``allowed_tokens`` has an id twice, or lacks its target, is seen on a GPU only then.
        NotImplementedError: the call is differentiated otherwise than once by torch.autograd: in forward mode, by
            torch.func, or with ``create_graph=True``. With ``backend="reference"`` it may be.

    Example::

        >>> hidden = torch.randn(2, 5, 16, requires_grad=True)
        >>> weight = torch.randn(1000, 16, requires_grad=True)
        >>> target = torch.randint(1000, (2, 5))
        >>> target[0, :3] = -100  # a prompt
        >>> result = linear_log_prob(hidden, weight, target)
        >>> result.log_prob.shape, result.entropy.shape
        (torch.Size([2, 5]), torch.Size([2, 5]))
        >>> result.log_prob[0, :3].tolist()
        [0.0, 0.0, 0.0]
        >>> (-result.log_prob.mean() - 0.01 * result.entropy.mean()).backward()

    Source:
        The log-probabilities of the importance ratio and the entropy of the trajectory selection in ExGRPO,
        arXiv 2510.02245.
    """
    given = HeadArguments(bias, temperature, softcap, allowed_tokens, ignore_index)
    head = arguments.keep(arguments.head(hidden, weight, target, given, vocab_group, memory, counts), allowed_tokens)
    name = dispatch.requested(backend, hidden.device, vocab_group)
    checks.weight_grad(weight_grad, weight)
    if name == dispatch.REFERENCE:
        checks.real("hidden", hidden)
        added = derivatives.added_to(weight_grad, weight)
        result = reference.linear_log_prob(hidden, added, target, **given._asdict())
    else:
        result = operators.linear_log_prob(head, name, weight_grad)
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
    allowed_tokens: tuple[Tensor, Tensor] | None = None,
    ignore_index: int = IGNORED,
    vocab_group: "ProcessGroup | None" = None,
    memory: int | None = None,
    counts: tuple[int, int] | None = None,
    weight_grad: Tensor | None = None,
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
        hidden, weight, target, bias, temperature, softcap, ignore_index, memory, backend: as in
            :func:`linear_log_prob`.
        old_log_prob: log-probability of each token under the policy that generated it, in nats, shaped like
            ``target``. Constant. Where it is ``inf``, the present policy generated the token: the ratio is 1, and
            its log-probability needs no pass of its own. ``-inf`` only where a token is left out.
        advantage: shaped like ``target``, or ``[B]``, one per row of a ``[B, L]`` batch. Constant.
        replayed: bool, shaped like ``target`` or ``[B]``: tokens of replayed trajectories. None: none are.
        clip: ``(low, high)``, at least 0, low at most 1: fresh ratios are clipped to ``[1 - low, 1 + high]``; None: no
            clipping.
        beta: replayed ratios are shaped by :math:`f(w) = w / (w + \beta)`; None: the plain ratio.
        entropy_coef: weight of the sum of entropies.
        normalizer: what the sum over tokens is divided by, above 0: a number, or a tensor without dimensions. None: the
            number of tokens that are not left out.
        mask: bool, shaped like ``target``; False leaves the position out.
        allowed_tokens: as there. A target that is alone in its set counts in the loss and has no gradient.
        vocab_group: as there; all arguments but ``weight`` and ``bias`` are the same on all ranks.
        counts: as there. Tokens with advantage 0 have no gradient where ``entropy_coef`` is 0.
        weight_grad: as there, but the call itself adds to it, before any backward (with ``backend="reference"`` the
            backward does). The loss has to be differentiated once, by itself or in a sum: with a factor before it the
            backward is an error.

    Returns:
        PolicyLoss: the differentiable scalar ``loss``, and ``log_prob``, ``entropy``, ``ratio`` and ``clipped``,
        detached and shaped like ``target``; all float32 (float64 for float64 inputs).

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, device or value; see :func:`linear_log_prob`.
        NotImplementedError: the call is differentiated otherwise than once by torch.autograd; see there too.

    Example::

        >>> hidden = torch.randn(2, 5, 16, requires_grad=True)
        >>> weight = torch.randn(1000, 16, requires_grad=True)
        >>> target = torch.randint(1000, (2, 5))
        >>> target[:, 0] = -100  # the prompts
        >>> with torch.no_grad():  # the policy that wrote the tokens; here the same one
        ...     old_log_prob = linear_log_prob(hidden, weight, target).log_prob
        >>> advantage = torch.tensor([0.5, -0.5])  # one per row
        >>> replayed = torch.tensor([True, False])
        >>> result = linear_policy_loss(hidden, weight, target, old_log_prob, advantage, replayed=replayed)
        >>> result.loss.backward()
        >>> weight.grad.shape
        torch.Size([1000, 16])

    Source:
        Mixed-policy objective with policy shaping of ExGRPO, arXiv 2510.02245; constant normaliser of Dr.GRPO.
    """
    given = HeadArguments(bias, temperature, softcap, allowed_tokens, ignore_index)
    loss_given = LossArguments(replayed, clip, beta, entropy_coef, normalizer, mask)
    head = arguments.head(hidden, weight, target, given, vocab_group, memory, counts)
    name = dispatch.requested(backend, hidden.device, vocab_group)
    checks.weight_grad(weight_grad, weight)
    checks.alike("old_log_prob", old_log_prob, target, "target")
    if mask is not None:
        checks.alike("mask", mask, target, "target", (torch.bool,))
        head = head._replace(target=head.target.masked_fill(~mask.reshape(-1), LEFT_OUT))
    head = arguments.keep(head, allowed_tokens)
    flat = checks.written(old_log_prob.detach().reshape(-1), lambda: head.target == LEFT_OUT)
    terms = arguments.policy_terms(flat, advantage, loss_given, target, "target")
    dtype = compute_dtype(hidden.dtype)
    if name != dispatch.REFERENCE:
        loss, per_token = operators.linear_policy_loss(head, terms, name, weight_grad)
    else:
        checks.real("hidden", hidden)
        added, more = derivatives.added_to(weight_grad, weight), loss_given._asdict() | given._asdict()
        loss, *whole = reference.linear_policy_loss(hidden, added, target, old_log_prob, advantage, **more)
        per_token = torch.stack(whole)
    return PolicyLoss(loss.to(dtype), *(values.to(dtype).reshape(target.shape) for values in per_token))


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
    vocab_group: "ProcessGroup | None" = None,
    memory: int | None = None,
    counts: tuple[int, int] | None = None,
    backend: str = "auto",
) -> Tensor:
    r"""Mean token entropy of each packed sequence, over the targets that are not ignored. Forward only.

    Args:
        hidden: hidden states of all sequences, one after the other, ``[T, D]``.
        weight: the head, ``[V, D]``.
        target: index of each token, ``[T]``, int64. Only whether it is ``ignore_index`` has an influence.
        cu_seqlens: bounds of the sequences, ``[N + 1]``, int32 or int64, ascending from 0 to T: sequence i is
            ``[cu_seqlens[i], cu_seqlens[i + 1])``.
        bias, temperature, softcap, ignore_index, vocab_group, memory, backend: as in :func:`linear_log_prob`.
        allowed_tokens: as there; the targets have to be in the sets here, too.
        counts: as there; no target has a gradient.

    Returns:
        Tensor: mean entropies ``[N]`` in nats, float32 (float64 for float64 inputs), detached. 0 for a sequence
        without any token that counts.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, device or value; see :func:`linear_log_prob`.
        NotImplementedError: the call is differentiated in forward mode or by torch.func.

    Example::

        >>> hidden, weight = torch.randn(7, 16), torch.randn(1000, 16)
        >>> target = torch.randint(1000, (7,))
        >>> sequence_entropy(hidden, weight, target, torch.tensor([0, 4, 7])).shape  # of 4 and of 3 tokens
        torch.Size([2])

    Source:
        Trajectory selection of ExGRPO, arXiv 2510.02245: the stored trajectory of lowest entropy is replayed.
    """
    checks.tensor("target", target, (torch.int64,))
    if target.dim() != 1:
        raise ValueError(f"target: expected shape [T], packed sequences, got {list(target.shape)}")
    cu_seqlens = checks.sequence_bounds(cu_seqlens, target)
    derivatives.check_constant("sequence_entropy", hidden, weight, bias)
    given = HeadArguments(bias, temperature, softcap, allowed_tokens, ignore_index)._asdict()
    with torch.no_grad():
        entropy = linear_log_prob(
            hidden, weight, target, **given, vocab_group=vocab_group, memory=memory, counts=counts, backend=backend
        ).entropy
        name = dispatch.requested_for_tokens(target.device)
        return operators.segment_mean(entropy, target != ignore_index, cu_seqlens, name)
