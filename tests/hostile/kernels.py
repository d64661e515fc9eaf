"""Hostile arguments of the kernels: right calls against float64, and calls with one argument that is known as wrong."""

import math
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exgrpo import kernels
from exgrpo.kernels import reference
from tests.hostile.judge import Trial

BACKENDS = ("auto", "torch", "cpu", "reference")
"""Those that compute on a CPU."""
ROUNDING = {torch.float64: 2.0**-50, torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}
"""A unit in the last place of the logits, which a product of 16-bit numbers is rounded to."""
REFUSED = (TypeError, ValueError)
Arguments = dict[str, Any]

NO_TENSORS: tuple[Any, ...] = (None, 1.0, "x", [1.0], {}, object(), torch.float32)
NO_NUMBERS: tuple[Any, ...] = ("x", [1], {}, math.nan, math.inf, -math.inf, True, 1j, object(), 10**400, -(10**400))
NO_POSITIVES: tuple[Any, ...] = (*NO_NUMBERS, 0, -1, 0.0, -0.0, -5e-324, None)
WRONG_OPTIONS: dict[str, tuple[Any, ...]] = {
    "temperature": NO_POSITIVES,
    "softcap": tuple(value for value in NO_POSITIVES if value is not None),
    "entropy_coef": (*NO_NUMBERS, None),
    "beta": tuple(value for value in NO_POSITIVES if value is not None),
    "normalizer": tuple(value for value in NO_POSITIVES if value is not None),
    "clip": (0.2, "ab", (0.1,), (0.1, 0.2, 0.3), (-1, 0.2), (0.1, math.nan), ("a", "b"), {}, (10**400, 1), (None, 0.1)),
    "backend": ("fast", "", None, 7, "CPU", [], object()),
    "vocab_group": ("world", 0, 7, [], object()),
    "ignore_index": ("x", None, 1.5, [], math.nan, object(), 2**63, 10**400),
}
TOKENS = ("old_log_prob", "advantage", "replayed", "mask")


