"""Argument checks: every error names the argument, what came and what was expected.

Values that live on a GPU are checked on the GPU: an assertion is queued that fails the stream, as an index out of
range does in torch.nn.functional.cross_entropy, and nothing waits for it. With EXGRPO_CHECK=1 the check waits and
raises a ValueError with the value and its position. Where there are no values yet, under torch.compile and for tensors
that are fake or on the meta device, an operator checks them when there are.
"""

import math
import os
import sys
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.library import custom_op

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LARGEST = sys.float_info.max


def tensor(name: str, value: object, dtypes: Sequence[torch.dtype] = FLOATING) -> Tensor:
    """Return a tensor, checked to have one of the dtypes."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(value).__name__}")
    if value.layout != torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, got one of layout {value.layout}")
    if value.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"{name}: expected dtype {expected}, got {value.dtype}")
    return value


def shape(name: str, value: Tensor, *allowed: Sequence[int]) -> None:
    """Check that a tensor has one of the shapes."""
    if all(tuple(value.shape) != tuple(expected) for expected in allowed):
        expected = " or ".join(str(list(expected)) for expected in allowed)
        raise ValueError(f"{name}: expected shape {expected}, got {list(value.shape)}")


def device(name: str, value: Tensor, like: Tensor, like_name: str) -> None:
    """Check that a tensor is on the device of another."""
    if value.device != like.device:
        raise ValueError(f"{name}: expected device {like.device}, that of {like_name}, got {value.device}")


def alike(name: str, value: object, like: Tensor, like_name: str, dtypes: Sequence[torch.dtype] = FLOATING) -> None:
    """Check dtype, shape and device of a tensor, the latter two against another."""
    found = tensor(name, value, dtypes)
    shape(name, found, like.shape)
    device(name, found, like, like_name)


def number(
    name: str, value: object, *, positive: bool = False, at_least: float | None = None, at_most: float | None = None
) -> float:
    """Return a finite number, checked to be above zero or within bounds if asked for."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    if isinstance(value, int) and abs(value) > LARGEST:
        raise ValueError(f"{name}: expected a number that float64 has, got an integer of {value.bit_length()} bits")
    expected = ""
    if not -LARGEST <= value <= LARGEST:  # math.isfinite takes no number that a compiler has made symbolic
        expected = "a finite number"
    elif positive and value <= 0:
        expected = "a number above 0"
    elif at_least is not None and value < at_least:
        expected = f"a number of at least {at_least}"
    elif at_most is not None and value > at_most:
        expected = f"a number of at most {at_most}"
    if expected:
        got = "" if torch.compiler.is_compiling() else f", got {value}"  # a compiler cannot print a symbol
        raise ValueError(f"{name}: expected {expected}{got}")
    return float(value)


def index(name: str, value: object, *, positive: bool = False) -> int:
    """Return a number that a tensor of int64 can hold, checked to be above zero if asked for."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an integer, got {type(value).__name__}")
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{name}: expected an integer of 64 bits, got one of {value.bit_length()}")
    if positive and value <= 0:
        raise ValueError(f"{name}: expected an integer above 0, got {value}")
    return value


def counts(value: tuple[int, int] | None, tokens: int) -> tuple[int, int] | None:
    """Return the checked numbers of tokens that take part and of those with a gradient."""
    if value is None:
        return None
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise TypeError(f"counts: expected a pair (that take part, with a gradient) or None, got {value!r}")
    all_of, some = index("counts[0]", value[0]), index("counts[1]", value[1])
    if not 0 <= some <= all_of <= tokens:
        raise ValueError(f"counts: expected {tokens} (tokens) >= counts[0] >= counts[1] >= 0, got {(all_of, some)}")
    return all_of, some


def values(name: str, value: Tensor, good: Tensor, expected: str, *numbers: int) -> Tensor:
    """Return ``value``, checked that all of ``good`` [like value] is True; ``expected`` has ``{}`` for numbers.

    Compute with what this returns: a compiler leaves out a check whose result is not used.
    """
    message = f"{name}: expected {expected}"
    if _without_values(value):
        return checked(value, good, message, numbers)
    _check(value, good, message, numbers)
    return value


def _without_values(value: Tensor) -> bool:
    """True if it is a compiler's, without memory, or may stand for several, as in torch.vmap."""
    if torch.compiler.is_compiling() or type(value) is not Tensor or value.is_meta:
        return True
    return torch._C._are_functorch_transforms_active()


CHECKED = "(Tensor value, Tensor good, str message, SymInt[] numbers) -> Tensor"


@custom_op("exgrpo::checked", mutates_args=(), schema=CHECKED)
def checked(value: Tensor, good: Tensor, message: str, numbers: Sequence[int]) -> Tensor:
    """Return a copy of ``value`` if all of it is good."""
    _check(value, good, message, numbers)
    return value.clone()


