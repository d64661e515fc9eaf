"""Operations on a head and their implementations: our backends, plain torch, and bare matrix products as the floor.

Errors are against float64, computed before anything is timed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.inputs import make_inputs
from benchmarks.timing import FLOOR, OURS, PLAIN
from exgrpo import kernels
from exgrpo.kernels import backend_choice, dispatch
from exgrpo.kernels.inputs import IGNORED

FORWARD, LOG_PROB, CROSS_ENTROPY = "forward", "log_prob", "cross_entropy"
POLICY_LOSS, WITH_ENTROPY = "policy_loss", "policy_loss+entropy"
WITHOUT_ENTROPY = (FORWARD, LOG_PROB, CROSS_ENTROPY, POLICY_LOSS)
OPERATIONS = (*WITHOUT_ENTROPY, WITH_ENTROPY)
"""Log-probs, forward only and with the backward; the others, forward and backward."""
CLIP = 0.2
ENTROPY_COEF = 0.001
OLD_NOISE = 0.05
"""Standard deviation of log pi - log pi_old in nats: so that almost no token is clipped and skips its products."""
WRONG = 8.0
"""A row is wrong if its error exceeds this multiple of plain torch's error in the same dtype."""


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


class LossInputs(NamedTuple):
    """Inputs of a policy loss: hidden [T, D] and weight [V, D], both leaves; target, old_log_prob, advantage [T]."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    old_log_prob: Tensor
    advantage: Tensor

    @property
    def active(self) -> Tensor:
        """[T] bool: tokens in the loss; the others have no advantage."""
        return self.advantage != 0

    def part(self, tokens: int, dtype: torch.dtype) -> "LossInputs":
        """Return the first tokens in a dtype, with new leaves."""
        leaves = (x.detach().to(dtype, copy=True).requires_grad_() for x in (self.hidden[:tokens], self.weight))
        return LossInputs(*leaves, *(x[:tokens] for x in self[2:]))


def make_problem(case: Case, device: torch.device) -> LossInputs:
    """Return the seeded inputs of a case; inactive tokens have the target IGNORED and the advantage 0."""
    hidden, weight, target = make_inputs(case.tokens, case.width, case.vocabulary, case.dtype, device)
    generator = torch.Generator(device).manual_seed(1)
    noise, advantage = torch.randn(2, case.tokens, generator=generator, device=device)
    old = kernels.linear_log_prob(hidden, weight, target, backend="torch").log_prob + OLD_NOISE * noise
    inactive = torch.randperm(case.tokens, generator=generator, device=device)[case.active_tokens :]
    advantage = (advantage.sign() * (0.5 + advantage.abs())).index_fill(0, inactive, 0.0)
    target = target.index_fill(0, inactive, IGNORED)
    return LossInputs(hidden.requires_grad_(), weight.requires_grad_(), target, old, advantage)


def plain_loss(log_prob: Tensor, problem: LossInputs) -> Tensor:
    """Return the clipped loss of log-probs [T], a sum over tokens divided by T."""
    ratio, advantage = (log_prob - problem.old_log_prob).exp(), problem.advantage
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).sum() / len(log_prob)


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
        self.name = f"{PLAIN}, compiled" if compiled else PLAIN
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
        hidden, weight = problem.hidden.detach()[: case.active_tokens], problem.weight.detach()
        logits = hidden.new_empty(len(hidden), len(weight))
        # Random values: some CPUs multiply denormals 26 times slower, and GPUs multiply equal numbers faster.
        grad = torch.empty_like(logits).uniform_(0.1, 1.0)
        d_hidden, d_weight = torch.empty_like(hidden), torch.empty_like(weight)

        def products() -> Outcome:
            torch.mm(hidden, weight.T, out=logits)
            if case.operation != FORWARD:
                torch.mm(grad, weight, out=d_hidden)
                torch.mm(grad.T, hidden, out=d_weight)
            return Outcome()

        return products


def exact(case: Case, problem: LossInputs) -> Outcome:
    """Compute the operation in float64 on full logits."""
    return FullLogits().call(case, problem.part(len(problem.target), torch.float64))()


def errors(case: Case, implementation: Implementation, problem: LossInputs, truth: Outcome) -> dict[str, float]:
    """Return distances from float64 on the same (rounded) inputs, by name, of the results that the operation has.

    `log_prob_error` is the largest absolute error in nats; `gradient_error` the relative error in norm, the larger one
    of hidden and weight.
    """
    outcome, found = implementation.call(case, problem)(), {}
    if outcome.log_prob is not None and truth.log_prob is not None:
        found["log_prob_error"] = (outcome.log_prob.double() - truth.log_prob)[problem.active].abs().max().item()
    if outcome.gradients:
        pairs = zip(outcome.gradients, truth.gradients, strict=True)
        found["gradient_error"] = max(((ours.double() - true).norm() / true.norm()).item() for ours, true in pairs)
    return found


def is_wrong(errors: Mapping[str, float], plain: Mapping[str, float]) -> bool:
    """True if an error exceeds the rounding errors of plain torch."""
    return any(not error <= WRONG * plain[name] for name, error in errors.items())