def _tensor(rng: random.Random, *shape: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    return scale * torch.randn(shape, generator=generator, dtype=torch.float64)


def head(rng: random.Random) -> Arguments:
    """Right arguments of a head."""
    tokens = rng.choice(((0,), (1,), (7,), (2, 3), (3, 1), (0, 4), (2, 2, 2), ()))
    width, vocabulary = rng.choice((1, 3, 8, 33)), rng.choice((1, 2, 17, 40))
    dtype = rng.choice((torch.float64, torch.float32, torch.float32, torch.bfloat16, torch.float16))
    scale = rng.choice((0.0, 1.0, 1.0, 30.0))
    target = torch.randint(vocabulary, tokens, generator=torch.Generator().manual_seed(rng.randrange(2**31)))
    given: Arguments = {
        "hidden": _laid_out(rng, _tensor(rng, *tokens, width, scale=scale).to(dtype)),
        "weight": _laid_out(rng, _tensor(rng, vocabulary, width).to(dtype)),
        "target": target.masked_fill(_tensor(rng, *tokens) > 1, -100),
        "backend": rng.choice(BACKENDS),
    }
    if rng.random() < 0.3:
        given["bias"] = _tensor(rng, vocabulary).to(rng.choice(tuple(ROUNDING)))
    if rng.random() < 0.4:
        given["temperature"] = rng.choice((0.1, 2.0, 1, _tensor(rng, *tokens).exp(), torch.tensor(0.7)))
    if rng.random() < 0.3:
        given["softcap"] = rng.choice((1.0, 30, 1e-3))
    return given


def _laid_out(rng: random.Random, tensor: Tensor) -> Tensor:
    """The same numbers, in memory in another way."""
    match rng.randrange(4):
        case 0 if tensor.dim() > 1:
            return tensor.mT.contiguous().mT
        case 1:
            return torch.stack((tensor, tensor), -1)[..., 0]
    return tensor


def tokens(rng: random.Random, target: Tensor) -> Arguments:
    """Right arguments of the objective."""
    given: Arguments = {"old_log_prob": -_tensor(rng, *target.shape).abs(), "advantage": _tensor(rng, *target.shape)}
    if target.dim() == 2 and rng.random() < 0.5:
        given["advantage"] = given["advantage"][:, 0] if target.shape[1] else _tensor(rng, target.shape[0])
    given = {name: value.to(rng.choice((torch.float32, torch.float64))) for name, value in given.items()}
    for name in ("replayed", "mask"):
        if rng.random() < 0.5:
            given[name] = _tensor(rng, *target.shape) > 0
    for name, values in (("clip", (None, (0.1, 0.3), [0, 0])), ("beta", (None, 0.05, 3)), ("entropy_coef", (0.01, -1))):
        if rng.random() < 0.4:
            given[name] = rng.choice(values)
    if rng.random() < 0.4:
        given["normalizer"] = rng.choice((7, 0.5, torch.tensor(3.0), torch.tensor(2)))
    return given


def exact(given: Arguments) -> Arguments:
    """The same arguments in float64, for the reference, which rounds nothing."""
    return {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in given.items()
        if name != "backend"
    }


def logit_error(given: Arguments) -> float:
    """How far logits may be off: the sum of all products' sizes, in units of the last place, over the temperature."""
    hidden, weight = given["hidden"].double().abs(), given["weight"].double().abs()
    largest = float((hidden @ weight.T).max()) if hidden.numel() else 0.0
    largest += float(given["bias"].abs().max()) if "bias" in given else 0.0
    temperature = given.get("temperature", 1.0)
    coolest = temperature.min() if isinstance(temperature, Tensor) and temperature.numel() else temperature
    coolest = 1.0 if isinstance(coolest, Tensor) and not coolest.numel() else float(coolest)
    return (
        largest
        * (hidden.shape[-1] + 4 if given["hidden"].dtype.itemsize > 2 else 3)
        * ROUNDING[given["hidden"].dtype]
        / coolest
    )


def _near(name: str, found: Tensor, right: Tensor, error: float, given: Arguments) -> str:
    if found.shape != right.shape:
        return f"{name} of shape {list(found.shape)} instead of {list(right.shape)}"
    rounding = 1e-12 if given["hidden"].dtype == torch.float64 else 2e-5
    off = (found.double() - right).abs() - error - rounding * (1 + right.abs())
    return f"{name} is {found} instead of {right}" if off.numel() and not (off <= 0).all() else ""


def log_probs(given: Arguments) -> Callable[[Any], str]:
    """Says what is wrong with log-probs and entropies.

    A log-prob moves by the error of two logits. An entropy's derivative by the logits is p (log p + H), the sum of
    which is at most twice the logarithm of the vocabulary.
    """

    def wrong(found: Any) -> str:
        right = reference.linear_log_prob(**exact(given))
        error = logit_error(given)
        of_entropy = error * (2 + 4 * math.log(given["weight"].shape[0]))
        return _near("log_prob", found.log_prob, right.log_prob, 2 * error, given) or _near(
            "entropy", found.entropy, right.entropy, of_entropy, given
        )

    return wrong


def policy(given: Arguments) -> Callable[[Any], str]:
    """Says what is wrong with the results of a policy loss; gradients are held against the reference in float64."""

    def wrong(found: Any) -> str:
        right = reference.linear_policy_loss(**exact(given))
        if not found.loss.isfinite():
            return f"a loss of {found.loss}"
        error = 2 * logit_error(given)
        problem = _near("log_prob", found.log_prob, right.log_prob, error, given)
        if problem or given["hidden"].dtype != torch.float64:
            return problem
        return _near("loss", found.loss, right.loss, error + 1e-9 * float(1 + right.ratio.abs().sum()), given)

    return wrong


def gradients(given: Arguments) -> Callable[[Any], str]:
    """Says what is wrong with gradients in float64."""

    def wrong(found: list[Tensor]) -> str:
        leaves = [given[name].detach().requires_grad_() for name in ("hidden", "weight")]
        right = _differentiated(reference.linear_policy_loss, {**exact(given)}, leaves)
        largest = max((float(one.abs().max()) for one in right if one.numel()), default=0.0)
        off = [float((one - other).abs().max()) for one, other in zip(found, right, strict=True) if one.numel()]
        return (
            f"gradients that are off by {off} of {largest}"
            if any(not one <= 1e-8 * (1 + largest) for one in off)
            else ""
        )

    return wrong


def _differentiated(function: Callable[..., Any], given: Arguments, leaves: list[Tensor]) -> list[Tensor]:
    function(**{**given, "hidden": leaves[0], "weight": leaves[1]}).loss.backward()
    return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]


