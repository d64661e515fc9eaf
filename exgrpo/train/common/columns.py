"""The columns of an answer: the one table that the batch of a step, the buffer, checkpoints and traces are made from.

To add a column, add an entry to `AnswerColumns` and fill it where it is known. With `stored`, buffer and checkpoints
keep it, and `prioritise` and `expire` can read it; with a name in `trace`, exports have it and imports read it, too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, get_args, get_type_hints

import numpy as np
import numpy.typing as npt

from exgrpo.train.common.records import AllowedTokens, LogProbSource, Mask, TokenIds

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Objects = npt.NDArray[np.object_]
Axis = Literal["group", "row", "token"]
LOG_PROB_SOURCES: tuple[LogProbSource, ...] = get_args(LogProbSource)
"""Names of the values of `old_log_probs_from`, in their order."""
TRAINER, ENGINE = map(LOG_PROB_SOURCES.index, ("trainer", "engine"))


@dataclass(frozen=True)
class Column:
    """A column of answers.

    Attributes:
        axis: what it has a value of.
        meaning: one line, for the documentation and for the cards of exported data sets.
        stored: True if the buffer and checkpoints keep it, as they do all columns of traces.
        trace: its name in files of traces; "": they lack it.
        was: its names in traces of earlier versions.
        default: value where no stage has filled it; None: NaN, 0, False, None or the whole vocabulary, by dtype.
        dtype: of NumPy, or `AllowedTokens`.
    """

    axis: Axis
    meaning: str
    stored: bool = False
    trace: str = ""
    was: tuple[str, ...] = ()
    default: Any = None
    dtype: Any = np.float64

    def array(self, values: Any) -> Any:
        """Return values as an array of the column."""
        if self.dtype is AllowedTokens:
            return values
        return _objects(values) if self.dtype is np.object_ else np.asarray(values, self.dtype)

    def filled(self, size: int) -> Any:
        """Return so many defaults."""
        if self.dtype is AllowedTokens:
            return AllowedTokens.whole(size)
        if self.default is not None or self.dtype is np.object_:
            return np.full(size, self.default, self.dtype)
        return np.full(size, np.nan if np.issubdtype(self.dtype, np.floating) else 0, self.dtype)

    def is_default(self, values: Any) -> bool:
        """Return True if all values are the default."""
        if self.dtype is AllowedTokens:
            return not len(values.ids)
        (default,) = self.filled(1)
        return bool((values == default).all() or (default != default and np.isnan(values).all()))

    def joined(self, parts: Sequence[Any]) -> Any:
        """Return the values of several parts, end to end."""
        return AllowedTokens.joined(parts) if self.dtype is AllowedTokens else np.concatenate(parts)


class AnswerColumns:
    """The declared columns, by group, by row and by token."""

    question: Annotated[Ints, Column("group", "index of the question", stored=True)]
    prompt: Annotated[Objects, Column("group", "its prompt, an array of token ids")]

    replayed: Annotated[Mask, Column("row", "True if the answer comes from the experience; else it is fresh")]
    finished: Annotated[
        Mask,
        Column(
            "row",
            "True if the answer ended with EOS or a stop string and was not cut at the length limit",
            trace="finished",
        ),
    ]
    reward: Annotated[Doubles, Column("row", "what the verifier gave", trace="reward")]
    penalty: Annotated[
        Doubles, Column("row", "what its length takes from its reward in advantages", stored=True, default=0.0)
    ]
    key: Annotated[
        Ints,
        Column(
            "row",
            "hash of the solution that it gives: answers that differ only in form have the same one; 0: none",
            trace="key",
        ),
    ]
    step: Annotated[Ints, Column("row", "training step in which it was written", trace="step")]
    old_log_probs_from: Annotated[
        npt.NDArray[np.uint8],
        Column(
            "row",
            "who computed the log-probs of the policy that wrote it: the trainer, before the update of that step, or "
            "the rollout engine, in sampling; unknown: they are 0, the writer counts as certain",
            trace="old_log_probs_from",
            was=("behaviour",),
        ),
    ]
    text: Annotated[Objects, Column("row", "of fresh answers, what is graded: before the EOS token or stop string")]
    parts: Annotated[Objects, Column("row", "of fresh answers, the parts of the reward by name")]
    replays: Annotated[Ints, Column("row", "how often it was replayed", trace="replays")]
    drift: Annotated[
        Doubles,
        Column(
            "row",
            "of stored answers, mean square over its tokens of the change of their log-probs from when it was written "
            "to when it was scored last",
            trace="drift",
            default=0.0,
        ),
    ]
    headroom: Annotated[
        Doubles,
        Column(
            "row",
            "of stored answers, mean over its tokens of 1 - p where its stored advantage is positive, of p where it is "
            "negative, with their probabilities p when it was scored last; 0: without an advantage",
            trace="headroom",
            default=0.0,
        ),
    ]
    number: Annotated[
        Ints, Column("row", "of replayed answers, the number that the buffer knows them by; -1: none", default=-1)
    ]
    chosen_entropy: Annotated[
        Doubles,
        Column(
            "row",
            "of replayed answers, the mean token entropy in nats under the policy that chose it; NaN: not computed",
        ),
    ]
    stored_advantage: Annotated[
        Doubles,
        Column(
            "row",
            "of replayed answers, the advantage in the group that they were written in; NaN: they count in the mean "
            "of the group that they have joined, and have its advantages",
        ),
    ]
    advantage: Annotated[
        Doubles,
        Column(
            "row",
            "advantage as it counts in this step; of stored answers, in the group that they were written in",
            trace="advantage",
            default=0.0,
        ),
    ]
    successes: Annotated[
        Ints,
        Column(
            "row",
            "of stored answers, successes among the answers that count of the group that they were written in",
            trace="group_successes",
        ),
    ]
    answers: Annotated[
        Ints, Column("row", "of stored answers, number of those answers; 0: not known", trace="group_answers")
    ]
    weight: Annotated[
        Doubles,
        Column("row", "of the row's objective, in a mini-batch whose objective keeps it apart from the advantage"),
    ]
    given: Annotated[
        Doubles,
        Column(
            "row",
            "share of a stored success, or, below 0, of a failure, whose first tokens it begins with; 0: none",
            default=0.0,
        ),
    ]
    loss_mask: Annotated[
        Mask, Column("row", "True if the row may carry a gradient; others still count in what losses are divided by")
    ]

    token: Annotated[
        TokenIds, Column("token", "token ids of the answer, with the token that ends it", trace="response_ids")
    ]
    response_mask: Annotated[
        Mask,
        Column(
            "token",
            "True if the policy wrote the token; others are observations of an environment, or were given at the "
            "beginning, with log-probs of 0 and no gradient",
            trace="response_mask",
            was=("own", "written"),
            default=True,
        ),
    ]
    engine_log_prob: Annotated[
        Floats, Column("token", "the engine's own log-prob at the sampling temperature; NaN where it gave none")
    ]
    engine_entropy: Annotated[Floats, Column("token", "the entropy in nats that the engine saw; NaN: it gave none")]
    staleness: Annotated[
        Ints, Column("token", "training steps since it was written, where answers go on in later ones", default=0)
    ]
    old_log_prob: Annotated[
        Floats,
        Column(
            "token",
            "log-prob under the policy that wrote the answer, at the sampling temperature; NaN until known",
            trace="log_prob",
        ),
    ]
    log_prob: Annotated[
        Floats,
        Column(
            "token",
            "log-prob under the policy before this step's update, at the same temperature; NaN until known, and of "
            "rows that are neither trained on nor stored",
        ),
    ]
    entropy: Annotated[Floats, Column("token", "entropy in nats of the policy before the update; NaN as `log_prob`")]
    reference_log_prob: Annotated[
        Floats, Column("token", "log-prob under the reference of a divergence; NaN: the row is not compared")
    ]
    ratio_log_prob: Annotated[
        Floats,
        Column("token", "log-prob under the policy that importance ratios refer to, or `replay.contract.PRESENT`"),
    ]
    factor: Annotated[Floats, Column("token", "factor of the advantage", default=1)]
    allowed_tokens: Annotated[
        AllowedTokens,
        Column(
            "token",
            "ids of the tokens that it was drawn from, over which all of these log-probs and entropies are; not filled "
            "where rollouts are cut nowhere",
            trace="allowed_tokens",
            was=("kept",),
        ),
    ]


def _column(hint: Any) -> Column:
    """Return the column of an annotation, with its dtype."""
    (declared,) = hint.__metadata__
    column = replace(declared, stored=declared.stored or declared.trace != "")
    kind = hint.__origin__
    if kind is AllowedTokens:
        return replace(column, dtype=kind)
    last = get_args(kind)[-1]  # np.dtype[X] of NDArray[X]; X itself from numpy 2.5 on
    return replace(column, dtype=next(iter(get_args(last)), last))


COLUMNS = {name: _column(hint) for name, hint in get_type_hints(AnswerColumns, include_extras=True).items()}


EARLIER = {was: name for name, column in COLUMNS.items() for was in column.was}
"""Present names of columns, by the names that traces of earlier versions have."""


def renamed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a trace by the present names of their columns."""
    return {EARLIER.get(name, name): one for name, one in values.items()}


def columns_of(*axes: Axis, stored: bool = False) -> dict[str, Column]:
    """Return the columns of some axes, by name; only those that are stored, if `stored`."""
    return {name: one for name, one in COLUMNS.items() if one.axis in axes and (one.stored or not stored)}


def _objects(values: Any) -> Objects:
    if isinstance(values, np.ndarray) and values.dtype == object:
        return values
    values = list(values)
    array = np.empty(len(values), object)
    for i, value in enumerate(values):
        array[i] = value
    return array
