"""Look-up of the five functions of a method of replay, and the call of `weigh`.

| kind | from | to |
|---|---|---|
| admit | a graded batch | a mask of the rows to store |
| prioritise | candidates, as columns | sampling weights |
| compose | the experience and fresh questions | the groups of a step |
| weigh | the replayed rows of a step | the terms of their tokens in the loss |
| expire | stored trajectories, as columns | a mask of those to forget |

A name is that of a function in the module `exgrpo.train.replay.KIND`, or the place of a user's function. `Needs` in
`exgrpo.train.common.functions` has what a function may declare.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from exgrpo.train.common.errors import ConfigError, MethodError, cause
from exgrpo.train.common.functions import Needs, needs
from exgrpo.train.common.step_batch import SCORES, Floats, StepBatch
from exgrpo.train.config.objective import MethodOptions
from exgrpo.train.config.options import Config
from exgrpo.train.config.replay import KINDS, MethodKind
from exgrpo.train.replay.contract import CHECKS, PRESENT, WeighFunction

ARGUMENTS = {
    "admit": ("batch", "options"),
    "prioritise": ("candidates", "options"),
    "compose": ("planner",),
    "settle": ("batch", "planner"),
    "weigh": ("batch", "options"),
    "expire": ("candidates", "options"),
}
"""Arguments of the functions of each kind."""


def find(kind: MethodKind, name: str) -> Callable[..., Any]:
    """Return the function of that kind and name; a user's own is checked in every call.

    Raises, when it is found:
        ConfigError: there is none, its module or file cannot be loaded, it declares what it cannot, or it takes other
            arguments.

    Raises, when a user's own is called:
        MethodError: it raises something, or gives something else than a function of its kind.
    """
    function = KINDS[kind].find(name)
    if name in KINDS[kind].names:
        return function
    label = f"{KINDS[kind].option} {name}"
    found = _checked(kind, label, function)
    if settle := Needs.of(function).settle:
        Needs.of(settle).check(("scores",), f"{label}, settle")
        found = needs(settle=_checked("settle", f"{label}, settle", settle))(found)
    return found


def _checked(kind: str, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Turn each mistake of a function into one line that begins with the label."""
    _check_arguments(kind, label, function)
    file = getattr(getattr(inspect.unwrap(function), "__code__", None), "co_filename", None)

    @functools.wraps(function)
    def call(*given: Any) -> Any:
        try:
            result = function(*given)
        except Exception as error:
            if isinstance(error, MethodError):  # of a function that this one has called
                raise
            raise MethodError(f"{label}: {cause(error, file)}{_hint(error, kind)}") from error
        if wrong := CHECKS[kind](result, *given):
            raise MethodError(f"{label}: {wrong}")
        return result

    return call


def _check_arguments(kind: str, label: str, function: Callable[..., Any]) -> None:
    asked = ARGUMENTS[kind]
    try:
        takes = inspect.signature(function)
        takes.bind(*asked)
    except ValueError:  # of what is written in C
        return
    except TypeError:
        raise ConfigError(f"{label}: it takes {takes}, and it is called with ({', '.join(asked)})") from None


def _hint(error: Exception, kind: str) -> str:
    """Return a remedy for an exception of a user's function; empty if there is none to name."""
    if not isinstance(error, AttributeError) or not type(error.obj).__module__.startswith("exgrpo."):
        return ""
    if kind == "weigh" and error.name == "log_prob":
        return '; `log_prob` of the batch needs @needs(present="values")'
    if kind in ("admit", "settle") and error.name in SCORES:
        return f"; `{error.name}` of the batch needs @needs(scores=True)"
    kind_of = type(error.obj)
    there = [name for name in dir(error.obj) if name[0] != "_" and not callable(getattr(kind_of, name, None))]
    return f"; there are {', '.join(there)}"


ScoreRows = Callable[[StepBatch], Floats]
"""Log-probs [T] of a batch under the policy before the update, at the rollout temperature."""


class ImportanceWeighting:
    """Compute the terms of replayed answers in the loss, by `objective.weigh`.

    Args:
        options: names the function, and its options.
        one_update: True if all of a step's answers are in one optimiser step, so that the update itself sees the
            policy before it.
        score: scores rows under the policy, where the function needs it.

    Attributes:
        term: term of all replayed tokens in the loss.

    Raises:
        ConfigError: there is no such function, or its declaration is wrong.
    """

    def __init__(self, options: MethodOptions, score: ScoreRows, *, one_update: bool) -> None:
        self._function: WeighFunction = find("weigh", options.objective.weigh)
        self._needs = Needs.of(self._function)
        self.term = self._needs.term
        self._one_update = one_update
        self._score = score
        self._options = options

    @classmethod
    def from_config(cls, config: Config, score: ScoreRows) -> "ImportanceWeighting":
        """Return it with the options of a run."""
        return cls(config.method, score, one_update=config.optimizer.steps_per_batch == 1)

    def __call__(self, batch: StepBatch) -> None:
        """Fill `ratio_log_prob`, `factor` and `advantage` of the replayed rows that are trained on.

        Raises:
            MethodError: a user's function returns something else, or numbers that would spoil the update.
        """
        rows = batch.rows_of(batch.trained)
        rows = rows[batch.replayed[rows]]
        if not len(rows):
            return
        terms = self._function(self._read(batch.take(rows)), self._options)
        batch.put(rows, ratio_log_prob=terms.reference)
        if terms.factor is not None:
            batch.put(rows, factor=terms.factor)
        if terms.advantage is not None:
            batch.advantage[rows] = terms.advantage

    def _read(self, replayed: StepBatch) -> StepBatch:
        """Fill the log-probs of the policy before the update where the function needs them, and only there."""
        replayed = replayed.without("log_prob", "entropy")
        if self._needs.present == "reference" and self._one_update:
            replayed.fill(log_prob=np.full(len(replayed.token), PRESENT))
        elif self._needs.present:
            replayed.fill(log_prob=self._score(replayed))
        return replayed
