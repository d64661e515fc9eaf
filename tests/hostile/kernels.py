"""Hostile arguments of the kernels: right calls against float64, and calls with one argument that is known as wrong."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import sampled_from as of
from torch import Tensor

from exgrpo import kernels
from exgrpo.kernels import reference
from tests.hostile.judge import Trial
from tests.hostile.values import Draw, some

BACKENDS = ("auto", "torch", "cpu", "reference")
"""Those that compute on a CPU."""
ROUNDING = {torch.float64: 2.0**-50, torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}
"""A unit in the last place of the logits, which a product of 16-bit numbers is rounded to."""
REFUSED = (TypeError, ValueError)
Arguments = dict[str, Any]
Function = Callable[..., Any]

NO_TENSORS: tuple[Any, ...] = (None, 1.0, "x", [1.0], {}, object(), torch.float32)
NO_NUMBERS: tuple[Any, ...] = ("x", [1], {}, math.nan, math.inf, -math.inf, True, 1j, object(), 10**400, -(10**400))
NO_POSITIVES: tuple[Any, ...] = (*NO_NUMBERS, 0, -1, 0.0, -0.0, -5e-324)
WRONG_OPTIONS: dict[str, tuple[Any, ...]] = {
    "temperature": (*NO_POSITIVES, None),
    "softcap": NO_POSITIVES,
    "backend": ("fast", "", None, 7, "CPU", [], object()),
    "vocab_group": ("world", 0, 7, [], object()),
    "ignore_index": ("x", None, 1.5, [], math.nan, object(), 2**63, 10**400),
}
WRONG_OF_LOSS: dict[str, tuple[Any, ...]] = {
    "entropy_coef": (*NO_NUMBERS, None),
    "beta": NO_POSITIVES,
    "normalizer": NO_POSITIVES,
    "clip": (0.2, "ab", (0.1,), (0.1, 0.2, 0.3), (-1, 0.2), (0.1, math.nan), ("a", "b"), {}, (10**400, 1), (None, 0.1)),
}
MAY_BE_NONE = ("bias", "replayed", "mask", "normalizer")


def _tensor(draw: Draw, *shape: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(some(draw, 0, 2**31 - 1))
    return scale * torch.randn(shape, generator=generator, dtype=torch.float64)


def head(draw: Draw) -> Arguments:
    """Right arguments of a head."""
    tokens = draw(of(((1,), (7,), (0,), (2, 3), (3, 1), (0, 4), (2, 2, 2), ())))
    width, vocabulary = draw(of((1, 3, 8, 33))), draw(of((1, 2, 17, 40)))
    dtype = draw(of((torch.float64, torch.float32, torch.float32, torch.bfloat16, torch.float16)))
    target = (_tensor(draw, *tokens).abs() * 1000).long() % vocabulary
    given: Arguments = {
        "hidden": _laid_out(draw, _tensor(draw, *tokens, width, scale=draw(of((0.0, 1.0, 1.0, 30.0)))).to(dtype)),
        "weight": _laid_out(draw, _tensor(draw, vocabulary, width).to(dtype)),
        "target": target.masked_fill(_tensor(draw, *tokens) > 1, -100),
        "backend": draw(of(BACKENDS)),
        "bias": draw(of((None, None, _tensor(draw, vocabulary).to(draw(of(tuple(ROUNDING))))))),
        "temperature": draw(of((None, None, 0.1, 2.0, 1, _tensor(draw, *tokens).exp(), torch.tensor(0.7)))),
        "softcap": draw(of((None, None, 1.0, 30, 1e-3))),
    }
    return {name: value for name, value in given.items() if value is not None}


def _laid_out(draw: Draw, tensor: Tensor) -> Tensor:
    """The same numbers, in memory in another way."""
    layouts = [tensor, torch.stack((tensor, tensor), -1)[..., 0]]
    return draw(of([*layouts, tensor.mT.contiguous().mT] if tensor.dim() > 1 else layouts))


def tokens(draw: Draw, target: Tensor) -> Arguments:
    """Right arguments of the objective."""
    given: Arguments = {"old_log_prob": -_tensor(draw, *target.shape).abs(), "advantage": _tensor(draw, *target.shape)}
    if target.dim() == 2 and draw(st.booleans()):
        given["advantage"] = _tensor(draw, target.shape[0])
    given = {name: value.to(draw(of((torch.float32, torch.float64)))) for name, value in given.items()}
    optional: dict[str, tuple[Any, ...]] = {name: (_tensor(draw, *target.shape) > 0,) for name in ("replayed", "mask")}
    optional |= {"clip": (None, (0.1, 0.3), [0, 0]), "beta": (None, 0.05, 3), "entropy_coef": (0.01, -1)}
    optional["normalizer"] = (7, 0.5, torch.tensor(3.0), torch.tensor(2))
    return given | {name: draw(of(optional[name])) for name in draw(st.sets(of(sorted(optional))))}


def exact(given: Arguments) -> Arguments:
    """The same arguments in float64, for the reference, which rounds nothing."""
    double = lambda value: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value  # noqa: E731
    return {name: double(value) for name, value in given.items() if name != "backend"}


def logit_error(given: Arguments) -> float:
    """How far logits may be off: the sum of all products' sizes, in units of the last place, over the temperature."""
    hidden, weight = given["hidden"].double().abs(), given["weight"].double().abs()
    largest = float((hidden @ weight.T).max()) if hidden.numel() else 0.0
    largest += float(given["bias"].abs().max()) if "bias" in given else 0.0
    coolest = min(torch.as_tensor(given.get("temperature", 1.0)).flatten().tolist(), default=1.0)
    terms = hidden.shape[-1] + 4 if given["hidden"].dtype.itemsize > 2 else 3
    return largest * terms * ROUNDING[given["hidden"].dtype] / coolest


