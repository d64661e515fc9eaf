"""verl: its fused-kernel path on :mod:`exgrpo.kernels`. Importable without verl; :func:`patch_verl` needs it."""

import importlib
import sys
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from exgrpo.kernels import linear_log_prob

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: "ProcessGroup | None" = None,
    *,
    memory: int | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Log-probabilities of labels and entropies under a linear head: verl's function of this name.

    Both results are differentiable in ``hidden`` and ``weight``; see :func:`exgrpo.kernels.linear_log_prob`. Where
    verl's kernel asks for a GPU, contiguous tensors and a multiple of 128 channels, this asks for nothing.

    Args:
        hidden: hidden states, ``[..., D]``; float16, bfloat16, float32 or float64.
        weight: the head, ``[V, D]``, of the same dtype; with ``dist_process_group`` this rank's rows of it.
        labels: index of each token, ``[...]``, any integer dtype, in ``[0, V)``, or -100: both results of such a
            position are 0, and it costs nothing.
        temperature: what the logits are divided by, above 0.
        reduction: ``"none"``, ``"sum"`` or ``"mean"``, in any case; it concerns the log-probabilities alone.
            The mean is over all T tokens.
        dist_process_group: process group over whose ranks ``weight`` is split along V, in rank order. The other
            arguments and the results are the same on all ranks.
        memory: bytes that the kernels may take, see :func:`exgrpo.kernels.linear_log_prob`; not of verl's function.

    Returns:
        tuple[Tensor, Tensor]: the log-probabilities ``[T]``, T being the number of labels whatever their shape
        (without dimensions if they are reduced), and the entropies ``[T]``, in nats, float32 (float64 for float64
        inputs).

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, device or value.

    Note:
        As with verl's kernel, the ranks' gradients of ``hidden`` add up to the gradient: whoever calls it sums them,
        as Megatron's gather from the sequence-parallel region does. Here each rank has an equal share.
    """
    if reduction.lower() not in ("none", "sum", "mean"):
        raise ValueError(f"reduction: expected 'none', 'sum' or 'mean', got {reduction!r}")
    if dist_process_group is not None:
        ranks = dist_process_group.size()
        hidden = _shared(hidden, ranks)
        dist_process_group = dist_process_group if ranks > 1 else None
    log_prob, entropy = linear_log_prob(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        labels.reshape(-1).long(),
        temperature=temperature,
        vocab_group=dist_process_group,
        memory=memory,
    )
    if reduction.lower() != "none":
        log_prob = log_prob.sum() if reduction.lower() == "sum" else log_prob.mean()
    return log_prob, entropy


def patch_verl(*, memory: int | None = None) -> Callable[[], None]:
    """Makes verl's fused kernels those of this package, in this process.

    With ``use_fused_kernels=True`` every backend that verl offers then computes by :mod:`exgrpo.kernels`: its
    ``linear_cross_entropy`` (backend ``triton``, and Megatron's fused forward) and the forward of its
    ``FusedLinearForPPO`` (backends ``torch`` and ``liger``), in modules that are loaded already and in those to come.
    The entropies of the latter are then float32, as those of the former are, not of the hidden states' dtype.
    Calling it again changes nothing. verl's workers are processes of their own: docs/verl.md says how to reach them.

    Args:
        memory: bytes that the kernels may take, see :func:`exgrpo.kernels.linear_log_prob`.

    Returns:
        Callable[[], None]: gives verl its own functions back.

    Raises:
        ImportError: verl is not there, or without the functions that are to be replaced.
    """
    try:
        kernel = importlib.import_module("verl.utils.kernel.linear_cross_entropy")
        fused_linear = importlib.import_module("verl.utils.experimental.torch_functional").FusedLinearForPPO
        originals = (kernel.linear_cross_entropy, fused_linear.forward)
    except (ImportError, AttributeError) as error:
        raise ImportError("patch_verl: verl's fused kernels cannot be imported; pip install verl==0.9.1") from error
    ours = _within(memory)

    def put(replaced: tuple[Any, Any], by: tuple[Any, Any]) -> None:
        modules = [module for name, module in sys.modules.items() if name.startswith("verl.")]
        _replace(modules, "linear_cross_entropy", replaced[0], by[0])
        _replace([fused_linear], "forward", replaced[1], by[1])

    put(originals, ours)
    return lambda: put(ours, originals)


@cache
def _within(memory: int | None) -> tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., tuple[Tensor, Tensor]]]:
    """What takes the place of verl's functions: the same two for the same memory, so that a patch is known again."""

    def forward(
        self: object, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """The forward of verl's FusedLinearForPPO, whose results have the shape of ``input_ids``."""
        return linear_log_prob(hidden_states, vocab_weights, input_ids.long(), temperature=temperature, memory=memory)

    return (linear_cross_entropy if memory is None else partial(linear_cross_entropy, memory=memory)), forward


def _shared(hidden: Tensor, ranks: int) -> Tensor:
    """The same tensor, whose gradient, the whole one on every rank, is divided among them."""
    if ranks > 1 and hidden.requires_grad:
        hidden = hidden.view_as(hidden)
        hidden.register_hook(lambda gradient: gradient / ranks)
    return hidden


def _replace(owners: Iterable[Any], name: str, old: object, new: object) -> None:
    for owner in owners:
        if vars(owner).get(name) is old:
            setattr(owner, name, new)
