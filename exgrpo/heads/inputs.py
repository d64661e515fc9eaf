"""Kernel arguments from heads with adapters, tied or sharded weights; quantised heads are refused."""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from exgrpo.kernels.checks import FLOATING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class HeadInputs(NamedTuple):
    """Arguments of the kernels.

    Attributes:
        hidden: hidden states, ``[..., D]``, or ``[..., D + r]`` with adapters of joint rank r.
        weight: ``[V, D]`` or ``[V, D + r]``.
        bias: ``[V]`` or None.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None


class VocabShardInputs(NamedTuple):
    """Arguments of the kernels for a head sharded along V.

    Attributes:
        weight: this rank's rows, ``[V_rank, D]``, a plain tensor whose gradient flows to the DTensor.
        bias: this rank's entries, ``[V_rank]``, or None.
        vocab_group: process group of the shards, in the order of their rows.
    """

    weight: Tensor
    bias: Tensor | None
    vocab_group: "ProcessGroup"


def head_inputs(head: nn.Module, hidden: Tensor) -> HeadInputs:
    r"""Return hidden states and head parameters as the kernels take them.

    A plain layer's own parameters are returned, tied or not; no gradient of a frozen one is computed. With LoRA on the
    head, :math:`h W^\top + s\,\mathrm{drop}(h) A^\top B^\top` is one product of longer rows,
    :math:`[h, s\,\mathrm{drop}(h) A^\top]\,[W, B]^\top`: dropout is unchanged, gradients flow to A and B, and a small
    update is not lost in the rounding of :math:`W + s B A`. It costs a copy of W per call, and a gradient of its size.

    If an engine such as ZeRO-3 or FSDP gathers parameters, call it inside the forward of the head itself, as
    :func:`exgrpo.integrations.transformers.patch_lm_head` does.

    Args:
        head: ``torch.nn.Linear`` or another layer with a weight ``[V, D]``, LoRA's layer of peft, or its wrapper for
            ``modules_to_save``.
        hidden: input of the head, ``[..., D]``.

    Returns:
        HeadInputs: ``hidden``, ``weight`` and ``bias`` for :func:`exgrpo.kernels.linear_log_prob` and
        :func:`exgrpo.kernels.linear_policy_loss`.

    Raises:
        TypeError: the head is quantised, or has no weight ``[V, D]``.
        RuntimeError: this rank has only a part of the weight: it is not gathered (ZeRO-3, FSDP) or sharded.
        ValueError: an adapter is not plain LoRA.

    Example::

        >>> head = torch.nn.Linear(8, 32, bias=False)
        >>> hidden, target = torch.randn(4, 8), torch.randint(32, (4,))
        >>> inputs = head_inputs(head, hidden)
        >>> log_prob, entropy = linear_log_prob(inputs.hidden, inputs.weight, target, bias=inputs.bias)
    """
    if hasattr(head, "modules_to_save"):
        return head_inputs(_saved_module(head), hidden)
    if hasattr(head, "lora_A"):
        return _with_adapters(head, hidden)
    if hasattr(head, "base_layer"):
        raise ValueError(f"head: {_name(head)} is no plain LoRA; leave lm_head out of target_modules, or merge it")
    return HeadInputs(hidden, *_parameters(head))


def vocab_shard(weight: Tensor, bias: Tensor | None = None) -> VocabShardInputs:
    """Return the local shard of a head that tensor parallelism has split along V, and its process group.

    All ranks must hold the *same* hidden states. Under FSDP they differ: call the model; its forward gathers the head.

    Args:
        weight: DTensor ``[V, D]`` with placement ``Shard(0)`` on a mesh of one dimension.
        bias: DTensor ``[V]`` with the same placement, or None.

    Returns:
        VocabShardInputs: ``weight``, ``bias`` and ``vocab_group`` for the kernels' arguments of these names. Gradients
        flow to the DTensors with their placement.

    Raises:
        TypeError: an argument is no DTensor.
        ValueError: the placement or mesh is a different one.

    Example::

        weight, bias, group = vocab_shard(model.lm_head.weight)
        result = linear_log_prob(hidden, weight, target, bias=bias, vocab_group=group)
    """
    from torch.distributed.tensor import DTensor, Shard

    for name, value in (("weight", weight), ("bias", bias)):
        if value is None:
            continue
        if not isinstance(value, DTensor):
            raise TypeError(
                f"{name}: expected a DTensor, got {type(value).__name__}; a plain tensor needs no vocab_shard"
            )
        if value.placements != (Shard(0),):
            raise ValueError(
                f"{name}: expected the placement (Shard(dim=0),) on a mesh of one dimension, got {value.placements}; "
                "use redistribute, or to_local() where it is replicated"
            )
    assert isinstance(weight, DTensor)
    if isinstance(bias, DTensor) and bias.device_mesh != weight.device_mesh:
        raise ValueError(f"bias: expected the mesh of weight, {weight.device_mesh}, got {bias.device_mesh}")
    local_bias = bias.to_local() if isinstance(bias, DTensor) else None
    return VocabShardInputs(weight.to_local(), local_bias, weight.device_mesh.get_group())


def is_partitioned(parameter: Tensor) -> bool:
    """True if this rank has only its ZeRO-3 partition of the parameter."""
    whole = getattr(parameter, "ds_shape", None)
    return whole is not None and tuple(whole) != tuple(parameter.shape)


def _saved_module(wrapper: Any) -> nn.Module:
    """Return the active module of peft's wrapper for modules_to_save."""
    modules, active = wrapper.modules_to_save, wrapper.active_adapters
    if wrapper.disable_adapters or not active or active[0] not in modules:
        return wrapper.original_module
    return modules[active[0]]


