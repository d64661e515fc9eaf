"""Cases, the oracle's answers, and the yardstick: the error that plain torch makes in the same dtype."""

import os
import shutil
import sysconfig
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from exgrpo import kernels
from exgrpo.kernels import reference
from exgrpo.kernels.chunks import walks

INTERPRETING = bool(os.environ.get("TRITON_INTERPRET"))
"""Whether Triton's kernels are interpreted here, which takes a thousand times as long as on a GPU."""


needs_inductor = pytest.mark.skipif(
    not (shutil.which("g++") and Path(sysconfig.get_path("include"), "Python.h").exists()),
    reason="torch's inductor needs g++ and the headers of Python",
)


def fewer_interpreted(number: int, share: int = 4) -> int:
    """Size of a test: a share of it in Triton's interpreter, which has a program for each token or tile."""
    return number // share if INTERPRETING else number


def long_interpreted(value):
    """A test, or a value of a parametrisation, that is ``long`` in Triton's interpreter."""
    if not INTERPRETING:
        return value
    return pytest.mark.long(value) if callable(value) else pytest.param(value, marks=pytest.mark.long)


class InsideMode(TorchDispatchMode):
    """A mode that sees what is done inside the operators of heads, and not only their names."""

    WALKS = ("log_prob_forward", "log_prob_backward", "policy_loss_forward")

    def __init__(self):
        super().__init__()
        self.patches = pytest.MonkeyPatch()

    def __enter__(self):
        for name in self.WALKS:  # where it is entered again
            self.patches.setattr(walks, name, partial(self.within, getattr(walks, name)))
        return super().__enter__()

    def __exit__(self, *error):
        self.patches.undo()
        return super().__exit__(*error)

    def within(self, function, *args, **kwargs):
        super().__enter__()
        try:
            return function(*args, **kwargs)
        finally:
            super().__exit__(None, None, None)


@dataclass
class Case:
    """Inputs of a linear head; tensors of ``options`` are converted along."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None = None
    options: dict = field(default_factory=dict)

    @property
    def leaves(self) -> list[Tensor]:
        return [x for x in (self.hidden, self.weight, self.bias) if x is not None]

    def to(self, dtype: torch.dtype) -> "Case":
        """The same numbers in another dtype, as new leaves."""

        def leaf(x):
            return None if x is None else x.detach().to(dtype).requires_grad_()

        options = {
            k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in self.options.items()
        }
        return replace(self, hidden=leaf(self.hidden), weight=leaf(self.weight), bias=leaf(self.bias), options=options)

    def log_prob(self, function=kernels.linear_log_prob, **more):
        return function(self.hidden, self.weight, self.target, bias=self.bias, **self.options, **more)

    def policy_loss(self, *tokens, function=kernels.linear_policy_loss, **more):
        return function(self.hidden, self.weight, self.target, *tokens, bias=self.bias, **self.options, **more)

    def gradients(self, loss: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss, self.leaves))


def make_case(
    tokens, width, vocabulary, dtype, device, *, bias=False, ignored=True, spread=3.0, allowed_tokens=None, **options
) -> Case:
    """Logits like a language model's: a few nats wide, with the target mostly among the likely words.

    Every seventh target is ignored. ``tokens`` may be a shape; ``allowed_tokens``: sizes of the sets, see `draw`.
    """
    shape = (tokens,) if isinstance(tokens, int) else tokens
    weight = torch.randn(vocabulary, width, dtype=torch.float64) / width**0.5
    target = torch.randint(0, vocabulary, shape)
    likely = 2 * torch.rand(*shape, 1, dtype=torch.float64)
    hidden = spread * (torch.randn(*shape, width, dtype=torch.float64) + likely * weight[target])
    if ignored:
        target.view(-1)[::7] = -100
    bias = torch.randn(vocabulary, dtype=torch.float64) if bias else None
    case = Case(hidden, weight, target, bias).to(dtype)
    for name in ("hidden", "weight", "bias"):
        value = getattr(case, name)
        if value is not None:
            setattr(case, name, value.detach().to(device).requires_grad_())
    case.target = target.to(device)
    case.options = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in options.items()}
    if allowed_tokens is not None:
        case.options["allowed_tokens"] = draw(case, allowed_tokens)
    return case


def coarsen(hidden: Tensor, weight: Tensor) -> None:
    """Rounds hidden states to multiples of 1/8 and weights to multiples of 1/32, in place.

    All partial sums of a narrow head's logits are then exact in float32 and have the same bits in any order. A matrix
    product guarantees no order: NumPy's, which Triton's interpreter uses, depends on the processor, on the number of
    rows and on the position of a row.
    """
    with torch.no_grad():
        for values, step in ((hidden, 1 / 8), (weight, 1 / 32)):
            values.copy_((values / step).round() * step)


def draw(case: Case, sizes) -> tuple[Tensor, Tensor]:
    """Sets of these sizes in turn, in random order, with the targets somewhere among them."""
    vocabulary, ids, offsets = len(case.weight), [], [0]
    for i, target in enumerate(case.target.view(-1).tolist()):
        size = min(sizes[i % len(sizes)], vocabulary)
        words = torch.randperm(vocabulary)[:size]
        if size and target >= 0 and target not in words.tolist():
            words[torch.randint(size, ())] = target
        ids += words.tolist()
        offsets.append(len(ids))
    device = case.target.device
    return torch.tensor(ids, dtype=torch.int32, device=device), torch.tensor(offsets, device=device)


def make_tokens(case: Case, *, ratio_spread=0.3, replayed_share=0.3) -> tuple[Tensor, Tensor, Tensor]:
    """Old log-probs around the policy's own, advantages (a tenth of them 0) and replayed flags, per token."""
    with torch.no_grad():
        log_prob = case.to(torch.float64).log_prob(reference.linear_log_prob).log_prob
    noise = ratio_spread * torch.randn(log_prob.shape, dtype=torch.float64).to(log_prob.device)
    old_log_prob = (log_prob + noise).float()
    advantage = torch.randn(log_prob.shape)
    advantage[torch.rand(log_prob.shape) < 0.1] = 0
    replayed = torch.rand(log_prob.shape) < replayed_share
    return old_log_prob, advantage.to(log_prob.device), replayed.to(log_prob.device)