@checked.register_fake
def _(value: Tensor, good: Tensor, message: str, numbers: Sequence[int]) -> Tensor:
    return torch.empty_like(value)


def _check(value: Tensor, good: Tensor, message: str, numbers: Sequence[int]) -> None:
    if value.is_cuda and os.environ.get("EXGRPO_CHECK", "0") == "0":
        torch._assert_async(good.all(), message.format(*numbers))
        return
    if good.all():
        return
    bad = (~good).flatten().nonzero().squeeze(1)
    position, first = int(bad[0]), value.flatten()[bad[0]].item()
    counted = f"{bad.numel()} of {good.numel()} are not"
    raise ValueError(f"{message.format(*numbers)}; {counted}, the first is {first} at position {position}")


def head(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> torch.dtype:
    """Check hidden [..., D], weight [V, D], target [...] and bias [V]; return the dtype of the products."""
    tensor("hidden", hidden)
    tensor("weight", weight)
    tensor("target", target, (torch.int64,))
    if hidden.dim() < 1:
        raise ValueError("hidden: expected shape [..., D], got a tensor without dimensions")
    if hidden.shape[-1] == 0:
        raise ValueError(f"hidden: expected shape [..., D] with a D of at least 1, got {list(hidden.shape)}")
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
    if kind != "meta" and torch.is_autocast_enabled(kind) and torch.float64 not in (hidden.dtype, weight.dtype):
        return torch.get_autocast_dtype(kind)
    if weight.dtype != hidden.dtype:
        expected = f"{hidden.dtype}, that of hidden, outside torch.autocast"
        raise TypeError(f"weight: expected dtype {expected}, got {weight.dtype}")
    return hidden.dtype


def weight_grad(value: Tensor | None, weight: Tensor) -> None:
    """Check that the gradient of a weight can be added to a tensor, if one is given."""
    if value is None:
        return
    if torch.compiler.is_compiling():
        raise NotImplementedError("weight_grad: expected None under torch.compile, where autograd gets the gradient")
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    alike("weight_grad", value, weight, "weight", (dtype,))
    if value.requires_grad or not value.is_contiguous():
        raise ValueError("weight_grad: expected a contiguous tensor that needs no gradient itself")


def real(name: str, value: Tensor) -> None:
    """Check that a tensor has values."""
    if value.is_meta or isinstance(value, FakeTensor):
        got = f"a {type(value).__name__} on {value.device}"
        raise ValueError(f"{name}: expected a tensor with values, as backend='reference' reads them, got {got}")


def target_range(target: Tensor, vocabulary: int, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return the checked targets, and which of them are ignore_index."""
    if vocabulary == 0:
        raise ValueError("weight: expected at least one row, got an empty vocabulary")
    ignored = target == ignore_index
    good = (target.clamp(0, vocabulary - 1) == target) | ignored
    return values("target", target, good, "values in [0, {}) or {} (ignored)", vocabulary, ignore_index), ignored


def per_token(name: str, value: Tensor, like: Tensor, like_name: str) -> Tensor:
    """Return a tensor shaped like ``like``, or with one entry per row of a [B, L] batch, expanded to it."""
    allowed = [like.shape]
    if like.dim() == 2:
        allowed.append(like.shape[:1])
    shape(name, value, *allowed)
    device(name, value, like, like_name)
    if value.dim() < like.dim():
        return value.unsqueeze(1).expand(like.shape)
    return value


def written(old_log_prob: Tensor, left_out: Callable[[], Tensor | None]) -> Tensor:
    """Return old log-probabilities, checked to be -inf only where a token is left out.

    On a GPU it is a check for EXGRPO_CHECK=1 alone: it would take launches, and the ratio is bounded.
    """
    if old_log_prob.is_cuda and os.environ.get("EXGRPO_CHECK", "0") == "0":
        return old_log_prob
    if not _without_values(old_log_prob) and (old_log_prob.numel() == 0 or old_log_prob.min().item() > -math.inf):
        return old_log_prob  # without a mask, which takes time that a small call would feel
    good, allowed = old_log_prob != -math.inf, left_out()
    good = good if allowed is None else good | allowed
    return values("old_log_prob", old_log_prob, good, "no -inf, which is impossible for a token that was written")


def sequence_bounds(value: Tensor, target: Tensor) -> Tensor:
    """Return [N + 1] bounds, checked to ascend from 0 to the number of targets."""
    tensor("cu_seqlens", value, (torch.int32, torch.int64))
    if value.dim() != 1 or value.numel() == 0:
        raise ValueError(f"cu_seqlens: expected shape [N + 1], got {list(value.shape)}")
    device("cu_seqlens", value, target, "target")
    return _ascending("cu_seqlens", value, target.numel())


def _ascending(name: str, value: Tensor, end: int) -> Tensor:
    after = torch.cat((value[1:], value.new_full((1,), end)))
    good = value <= after
    good[0] &= value[0] == 0
    good[-1] &= value[-1] == end
    return values(name, value, good, "bounds ascending from 0 to {}", end)


def allowed_tokens(value: object, target: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Return (ids [M] int32, offsets [T + 1] int64), checked: different ids in a set, the token's target among them.

    ``target`` [T] is below 0 where a token is left out. On a GPU the last two are checks for EXGRPO_CHECK=1 alone: they
    would take a sort.
    """
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise TypeError(f"allowed_tokens: expected a pair (ids, offsets) or None, got {type(value).__name__}")
    ids, offsets = (
        tensor("allowed_tokens[0]", value[0], (torch.int32,)),
        tensor("allowed_tokens[1]", value[1], (torch.int64,)),
    )
    if ids.dim() != 1:
        raise ValueError(f"allowed_tokens[0]: expected shape [M], the ids of all tokens, got {list(ids.shape)}")
    shape("allowed_tokens[1]", offsets, (target.numel() + 1,))
    device("allowed_tokens[0]", ids, target, "target")
    device("allowed_tokens[1]", offsets, target, "target")
    offsets = _ascending("allowed_tokens[1]", offsets, ids.numel())
    ids = values("allowed_tokens[0]", ids, (ids >= 0) & (ids < vocabulary), "ids in [0, {})", vocabulary)
    if ids.is_cuda and os.environ.get("EXGRPO_CHECK", "0") == "0":
        return ids, offsets
    if _without_values(ids) or ids.numel() <= CHECKED_AT_ONCE:
        different, found = _sound(ids, offsets, target, vocabulary)
    else:
        steps = torch.arange(0, ids.numel(), CHECKED_AT_ONCE, device=ids.device)
        cuts = sorted({0, *torch.searchsorted(offsets, steps).tolist(), target.numel()})
        own = [slice(*bounds) for bounds in offsets[cuts].unfold(0, 2, 1).tolist()]
        parts = [
            _sound(ids[pairs], offsets[begin : end + 1] - pairs.start, target[begin:end], vocabulary)
            for pairs, begin, end in zip(own, cuts[:-1], cuts[1:], strict=True)
        ]
        different, found = (torch.cat(flags) for flags in zip(*parts, strict=True))
    ids = values("allowed_tokens[0]", ids, different, "different ids in the set of each token")
    values("target", target, found, "ids among their allowed tokens")
    return ids, offsets


CHECKED_AT_ONCE = 1 << 16
"""Ids that are checked together, each in some 64 bytes."""


def _sound(ids: Tensor, offsets: Tensor, target: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Which ids are in their set for the first time, and which tokens have a target of their set, or need none."""
    token = torch.searchsorted(offsets, torch.arange(ids.numel(), device=ids.device), right=True) - 1
    ordered, place = (token * vocabulary + ids).sort(stable=True)
    different = torch.ones_like(ids, dtype=torch.bool)
    different[place[1:]] = ordered[1:] != ordered[:-1]
    found = torch.cat((offsets.new_zeros(1), (ids == target[token]).cumsum(0)))[offsets].diff()
    return different, (target < 0) | (offsets.diff() == 0) | (found > 0)


def temperature(value: float | Tensor, target: Tensor) -> float | Tensor:
    """Return a number above 0, or one per token, flattened."""
    if not isinstance(value, Tensor):
        return number("temperature", value, positive=True)
    tensor("temperature", value)
    shape("temperature", value, target.shape, ())
    device("temperature", value, target, "target")
    value = value.detach()
    value = values("temperature", value, (value > 0) & value.isfinite(), "finite numbers above 0")
    return value.expand(target.shape).reshape(-1)


def clip(value: tuple[float, float] | None) -> tuple[float, float] | None:
    """Return (low, high), both at least 0, low at most 1."""
    if value is None:
        return None
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise TypeError(f"clip: expected a pair (low, high) or None, got {value!r}")
    return number("clip[0]", value[0], at_least=0, at_most=1), number("clip[1]", value[1], at_least=0)


def normalizer(value: float | Tensor | None, like: Tensor) -> float | Tensor | None:
    """Return a number above 0 or a tensor with one."""
    if value is None:
        return None
    if not isinstance(value, Tensor):
        return number("normalizer", value, positive=True)
    tensor("normalizer", value, (*FLOATING, torch.int32, torch.int64))
    shape("normalizer", value, ())
    if value.device.type != "cpu":
        device("normalizer", value, like, "the tokens")
    value = value.detach()
    return values("normalizer", value, value > 0, "a number above 0")


def group(value: object) -> None:
    """Check for a process group or None."""
    if value is None:
        return
    if not dist.is_available() or not isinstance(value, dist.ProcessGroup):
        raise TypeError(f"vocab_group: expected a torch.distributed process group, got {type(value).__name__}")
