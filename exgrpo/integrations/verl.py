"""verl's fused-kernel path on :mod:`exgrpo.kernels`. Importable without verl; :func:`patch_verl` needs it."""

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
    """Return log-probabilities of labels and entropies under a linear head, as verl's function of this name.

    Dtypes, gradients and errors are those of :func:`exgrpo.kernels.linear_log_prob`. Unlike verl's kernel it does not
    require a GPU, contiguous tensors or a multiple of 128 channels.

    Args:
        hidden: hidden states, ``[..., D]``.
        weight: the head, ``[V, D]``; with ``dist_process_group`` this rank's rows of it.
        labels: index of each token, ``[...]``, any integer dtype, in ``[0, V)``, or -100: both results of such a
            position are 0, and it costs nothing.
        temperature: divisor of the logits, above 0.
        reduction: ``"none"``, ``"sum"`` or ``"mean"`` (over all T tokens) of the log-probabilities, in any letter case.
        dist_process_group: process group over whose ranks ``weight`` is split along V, in rank order. The other
            arguments and the results are the same on all ranks.
        memory: bytes that the kernels may take, see :func:`exgrpo.kernels.linear_log_prob`; not in verl's function.

    Returns:
        tuple[Tensor, Tensor]: the log-probabilities ``[T]`` of T labels (0-d if reduced), and the entropies ``[T]``, in
        nats, float32 (float64 for float64 inputs).

    Note:
        As with verl's kernel, the caller must sum the ranks' gradients of ``hidden``, as Megatron's gather from the
        sequence-parallel region does. Here each rank has an equal share.
    """
    if reduction.lower() not in ("none", "sum", "mean"):
        raise ValueError(f"reduction: expected 'none', 'sum' or 'mean', got {reduction!r}")
    if dist_process_group is not None:
        ranks = dist_process_group.size()
        if ranks == 1:
            dist_process_group = None
        elif hidden.requires_grad:  # its gradient, which is complete on every rank, is divided among the ranks
            hidden = hidden.view_as(hidden)
            hidden.register_hook(lambda gradient: gradient / ranks)
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
    """Replace verl's fused kernels by those of this package, in this process.

    With ``use_fused_kernels=True`` every backend of verl then uses :mod:`exgrpo.kernels`: its ``linear_cross_entropy``
    (backend ``triton``, and Megatron's fused forward) and the forward of its ``FusedLinearForPPO`` (backends ``torch``
    and ``liger``), in loaded modules and later ones. The entropies of the latter become float32 like those of the
    former, instead of the hidden states' dtype. Calling it again has no effect. verl's workers are separate processes:
    docs/verl.md describes how to patch them.

    Args:
        memory: bytes that the kernels may take, see :func:`exgrpo.kernels.linear_log_prob`.

    Returns:
        Callable[[], None]: restores verl's own functions.

    Raises:
        ImportError: verl or one of its functions to be replaced is missing.
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
    """Return the replacements of verl's functions, cached by `memory` so that an earlier patch is recognized."""

    def forward(
        self: object, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Replace the forward of verl's FusedLinearForPPO; the results have the shape of ``input_ids``."""
        return linear_log_prob(hidden_states, vocab_weights, input_ids.long(), temperature=temperature, memory=memory)

    return (linear_cross_entropy if memory is None else partial(linear_cross_entropy, memory=memory)), forward


def _replace(owners: Iterable[Any], name: str, old: object, new: object) -> None:
    for owner in owners:
        if vars(owner).get(name) is old:
            setattr(owner, name, new)