def error(value: Tensor, exact: Tensor) -> float:
    """Largest absolute error."""
    if not exact.numel():
        return 0.0
    return (value.double() - exact.double()).abs().max().item()


def relative_error(value: Tensor, exact: Tensor) -> float:
    """Norm of the error over the norm of the exact value."""
    scale = exact.double().norm().item()
    difference = (value.double() - exact.double()).norm().item()
    return difference / scale if scale else difference


def assert_as_good(ours, plain, exact, *, factor=2.0, measure=error):
    """Each of ours is as near to the exact value as plain torch in the same dtype, up to a factor.

    Plain torch may be exact by chance, on one token say, so a few roundings of the largest value are allowed; more in
    float64, where the exact value has an error of its own.
    """
    for mine, theirs, true in zip(ours, plain, exact, strict=True):
        assert mine.shape == true.shape
        assert mine.isfinite().all()
        roundings = (256 if mine.dtype == torch.float64 else 8) * torch.finfo(mine.dtype).eps
        if measure is error and true.numel():
            roundings *= max(1.0, true.abs().max().item())
        bound = factor * measure(theirs, true) + roundings
        assert measure(mine, true) <= bound, (measure(mine, true), bound)


def compare(call, case: Case, backend: str, *, factor=2.0) -> None:
    """Results and gradients of ``call(case, backend)`` against float64, with plain torch's error as the yardstick."""
    ours, gradients = call(case, backend)
    exact, exact_gradients = call(case.to(torch.float64), "reference")
    plain, plain_gradients = call(case.to(case.hidden.dtype), "reference")
    result = torch.float64 if case.hidden.dtype == torch.float64 else torch.float32
    assert all(values.dtype == result for values in ours)
    assert_as_good(ours, plain, exact, factor=factor)
    assert_as_good(gradients, plain_gradients, exact_gradients, factor=factor, measure=relative_error)


def both_functions(case: Case, backend: str, tokens, **terms) -> tuple[list[Tensor], list[Tensor]]:
    """Results and gradients of both functions of a head, which share its options."""
    old, advantage, replayed = tokens
    loss = case.policy_loss(old, advantage, replayed=replayed, backend=backend, **terms)
    found = case.log_prob(backend=backend)
    assert not any(values.requires_grad for values in loss[1:])
    value = (found.log_prob * old.to(found.log_prob.dtype) + found.entropy).sum()
    # A ratio is the exponential of a log-prob: large ones magnify its rounding. Of ignored tokens it is 0.
    log_ratio = torch.where(loss.ratio == 0, 0, loss.ratio.log())
    results = [loss.loss, loss.log_prob, loss.entropy, log_ratio, loss.clipped, *found]
    return results, case.gradients(loss.loss) + case.gradients(value)
