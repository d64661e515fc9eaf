"""Operations on a head and their implementations: our backends, plain torch, and bare matrix products as the floor.

Errors are against float64, computed before anything is timed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from exgrpo import kernels
from exgrpo.kernels import backend_choice, dispatch
from exgrpo.kernels.inputs import IGNORED
from exgrpo.tools import bench
from exgrpo.tools.bench import CLIP, FLOOR, OURS, WRONG, LossInputs, plain_loss, products, relative_error
from exgrpo.tools.timing import ENTROPY_COEF, Shape

FORWARD, LOG_PROB, CROSS_ENTROPY = "forward", "log_prob", "cross_entropy"
POLICY_LOSS, WITH_ENTROPY = "policy_loss", "policy_loss+entropy"
WITHOUT_ENTROPY = (FORWARD, LOG_PROB, CROSS_ENTROPY, POLICY_LOSS)
OPERATIONS = (*WITHOUT_ENTROPY, WITH_ENTROPY)
"""Log-probs, forward only and with the backward; the others, forward and backward."""

FULL_GPU = ((8192, 1536, 151936), (8192, 3584, 152064), (8192, 4096, 131072), (16384, 4096, 151936))
"""(T, D, V) of real models, for a GPU."""


@dataclass(frozen=True)
class Case:
    """One operation on one shape."""

    operation: str
    tokens: int
    width: int
    vocabulary: int
    dtype: torch.dtype
    active: float = 1.0
    """Fraction of tokens in the loss; the others are prompt or padding, with target IGNORED."""

    @property
    def active_tokens(self) -> int:
        return round(self.active * self.tokens)

    def __str__(self) -> str:
        shape = f"{self.tokens}x{self.width}x{self.vocabulary}"
        some = f" {self.active:.0%} active" if self.active < 1 else ""
        return f"{self.operation} {str(self.dtype).removeprefix('torch.')} {shape}{some}"


class Outcome(NamedTuple):
    """Results of an operation; None for those that it does not compute."""

    log_prob: Tensor | None = None
    gradients: tuple[Tensor, ...] = ()


def make_problem(case: Case, device: torch.device) -> LossInputs:
    """Return the seeded inputs of a case; inactive tokens have the target IGNORED and the advantage 0."""
    inputs = bench.make_problem(Shape(case.tokens, case.width, case.vocabulary), case.dtype, device)
    generator = torch.Generator(device).manual_seed(2)
    inactive = torch.randperm(case.tokens, generator=generator, device=device)[case.active_tokens :]
    target, advantage = inputs.target.index_fill(0, inactive, IGNORED), inputs.advantage.index_fill(0, inactive, 0.0)
    return inputs._replace(target=target, advantage=advantage)


class Implementation:
    """One row: log-probs of targets and policy loss from hidden states and a head.

    A subclass defines `log_prob`; one with its own loss also defines `policy_loss`.
    """

    name: str
    operations: tuple[str, ...] = OPERATIONS
    quick = True
    """False if only `--sizes full` measures it."""
    takes_ignored = False
    """True if it accepts IGNORED targets. Others get token 0 there, and their results for it are masked, as in use."""

    def missing(self, device: torch.device) -> str:
        """Return why it cannot run here; "" if it can."""
        return ""

    def log_prob(self, hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return log-probs and entropies [T] of targets."""
        raise NotImplementedError

    def policy_loss(self, problem: LossInputs, entropy_coef: float) -> Tensor:
        """Return -(sum of min(w A, clip(w) A) + entropy_coef * sum of H) / T."""
        log_prob, entropy = self.log_prob(problem.hidden, problem.weight, problem.target)
        loss = plain_loss(log_prob, problem)
        if entropy_coef:
            assert entropy is not None
            loss = loss - entropy_coef * (entropy * problem.active).sum() / len(log_prob)
        return loss

    def cross_entropy(self, problem: LossInputs) -> Tensor:
        """Return -(sum of log-probs)."""
        return -(self.log_prob(problem.hidden, problem.weight, problem.target)[0] * problem.active).sum()

    def call(self, case: Case, problem: LossInputs) -> Callable[[], Outcome]:
        """Return the operation of a case as a function without arguments."""
        if not self.takes_ignored:
            problem = problem._replace(target=problem.target.clamp(min=0))
        hidden, weight, target = problem[:3]

        def forward() -> Outcome:
            with torch.no_grad():
                return Outcome(self.log_prob(hidden, weight, target)[0])

        def log_prob() -> Outcome:
            value, _ = self.log_prob(hidden, weight, target)
            gradients = torch.autograd.grad(value, (hidden, weight), (problem.advantage / len(value)).to(value.dtype))
            return Outcome(value.detach(), gradients)

        def loss() -> Outcome:
            if case.operation == CROSS_ENTROPY:
                value = self.cross_entropy(problem)
            else:
                value = self.policy_loss(problem, ENTROPY_COEF if case.operation == WITH_ENTROPY else 0.0)
            return Outcome(gradients=torch.autograd.grad(value, (hidden, weight)))

        return {FORWARD: forward, LOG_PROB: log_prob}.get(case.operation, loss)