def trial(what: str, function: Callable[..., Any], given: Arguments, **expected: Any) -> Trial:
    """One call; `expected` is that of the `Trial`."""
    return Trial(what, lambda: function(**given), **expected, errors=REFUSED)


def drawn(rng: random.Random, folder: Path) -> Trial:
    """One of them."""
    return rng.choice(WAYS)(rng)


def _log_prob(rng: random.Random) -> Trial:
    given = head(rng)
    return trial("log-prob", kernels.linear_log_prob, given, expected="right", wrong=log_probs(given))


def _policy(rng: random.Random) -> Trial:
    given = head(rng)
    given |= tokens(rng, given["target"])
    if given["hidden"].dtype != torch.float64 or rng.random() < 0.5:
        return trial("policy loss", kernels.linear_policy_loss, given, expected="right", wrong=policy(given))
    leaves = [given[name].detach().requires_grad_() for name in ("hidden", "weight")]
    call = lambda: _differentiated(kernels.linear_policy_loss, given, leaves)  # noqa: E731
    return Trial("gradients", call, "right", wrong=gradients(given), errors=REFUSED)


def _wrong_option(rng: random.Random) -> Trial:
    function, given = _any_call(rng)
    of_loss = ("entropy_coef", "beta", "normalizer", "clip")
    names = [name for name in WRONG_OPTIONS if name not in of_loss or function is kernels.linear_policy_loss]
    name = rng.choice(names)
    given[name] = rng.choice(WRONG_OPTIONS[name])
    return trial(f"wrong {name}", function, given, expected="refused", names=(name,))


def _any_call(rng: random.Random) -> tuple[Callable[..., Any], Arguments]:
    given = head(rng)
    if rng.random() < 0.5:
        return kernels.linear_log_prob, given
    return kernels.linear_policy_loss, given | tokens(rng, given["target"])


def _wrong_tensor(rng: random.Random) -> Trial:
    """A tensor of another dtype, shape, device or layout, or none."""
    function, given = _any_call(rng)
    name = rng.choice([name for name, value in given.items() if isinstance(value, Tensor) and value.dim()])
    right = given[name]
    wrong: list[Any] = [right.to("meta"), right.to(torch.complex64), right.unsqueeze(0).unsqueeze(0).unsqueeze(0)]
    wrong += [right.to(torch.uint8), right.new_zeros(3, 5, 7, 2)]
    wrong += [
        value for value in NO_TENSORS if value is not None or name not in ("bias", "replayed", "mask", "normalizer")
    ]
    if name == "temperature":
        wrong = [value for value in wrong if not isinstance(value, float)]
    given[name] = rng.choice(wrong)
    names = (name, *({"hidden": ("weight", "target"), "target": TOKENS}.get(name, ())))
    return trial(f"wrong {name}", function, given, expected="refused", names=names)


def _sparse(rng: random.Random) -> Trial:
    function, given = _any_call(rng)
    name = rng.choice([name for name, value in given.items() if isinstance(value, Tensor) and value.dim()])
    given[name] = given[name].to_sparse()
    return trial(f"sparse {name}", function, given, expected="refused", names=(name,))


def _wrong_target(rng: random.Random) -> Trial:
    function, given = _any_call(rng)
    target = given["target"] = given["target"].clone()
    if not target.numel():
        return trial("no token", function, given, expected="right")
    wrong = rng.choice((-1, -99, given["weight"].shape[0], 2**31, 2**62, -(2**63)))
    target.view(-1)[rng.randrange(target.numel())] = wrong
    return trial("target out of range", function, given, expected="refused", names=("target",))


def _not_finite(rng: random.Random) -> Trial:
    """Numbers that are none: nobody promises a result, only that there is one of the right shape.

    An old log-prob of -inf is refused.
    """
    function, given = _any_call(rng)
    names = [name for name in ("hidden", "weight", "bias", "old_log_prob", "advantage") if name in given]
    name = rng.choice([name for name in names if given[name].numel()] or ["weight"])
    value = given[name] = given[name].clone().contiguous()
    numbers = (math.nan, math.inf, 1e38) if name == "old_log_prob" else (math.nan, math.inf, 1e38, -math.inf)
    value.view(-1)[rng.randrange(value.numel())] = rng.choice(numbers)
    shape = given["target"].shape
    wrong = lambda found: "" if found.log_prob.shape == shape else f"shape {found.log_prob.shape}"  # noqa: E731
    return trial(f"no number in {name}", function, given, expected="right", wrong=wrong)


