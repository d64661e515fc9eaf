"""Errors against float64, found before anything is timed."""

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.heads import FORWARD, LOG_PROB, Case, FullLogits, Implementation, Outcome, Problem

TOKENS = 256
"""Errors are taken on so many of a case's tokens: full logits in float64 must fit."""
WRONG = 8.0
"""An error so many times that of plain torch in the same dtype is not rounding."""


@dataclass(frozen=True)
class Errors:
    """Distances from float64 on the same (rounded) inputs; None where the operation has no such result.

    Attributes:
        log_prob: largest absolute error in nats.
        gradient: norm of the error over the norm, the larger one of hidden and weight.
    """

    log_prob: float | None
    gradient: float | None

    def wrong(self, plain: "Errors") -> bool:
        """Whether this is more than the rounding that plain torch shows."""
        pairs = ((self.log_prob, plain.log_prob), (self.gradient, plain.gradient))
        return any(mine is not None and theirs is not None and not mine <= WRONG * theirs for mine, theirs in pairs)


def first_tokens(problem: Problem, count: int = TOKENS) -> Problem:
    """The same head on some of the tokens."""
    hidden, weight, *of_tokens = problem
    return Problem(hidden.detach()[:count].clone().requires_grad_(), weight, *(x[:count] for x in of_tokens))


def exact(case: Case, problem: Problem) -> Outcome:
    """The operation in float64 on full logits."""
    double = [x.detach().double() if x.is_floating_point() else x for x in problem]
    for leaf in double[:2]:
        leaf.requires_grad_()
    return _Double().call(case, Problem(*double))()


def errors(case: Case, implementation: Implementation, problem: Problem, truth: Outcome) -> Errors:
    """How far an implementation is from `truth`."""
    outcome = implementation.call(case, problem)()
    log_prob = gradient = None
    if case.operation in (FORWARD, LOG_PROB):
        assert outcome.log_prob is not None
        assert truth.log_prob is not None
        log_prob = (outcome.log_prob.double() - truth.log_prob)[problem.active].abs().max().item()
    if outcome.gradients:
        gradient = max(_relative(a, b) for a, b in zip(outcome.gradients, truth.gradients, strict=True))
    return Errors(log_prob, gradient)


def _relative(value: Tensor, true: Tensor) -> float:
    return ((value.double() - true).norm() / true.norm()).item()


class _Double(FullLogits):
    def log_prob(self, hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
        log_prob = torch.log_softmax(hidden @ weight.T, -1)
        return log_prob.gather(-1, target[:, None]).squeeze(-1), -(log_prob.exp() * log_prob).sum(-1)
