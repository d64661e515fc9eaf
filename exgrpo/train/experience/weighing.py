"""What a function `weigh` works with and what it gives.

`weigh(batch, options)` gets the N replayed answers of a step that are trained on, before its update, and gives
`Weighed` for their T tokens. With A the advantage, c the factor and w = pi / reference the importance ratio of a token,
its term in the objective is, by `needs(term=...)` of the function:

    "shaped"    f(w) c A, f(w) = w / (w + beta)
    "ratio"     w c A
    "clipped"   min(w c A, clip(w) c A): that of fresh tokens

For a function that says `needs(present="values")` the column `log_prob` is filled, with the policy before the update,
which takes a pass through the model; with `needs(present="reference")` it only passes them on as the reference, and
there is no pass where the update itself sees that policy.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from exgrpo.train.errors import ConfigError, nearest, shown
from exgrpo.train.step_batch import Doubles, Floats, StepBatch

Term = Literal["shaped", "ratio", "clipped"]
Present = Literal["values", "reference"]
PRESENT = np.float32(np.inf)
"""In the place of a reference's log-prob: the policy itself, so that w = 1, with its gradient."""


class Weighed(NamedTuple):
    """The terms of N replayed answers, of T tokens together.

    Attributes:
        reference: [T] fp32 log-probs of the policy that ratios refer to, or `PRESENT`.
        factor: [T] fp32, of the advantage; None: 1. That of the answers' own advantages is not negative.
        advantage: [N] in the place of the answers' own; None: these.
    """

    reference: Floats
    factor: Floats | None = None
    advantage: Doubles | None = None


@dataclass(frozen=True)
class WeighOptions:
    """What a function may look at besides the batch.

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


Weigh = Callable[[StepBatch, WeighOptions], Weighed]


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