def _with_adapters(layer: Any, hidden: Tensor) -> HeadInputs:
    if layer.disable_adapters and layer.merged:
        raise ValueError("head: adapters are merged and disabled at once; call unmerge_adapter() first")
    active = [] if layer.disable_adapters or layer.merged else [a for a in layer.active_adapters if a in layer.lora_A]
    for adapter in active:
        if adapter in layer.lora_variant:
            kind = type(layer.lora_variant[adapter]).__name__
            raise ValueError(f"head: {kind} of {adapter!r} is no plain LoRA; leave lm_head out of target_modules")
    # Call the modules before reading any weight: after a call, ZeRO-3 may release other gathered weights.
    low = [_low_rank(layer, adapter, hidden) for adapter in active]
    weight, bias = _parameters(layer.base_layer)
    if not active:
        return HeadInputs(hidden, weight, bias)
    weights = [weight]
    for adapter in active:
        up_weight, up_bias = _parameters(layer.lora_B[adapter])
        weights.append(up_weight.to(weight.dtype))
        if up_bias is not None:
            scaled = up_bias * layer.scaling[adapter]
            bias = scaled if bias is None else bias + scaled
    return HeadInputs(torch.cat([hidden, *low], -1), torch.cat(weights, -1), bias)


def _low_rank(layer: Any, adapter: str, hidden: Tensor) -> Tensor:
    """Return the scaled input of the adapter's B, [..., r]."""
    down = layer.lora_A[adapter]
    low = down(layer.lora_dropout[adapter](hidden.to(down.weight.dtype)))
    return (low * layer.scaling[adapter]).to(hidden.dtype)


def _parameters(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of a layer; raise if they are incomplete or quantised."""
    weight, bias = getattr(layer, "weight", None), getattr(layer, "bias", None)
    if not isinstance(weight, Tensor):
        raise TypeError(f"head: {_name(layer)} has no weight [V, D]; {_UNQUANTISED}")
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None:
            _refuse_parts(f"{_name(layer)}.{name}", value)
            _refuse_quantised(f"{_name(layer)}.{name}", value)
    return weight, bias


_UNQUANTISED = (
    "expected a linear layer in floating point: leave the head out of quantisation "
    "(llm_int8_skip_modules or modules_to_not_convert=['lm_head']), or dequantise it"
)


def _refuse_parts(name: str, value: Any) -> None:
    if is_partitioned(value):
        raise RuntimeError(
            f"{name}: ZeRO-3 has it partitioned, {list(value.shape)} is here; use it inside the forward of its own "
            "module, as patch_lm_head does, or without gradients within deepspeed.zero.GatheredParameters"
        )
    if hasattr(value, "placements"):
        raise RuntimeError(
            f"{name}: a DTensor placed {value.placements}; under FSDP call the model, whose forward gathers its head; "
            "split over tensor-parallel ranks with the same hidden states, pass what "
            "exgrpo.heads.vocab_shard returns to the kernels"
        )
    if value.numel() == 0:
        raise RuntimeError(f"{name}: it is empty, {list(value.shape)}; use it where its engine has gathered it")


def _refuse_quantised(name: str, value: Tensor) -> None:
    if value.dtype not in FLOATING or type(value) not in (Tensor, nn.Parameter):
        raise TypeError(f"{name}: {type(value).__name__} of {value.dtype} is quantised; {_UNQUANTISED}")


def _name(layer: nn.Module) -> str:
    return type(layer).__name__
