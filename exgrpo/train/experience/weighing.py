"""What a function `weigh` works with and what it gives.

`weigh(answers, options)` gets all replayed answers of a step, before its update, and gives one `Weighed` for each. With
A the advantage, c the factor and w = pi / reference the importance ratio of a token, its term in the objective is, by
`needs(term=...)` of the function:

    "shaped"    f(w) c A, f(w) = w / (w + beta)
    "ratio"     w c A
    "clipped"   min(w c A, clip(w) c A): that of fresh tokens

A function that says `needs(present="values")` gets the log-probs of the policy before the update, which takes a pass
through the model; with `needs(present="reference")` it only passes them on as the reference, and there is no pass where
the update itself sees that policy.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from exgrpo.train.errors import ConfigError, shown
from exgrpo.train.mistakes import nearest

Floats = npt.NDArray[np.float32]
Term = Literal["shaped", "ratio", "clipped"]
Present = Literal["values", "reference"]
PRESENT = np.float32(np.inf)
"""In the place of a reference's log-prob: the policy itself, so that w = 1, with its gradient."""


@dataclass(frozen=True, eq=False)
class ReplayedAnswer:
    """A replayed answer of R tokens.

    Attributes:
        log_prob: [R] fp32 of the policy that wrote it.
        advantage: as it counts in this step.
        reward: what the verifier gave.
        present: [R] fp32 log-probs of the policy before this step's update, where the function asks for them.
    """

    log_prob: Floats
    advantage: float
    reward: float
    present: Floats | None = None

    @property
    def log_ratio(self) -> Floats:
        """[R] log of the present policy over the one that wrote it; the function asks for values."""
        assert self.present is not None
        return self.present - self.log_prob


@dataclass(frozen=True, eq=False)
class Weighed:
    """The terms of a replayed answer of R tokens.

    Attributes:
        reference: [R] fp32 log-probs of the policy that ratios refer to, or `PRESENT`.
        factor: [R] fp32, of the advantage; None: 1. That of the answer's own advantage is not negative.
        advantage: in the place of the answer's own; None: that.
    """

    reference: Floats
    factor: Floats | None = None
    advantage: float | None = None


@dataclass(frozen=True)
class WeighOptions:
    """What a function may look at besides the answers.

    Attributes:
        success: a reward of at least this is a success.
        second_moment: tau of the second-moment mask.
        trigger: ratio below which a token of a failure is one that the policy has left.
        coefficient: of likelihoods and of regularisers.
    """

    success: float = 1.0
    second_moment: float = 0.04
    trigger: float = 1e-4
    coefficient: float = 0.1


Weigh = Callable[[Sequence[ReplayedAnswer], WeighOptions], list[Weighed]]


def declared(function: Callable[..., Any], name: str) -> tuple[Term, Present | None]:
    """The term of replayed tokens that a function `weigh` declares, and what it asks of the present policy.

    Raises:
        ConfigError: there is no such term, or nothing of that name to ask for.
    """
    term: Any = getattr(function, "term", "shaped")
    present: Any = getattr(function, "present", None)
    for need, value, known in (("term", term, get_args(Term)), ("present", present, get_args(Present))):
        if value not in known and not (need == "present" and value is None):
            near = nearest(str(value), known)
            raise ConfigError(
                f"objective.weigh {name}: unknown {need} {shown(value)} in @needs"
                + (f"; did you mean {near!r}?" if near else ";")
                + f" there are {', '.join(known)}"
            )
    return term, present


def mistake(given: Any, answers: Sequence[ReplayedAnswer]) -> str | None:
    """What is wrong with what a function `weigh` gives for some answers, None: nothing."""
    if not isinstance(given, Sequence):
        return f"it gave {shown(given)} ({type(given).__name__}); it gives a list with one Weighed for each answer"
    if len(given) != len(answers):
        return f"it gave {len(given)} terms for {len(answers)} replayed answers; it gives one Weighed for each"
    return next(filter(None, map(_mistake, given, answers)), None)


def _mistake(term: Any, answer: ReplayedAnswer) -> str | None:
    if not isinstance(term, Weighed):
        return f"it gave {shown(term)} ({type(term).__name__}) for an answer; it gives a Weighed for each"
    factor = np.ones_like(answer.log_prob) if term.factor is None else term.factor
    for name, values in (("reference", term.reference), ("factor", factor)):
        if np.shape(values) != answer.log_prob.shape:
            return f"a {name} has the shape {np.shape(values)} for an answer of {len(answer.log_prob)} tokens"
    # Whatever is computed in a wider dtype has to fit into fp32. Minima and maxima keep a NaN.
    with np.errstate(over="ignore"):
        reference, factor = np.asarray(term.reference, np.float32), np.asarray(factor, np.float32)
    least = float(reference.min())
    if not least > -np.inf:
        return f"a log-prob of the reference is {least}"
    if not np.isfinite(factor).all():
        return f"a factor of the advantage is {factor[~np.isfinite(factor)][0]}"
    if term.advantage is not None and not np.isfinite(term.advantage):
        return f"an advantage is {term.advantage}"
    if term.advantage is None and factor.min() < 0:
        return f"a factor of an answer's own advantage is negative: {factor.min()}"
    return None