def _sequences(rng: random.Random) -> Trial:
    given = head(rng)
    count = given["target"].numel()
    given |= {
        "hidden": given["hidden"].reshape(count, -1)
        if count
        else given["hidden"].new_zeros(0, given["weight"].shape[1])
    }
    given |= {"target": given["target"].reshape(-1)}
    if isinstance(given.get("temperature"), Tensor):
        del given["temperature"]
    cuts = sorted(rng.randrange(count + 1) for _ in range(rng.randrange(4)))
    bounds = [0, *cuts, count]
    bad = rng.random() < 0.5
    if bad:
        bounds[rng.randrange(len(bounds))] = rng.choice((-1, count + 1, 2**40))
    given["cu_seqlens"] = torch.tensor(bounds)
    if bad:
        return trial("wrong bounds", kernels.sequence_entropy, given, expected="refused", names=("cu_seqlens",))

    def wrong(found: Tensor) -> str:
        entropy = reference.linear_log_prob(**{k: v for k, v in exact(given).items() if k != "cu_seqlens"}).entropy
        parts = [(entropy[a:b], given["target"][a:b] != -100) for a, b in pairwise(bounds)]
        right = torch.stack([of[kept].sum() / max(1, int(kept.sum())) for of, kept in parts])
        return _near("entropy", found, right, logit_error(given) * (2 + 4 * math.log(given["weight"].shape[0])), given)

    return trial("sequences", kernels.sequence_entropy, given, expected="right", wrong=wrong)


def _advantages(rng: random.Random) -> Trial:
    count, scaled = rng.choice((0, 1, 9)), rng.random() < 0.5
    reward = _tensor(rng, count).to(rng.choice((torch.float64, torch.float32, torch.int64, torch.bool)))
    group = torch.tensor([rng.choice((0, 1, -7, 2**40)) for _ in range(count)], dtype=torch.int64)
    given = {"reward": reward, "group": group, "scale_by_std": scaled}
    if rng.random() < 0.4:
        name = rng.choice(("reward", "group"))
        bad: list[Any] = [
            *NO_TENSORS,
            given[name].to("meta"),
            given[name].unsqueeze(0),
            given[name].to(torch.complex64),
        ]  # type: ignore[union-attr]
        given[name] = rng.choice(bad)
        return trial(f"wrong {name}", kernels.group_advantage, given, expected="refused", names=("reward", "group"))

    def wrong(found: Tensor) -> str:
        right = torch.zeros(count, dtype=torch.float64)
        for one in set(group.tolist()):
            own = reward.double()[group == one]
            deviation = own.std() + 1e-6 if scaled and len(own) > 1 else 1.0
            right[group == one] = (own - own.mean()) / deviation
        off = (found.double() - right).abs()
        return f"{found} instead of {right}" if (off > 1e-5 * (1 + right.abs())).any() else ""

    return trial("advantages", kernels.group_advantage, given, expected="right", wrong=wrong)


def _ratios(rng: random.Random) -> Trial:
    """The functions of tokens alone, with one wrong argument."""
    of = torch.zeros(2, 3)
    name, given, function = rng.choice(
        (
            ("beta", {"ratio": of, "beta": rng.choice(NO_POSITIVES)}, kernels.shape_ratio),
            ("ratio", {"ratio": rng.choice(NO_TENSORS), "beta": 0.1}, kernels.shape_ratio),
            ("log_prob", {"log_prob": rng.choice(NO_TENSORS), "old_log_prob": of}, kernels.importance_ratio),
            ("old_log_prob", {"log_prob": of, "old_log_prob": of[0]}, kernels.importance_ratio),
            ("entropy", {"log_prob": of, "old_log_prob": of, "advantage": of, "entropy_coef": 1}, kernels.policy_loss),
            ("advantage", {"log_prob": of, "old_log_prob": of, "advantage": of[0]}, kernels.policy_loss),
        )
    )
    return trial(f"wrong {name}", function, given, expected="refused", names=(name,))


WAYS = (
    *(_log_prob, _log_prob, _policy, _policy, _policy, _wrong_option, _wrong_option, _wrong_option, _wrong_tensor),
    *(_wrong_tensor, _wrong_tensor, _wrong_target, _not_finite, _sequences, _advantages, _ratios, _sparse),
)