def other_than_exact(given: Arguments, function: Function, *names: str) -> Callable[[Any], str]:
    """Says what is wrong with results.

    A log-prob moves by the error of two logits. An entropy's derivative by the logits is p (log p + H), the sum of
    which is at most twice the logarithm of the vocabulary. A loss is compared in float64 alone.
    """
    double = given["hidden"].dtype == torch.float64

    def wrong(found: Any) -> str:
        right, error = function(**exact(given)), logit_error(given)
        bounds = {"log_prob": 2 * error, "entropy": error * (2 + 4 * math.log(given["weight"].shape[0]))}
        bounds["loss"] = 2 * error + 1e-9 * float(right.ratio.abs().sum()) if "loss" in names else 0.0
        for name in names if double else [name for name in names if name != "loss"]:
            one, other = getattr(found, name), getattr(right, name)
            if one.shape != other.shape:
                return f"{name} of shape {list(one.shape)} instead of {list(other.shape)}"
            off = (one.double() - other).abs() - bounds[name] - (1e-9 if double else 2e-5) * (1 + other.abs())
            if not (off <= 0).all():
                return f"{name} is {one} instead of {other}"
        return ""

    return wrong


def trial(what: str, function: Function, given: Arguments, **expected: Any) -> Trial:
    """One call; `expected` is that of the `Trial`."""
    return Trial(what, lambda: function(**given), **expected, errors=REFUSED)


def refused(what: str, function: Function, given: Arguments, *names: str) -> Trial:
    """One call with an argument that is wrong."""
    return trial(what, function, given, expected="refused", names=names)


def _call(draw: Draw) -> tuple[Function, Arguments]:
    given = head(draw)
    if draw(st.booleans()):
        return kernels.linear_log_prob, given
    return kernels.linear_policy_loss, given | tokens(draw, given["target"])


def _right(draw: Draw, folder: Path) -> Trial:
    function, given = _call(draw)
    if function is kernels.linear_log_prob:
        wrong = other_than_exact(given, reference.linear_log_prob, "log_prob", "entropy")
    else:
        wrong = other_than_exact(given, reference.linear_policy_loss, "log_prob", "loss")
    return trial("a right call", function, given, expected="right", wrong=wrong)


def _wrong_option(draw: Draw, folder: Path) -> Trial:
    function, given = _call(draw)
    options = WRONG_OPTIONS if function is kernels.linear_log_prob else WRONG_OPTIONS | WRONG_OF_LOSS
    name = draw(of(sorted(options)))
    return refused(f"wrong {name}", function, given | {name: draw(of(options[name]))}, name)


