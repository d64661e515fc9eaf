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
        if self.present is None:
            raise ConfigError('log_ratio compares with the present policy: declare @needs(present="values")')
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
