"""Argument checks: every error names the argument, what came and what was expected.

Values that live on a GPU are checked on the GPU: an assertion is queued that fails the stream, as an index out of
range does in torch.nn.functional.cross_entropy, and nothing waits for it. With EXGRPO_CHECK=1 the check waits and
raises a ValueError with the value and its position.
"""

import math
import os
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LARGEST = int(sys.float_info.max)


def tensor(name: str, value: object, dtypes: Sequence[torch.dtype] = FLOATING) -> Tensor:
    """A tensor of one of the dtypes."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(value).__name__}")
    if value.layout != torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, got one of layout {value.layout}")
    if value.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"{name}: expected dtype {expected}, got {value.dtype}")
    return value


def shape(name: str, value: Tensor, *allowed: Sequence[int]) -> None:
    """A tensor of one of the shapes."""
    if all(tuple(value.shape) != tuple(expected) for expected in allowed):
        expected = " or ".join(str(list(expected)) for expected in allowed)
        raise ValueError(f"{name}: expected shape {expected}, got {list(value.shape)}")


def device(name: str, value: Tensor, like: Tensor, like_name: str) -> None:
    """A tensor on the device of another."""
    if value.device != like.device:
        raise ValueError(f"{name}: expected device {like.device}, that of {like_name}, got {value.device}")


def number(name: str, value: object, *, positive: bool = False, at_least: float | None = None) -> float:
    """A finite number, above zero or at least ``at_least`` if asked for."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    if isinstance(value, int) and abs(value) > LARGEST:
        raise ValueError(f"{name}: expected a number that float64 has, got an integer of {value.bit_length()} bits")
    if not math.isfinite(value):
        raise ValueError(f"{name}: expected a finite number, got {value}")
    if positive and value <= 0:
        raise ValueError(f"{name}: expected a number above 0, got {value}")
    if at_least is not None and value < at_least:
        raise ValueError(f"{name}: expected a number of at least {at_least}, got {value}")
    return float(value)


def index(name: str, value: object) -> None:
    """A number that a tensor of int64 can hold."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an integer, got {type(value).__name__}")
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{name}: expected an integer of 64 bits, got one of {value.bit_length()}")


def values(name: str, value: Tensor, good: Tensor, expected: str) -> None:
    """Every entry of ``value`` is good, a bool tensor of the same shape."""
    if torch.compiler.is_compiling():
        return
    message = f"{name}: expected {expected}"
    if value.is_cuda and os.environ.get("EXGRPO_CHECK", "0") == "0":
        torch._assert_async(good.all(), message)
        return
    if good.all():
        return
    bad = (~good).flatten().nonzero().squeeze(1)
    position, first = int(bad[0]), value.flatten()[bad[0]].item()
    counted = f"{bad.numel()} of {good.numel()} are not"
    raise ValueError(f"{message}; {counted}, the first is {first} at position {position}")


def head(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> torch.dtype:
    """hidden [..., D], weight [V, D], target [...], bias [V] on one device; returns the dtype of the products."""
    tensor("hidden", hidden)
    tensor("weight", weight)
    tensor("target", target, (torch.int64,))
    if hidden.dim() < 1:
        raise ValueError("hidden: expected shape [..., D], got a tensor without dimensions")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        expected = f"[V, {hidden.shape[-1]}], [V, D] with the D of hidden"
        raise ValueError(f"weight: expected shape {expected}, got {list(weight.shape)}")
    shape("target", target, hidden.shape[:-1])
    device("weight", weight, hidden, "hidden")
    device("target", target, hidden, "hidden")
    if bias is not None:
        tensor("bias", bias)
        shape("bias", bias, weight.shape[:1])
        device("bias", bias, hidden, "hidden")
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and torch.float64 not in (hidden.dtype, weight.dtype):
        return torch.get_autocast_dtype(kind)
    if weight.dtype != hidden.dtype:
        expected = f"{hidden.dtype}, that of hidden, outside torch.autocast"
        raise TypeError(f"weight: expected dtype {expected}, got {weight.dtype}")
    return hidden.dtype


def target_range(target: Tensor, vocabulary: int, ignore_index: int) -> None:
    """Every target in [0, vocabulary) or ignore_index."""
    if vocabulary == 0:
        raise ValueError("weight: expected at least one row, got an empty vocabulary")
    good = ((target >= 0) & (target < vocabulary)) | (target == ignore_index)
    values("target", target, good, f"values in [0, {vocabulary}) or {ignore_index} (ignored)")


def per_token(name: str, value: Tensor, like: Tensor, like_name: str) -> Tensor:
    """A tensor shaped like ``like``, or one entry per row of a [B, L] batch, expanded to it."""
    allowed = [like.shape]
    if like.dim() == 2:
        allowed.append(like.shape[:1])
    shape(name, value, *allowed)
    device(name, value, like, like_name)
    if value.dim() < like.dim():
        return value.unsqueeze(1).expand(like.shape)
    return value


def mask(value: Tensor, like: Tensor, like_name: str = "target") -> None:
    """A bool tensor shaped like ``like``."""
    tensor("mask", value, (torch.bool,))
    shape("mask", value, like.shape)
    device("mask", value, like, like_name)


def sequence_bounds(value: Tensor, target: Tensor) -> None:
    """[N + 1] bounds, ascending from 0 to the number of targets."""
    tensor("cu_seqlens", value, (torch.int32, torch.int64))
    if value.dim() != 1 or value.numel() == 0:
        raise ValueError(f"cu_seqlens: expected shape [N + 1], got {list(value.shape)}")
    device("cu_seqlens", value, target, "target")
    tokens = target.numel()
    after = torch.cat((value[1:], value.new_tensor([tokens])))
    good = value <= after
    good[0] &= value[0] == 0
    good[-1] &= value[-1] == tokens
    values("cu_seqlens", value, good, f"bounds ascending from 0 to {tokens}")


def temperature(value: float | Tensor, target: Tensor) -> float | Tensor:
    """A number above 0, or one per token, flattened."""
    if not isinstance(value, Tensor):
        return number("temperature", value, positive=True)
    tensor("temperature", value)
    shape("temperature", value, target.shape, ())
    device("temperature", value, target, "target")
    values("temperature", value, (value > 0) & value.isfinite(), "finite numbers above 0")
    return value.detach().expand(target.shape).reshape(-1)


def clip(value: tuple[float, float] | None) -> tuple[float, float] | None:
    """(low, high), both at least 0."""
    if value is None:
        return None
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise TypeError(f"clip: expected a pair (low, high) or None, got {value!r}")
    return number("clip[0]", value[0], at_least=0), number("clip[1]", value[1], at_least=0)


def normalizer(value: float | Tensor | None, like: Tensor) -> float | Tensor | None:
    """A number above 0 or a tensor with one."""
    if value is None:
        return None
    if not isinstance(value, Tensor):
        return number("normalizer", value, positive=True)
    tensor("normalizer", value, (*FLOATING, torch.int32, torch.int64))
    shape("normalizer", value, ())
    if value.device.type != "cpu":
        device("normalizer", value, like, "the tokens")
    values("normalizer", value, value > 0, "a number above 0")
    return value.detach()


def group(value: object) -> None:
    """A process group or None."""
    if value is None:
        return
    if not dist.is_available() or not isinstance(value, dist.ProcessGroup):
        raise TypeError(f"vocab_group: expected a torch.distributed process group, got {type(value).__name__}")