class Ours(Implementation):
    """A backend of exgrpo.kernels, with its default bound on memory or with `memory` bytes."""

    takes_ignored = True

    def __init__(self, backend: str, memory: int | None = None) -> None:
        self.name, self.backend, self.memory = f"{OURS} {backend}", backend, memory
        self.quick = backend == default_backend() and memory is None
        if memory is not None:
            self.name += ", unbounded"

    def missing(self, device: torch.device) -> str:
        return dispatch.unavailable(self.backend, device)

    def log_prob(self, hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
        return kernels.linear_log_prob(hidden, weight, target, memory=self.memory, backend=self.backend)

    def policy_loss(self, problem: LossInputs, entropy_coef: float) -> Tensor:
        hidden, weight, target, old, advantage = problem
        options: dict[str, Any] = {"entropy_coef": entropy_coef, "normalizer": len(target), "clip": (CLIP, CLIP)}
        options |= {"memory": self.memory, "backend": self.backend}
        return kernels.linear_policy_loss(hidden, weight, target, old, advantage, **options).loss


def full_logits(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies in the usual way: all logits, softmax in fp32 (float64 for float64 inputs)."""
    logits = hidden @ weight.T
    log_prob = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    return log_prob.gather(-1, target[:, None]).squeeze(-1), -(log_prob.exp() * log_prob).sum(-1)


def default_backend() -> str:
    """Return the backend that `auto` selects here for a language model's head."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = dispatch.requested(dispatch.AUTO, device)
    return dispatch.automatic(device, torch.bfloat16, backend_choice.LARGE + 1) if name == dispatch.AUTO else name


class FullLogits(Implementation):
    """Plain torch on [T, V] logits, eager or compiled."""

    def __init__(self, compiled: bool = False) -> None:
        self.name = "full logits, compiled" if compiled else "full logits"
        self.compiled = compiled

    @cached_property
    def function(self) -> Callable[..., tuple[Tensor, Tensor]]:
        # Compiled on first use: torch's compiler takes seconds to import.
        return torch.compile(full_logits, dynamic=False) if self.compiled else full_logits

    def log_prob(self, hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.function(hidden, weight, target)


class Floor(Implementation):
    """The bare products, in the inputs' dtype and into preallocated memory.

    A library may compute one of them slightly faster in another layout: ratios slightly above 1 are possible.
    """

    name = FLOOR

    def call(self, case: Case, problem: LossInputs) -> Callable[[], Outcome]:
        """Return the product of a forward pass, or the three of forward and backward, of the active tokens."""
        return products(
            problem.hidden.detach()[: case.active_tokens], problem.weight.detach(), forward=case.operation == FORWARD
        )


@dataclass(frozen=True)
class Errors:
    """Distances from float64 on the same (rounded) inputs; None where the operation has no such result.

    Attributes:
        log_prob: largest absolute error in nats.
        gradient: relative error in norm, the larger one of hidden and weight.
    """

    log_prob: float | None
    gradient: float | None

    def wrong(self, plain: "Errors") -> bool:
        """True if an error exceeds the rounding errors of plain torch."""
        pairs = ((self.log_prob, plain.log_prob), (self.gradient, plain.gradient))
        return any(mine is not None and theirs is not None and not mine <= WRONG * theirs for mine, theirs in pairs)


def exact(case: Case, problem: LossInputs) -> Outcome:
    """Compute the operation in float64 on full logits."""
    return FullLogits().call(case, problem.part(len(problem.target), torch.float64))()


def errors(case: Case, implementation: Implementation, problem: LossInputs, truth: Outcome) -> Errors:
    outcome = implementation.call(case, problem)()
    log_prob = gradient = None
    if case.operation in (FORWARD, LOG_PROB):
        assert outcome.log_prob is not None
        assert truth.log_prob is not None
        log_prob = (outcome.log_prob.double() - truth.log_prob)[problem.active].abs().max().item()
    if outcome.gradients:
        gradient = max(relative_error(a, b) for a, b in zip(outcome.gradients, truth.gradients, strict=True))
    return Errors(log_prob, gradient)