def _wrong_tensor(draw: Draw, folder: Path) -> Trial:
    """A tensor of another dtype, shape, device or layout, or none."""
    function, given = _call(draw)
    name = draw(of([name for name, value in given.items() if isinstance(value, Tensor) and value.dim()]))
    right = given[name]
    wrong: list[Any] = [right.to("meta"), right.to(torch.complex64), right[None, None, None], right.to(torch.uint8)]
    wrong += [right.new_zeros(3, 5, 7, 2), right.to_sparse()]
    wrong += [value for value in NO_TENSORS if value is not None or name not in MAY_BE_NONE]
    wrong = [value for value in wrong if name != "temperature" or not isinstance(value, float)]
    others = {"hidden": ("weight", "target"), "target": ("old_log_prob", "advantage", "replayed", "mask")}
    return refused(f"wrong {name}", function, given | {name: draw(of(wrong))}, name, *others.get(name, ()))


def _wrong_target(draw: Draw, folder: Path) -> Trial:
    function, given = _call(draw)
    target = given["target"] = given["target"].clone()
    if not target.numel():
        return trial("no token", function, given, expected="right")
    wrong = draw(of((-1, -99, given["weight"].shape[0], 2**31, 2**62, -(2**63))))
    target.view(-1)[some(draw, 0, target.numel() - 1)] = wrong
    return refused("target out of range", function, given, "target")


def _not_finite(draw: Draw, folder: Path) -> Trial:
    """Numbers that are none: nobody promises a result, only that there is one of the right shape.

    An old log-prob of -inf is refused.
    """
    function, given = _call(draw)
    names = [name for name in ("hidden", "weight", "bias", "old_log_prob", "advantage") if name in given]
    name = draw(of([name for name in names if given[name].numel()] or ["weight"]))
    value = given[name] = given[name].clone().contiguous()
    numbers = (math.nan, math.inf, 1e38) if name == "old_log_prob" else (math.nan, math.inf, 1e38, -math.inf)
    value.view(-1)[some(draw, 0, value.numel() - 1)] = draw(of(numbers))
    shape = given["target"].shape
    wrong = lambda found: "" if found.log_prob.shape == shape else f"shape {found.log_prob.shape}"  # noqa: E731
    return trial(f"no number in {name}", function, given, expected="right", wrong=wrong)


def _of_tokens(draw: Draw, folder: Path) -> Trial:
    """The functions of tokens alone, with one wrong argument."""
    zeros, no_tensor = torch.zeros(2, 3), draw(of(NO_TENSORS))
    pair = {"log_prob": zeros, "old_log_prob": zeros}
    sequences = {"hidden": torch.zeros(5, 3), "weight": torch.zeros(7, 3), "target": torch.zeros(5, dtype=torch.int64)}
    bounds = torch.tensor(draw(of(([0, 6], [-1, 5], [0, 2**40, 5]))))
    group = {"reward": torch.zeros(3), "group": torch.zeros(3, dtype=torch.int64), "scale_by_std": True}
    calls: tuple[tuple[str, Function, Arguments], ...] = (
        ("beta", kernels.shape_ratio, {"ratio": zeros, "beta": draw(of((*NO_POSITIVES, None)))}),
        ("ratio", kernels.shape_ratio, {"ratio": no_tensor, "beta": 0.1}),
        ("log_prob", kernels.importance_ratio, pair | {"log_prob": no_tensor}),
        ("old_log_prob", kernels.importance_ratio, pair | {"old_log_prob": zeros[0]}),
        ("entropy", kernels.policy_loss, pair | {"advantage": zeros, "entropy_coef": 1}),
        ("advantage", kernels.policy_loss, pair | {"advantage": zeros[0]}),
        ("cu_seqlens", kernels.sequence_entropy, sequences | {"cu_seqlens": bounds}),
        (
            "reward",
            kernels.group_advantage,
            group | {"reward": draw(of((no_tensor, zeros, torch.zeros(3, device="meta"))))},
        ),
        ("group", kernels.group_advantage, group | {"group": draw(of((no_tensor, zeros.long())))}),
    )
    name, function, given = draw(of(calls))
    return refused(f"wrong {name}", function, given, name)


WAYS = (*(_right, _wrong_option, _wrong_tensor, _right, _wrong_option, _wrong_tensor, _right), _wrong_target)
WAYS = (*WAYS, _not_finite, _of_tokens, _of_tokens)
