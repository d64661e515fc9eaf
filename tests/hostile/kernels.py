"""Hostile arguments of the kernels: calls with one argument that is known as wrong, and with numbers that are none.

Right calls of any kind are held against float64 in tests/kernels/test_combinations.py.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import sampled_from as of
from torch import Tensor

from exgrpo import kernels
from tests.hostile.judge import Trial
from tests.hostile.values import Draw, some

BACKENDS = ("auto", "torch", "cpu", "reference")
"""Those that compute on a CPU."""
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
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


def _call(draw: Draw) -> tuple[Function, Arguments]:
    """A right call."""
    tokens, dtype = draw(of(((1,), (7,), (0,), (2, 3), (0, 4), (2, 2, 2), ()))), draw(of(DTYPES))
    width, vocabulary = draw(of((1, 8))), draw(of((1, 40)))
    given: Arguments = {
        "hidden": torch.ones(*tokens, width, dtype=dtype),
        "weight": torch.ones(vocabulary, width, dtype=dtype),
        "target": torch.zeros(tokens, dtype=torch.int64),
        "backend": draw(of(BACKENDS)),
        "temperature": draw(of((0.1, 1, torch.ones(tokens), torch.tensor(0.7)))),
    }
    given |= draw(of(({}, {"bias": torch.ones(vocabulary)}, {"softcap": 30}, {"softcap": 1e-3})))
    if draw(st.booleans()):
        return kernels.linear_log_prob, given
    optional: dict[str, Any] = {"replayed": torch.ones(tokens, dtype=torch.bool), "clip": None, "beta": 3}
    optional |= {"mask": torch.ones(tokens, dtype=torch.bool), "entropy_coef": -1, "normalizer": torch.tensor(2)}
    given |= {name: optional[name] for name in draw(st.sets(of(sorted(optional))))}
    return kernels.linear_policy_loss, given | {"old_log_prob": -torch.ones(tokens), "advantage": torch.ones(tokens)}


def trial(what: str, function: Function, given: Arguments, **expected: Any) -> Trial:
    """One call; `expected` is that of the `Trial`."""
    return Trial(what, lambda: function(**given), **expected, errors=REFUSED)


def refused(what: str, function: Function, given: Arguments, *names: str) -> Trial:
    """One call with an argument that is wrong."""
    return trial(what, function, given, expected="refused", names=names)


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
        ("reward", kernels.group_advantage, group | {"reward": draw(of((no_tensor, zeros)))}),
        ("group", kernels.group_advantage, group | {"group": draw(of((no_tensor, zeros.long())))}),
    )
    name, function, given = draw(of(calls))
    return refused(f"wrong {name}", function, given, name)


WAYS = (*(_wrong_option, _wrong_tensor, _of_tokens) * 2, _wrong_target, _not_finite)
