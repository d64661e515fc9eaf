"""What a server answers, checked: nothing that it can send passes for an answer unless it is one."""

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from exgrpo.train.common.errors import printable, shown
from exgrpo.train.common.records import Rollout
from exgrpo.train.rollout.engine import Sampling

LARGEST_ID = 2**31 - 1
ROUNDING = 1e-3
"""A log-prob is not positive, but for the rounding of its sums."""
T = TypeVar("T")


class ServerError(RuntimeError):
    """A server did not do what it was asked; the message is the server's or the network's, in one line.

    Attributes:
        status: of its answer over HTTP; None: there was none.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(printable(message))
        self.status = status


class SilentServerError(ServerError):
    """A server did not answer in time."""


@dataclass(frozen=True, eq=False)
class Reply:
    """A server's answers to one prompt.

    Attributes:
        rollouts: in the order of samples.
        versions: labels of the weights that wrote them, at least one.
        cached_tokens: prompt tokens from the prefix cache, over all samples.
    """

    rollouts: tuple[Rollout, ...]
    versions: frozenset[str]
    cached_tokens: int

    @property
    def longest(self) -> int:
        """Tokens of the longest answer."""
        return max(len(rollout.response) for rollout in self.rollouts)


def part(answer: Any, key: str, kind: type[T]) -> T:
    """The value of a key in what a server answers.

    Raises:
        ServerError: there is none of this kind; an empty text is none.
    """
    value = answer.get(key) if isinstance(answer, dict) else None
    if type(value) is not kind or value == "":
        raise ServerError(f"an answer that is not understood: {key} is {shown(value)}")
    return value


def read_reply(reply: Any, count: int, sampling: Sampling, vocabulary: int) -> Reply:
    """What a server answers to a request for `count` answers.

    Args:
        reply: the JSON.
        count: answers that were asked for.
        sampling: how.
        vocabulary: token ids are below it.

    Raises:
        ServerError: it is not that many whole answers.
    """
    choices = sorted(part(reply, "choices", list), key=lambda choice: part(choice, "index", int))
    reasons = [part(choice, "finish_reason", str) for choice in choices]
    if [choice["index"] for choice in choices] != list(range(count)) or not {*reasons} <= {"stop", "length"}:
        raise ServerError(f"{len(choices)} answers of {count}, ended by {shown(', '.join(sorted({*reasons})))}")
    spans = [span for choice in choices for span in part(choice, "weight_versions", list) or [None]]
    return Reply(
        rollouts=tuple(sampling.stop.cut(_rollout(choice, sampling, vocabulary)) for choice in choices),
        versions=frozenset(part(span, "version", str) for span in spans),
        # The server counts those of one sample, which is not the first one: that one filled the cache for the others.
        cached_tokens=_cached_tokens(reply) * max(1, count - 1),
    )


def _cached_tokens(reply: dict[str, Any]) -> int:
    details = part(reply, "usage", dict).get("prompt_tokens_details")
    if details is None or (isinstance(details, dict) and details.get("cached_tokens") is None):
        return 0
    cached = part(details, "cached_tokens", int)
    if not 0 <= cached <= LARGEST_ID:
        raise ServerError(f"an answer that is not understood: cached_tokens is {shown(cached)}")
    return cached


def _rollout(choice: dict[str, Any], sampling: Sampling, vocabulary: int) -> Rollout:
    tokens = _numbers(choice.get("token_ids"), "token_ids", "i")
    if not 1 <= len(tokens) <= sampling.max_tokens:
        raise ServerError(f"an answer of {len(tokens)} tokens, and 1 to {sampling.max_tokens} were asked for")
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        wrong = tokens.min() if tokens.min() < 0 else tokens.max()
        raise ServerError(f"an answer with the token id {wrong}, and ids are from 0 to {vocabulary - 1}")
    finished = choice["finish_reason"] == "stop"
    log_prob = _log_prob(choice, len(tokens)) if sampling.log_prob else None
    return Rollout(tokens.astype(np.int32), finished, log_prob)


def _log_prob(choice: dict[str, Any], tokens: int) -> npt.NDArray[np.float32]:
    content = part(part(choice, "logprobs", dict), "content", list)
    values = [token.get("logprob") if isinstance(token, dict) else None for token in content]
    with np.errstate(over="ignore"):
        log_prob = _numbers(values, "logprob", "fi").astype(np.float32)
    if len(log_prob) != tokens:
        raise ServerError(f"an answer of {tokens} tokens with {len(log_prob)} log-probs")
    wrong = log_prob[~(np.isfinite(log_prob) & (log_prob <= ROUNDING))]
    if len(wrong):
        raise ServerError(f"an answer with the log-prob {wrong[0]}")
    return log_prob


def _numbers(values: Any, name: str, kinds: str) -> npt.NDArray[Any]:
    """[N] numbers of one of numpy's kinds: texts, booleans and numbers of any size are none."""
    try:
        numbers = np.array(values if isinstance(values, list) and values else None)
    except (ValueError, OverflowError):  # lists of several lengths
        numbers = np.array(None)
    if numbers.ndim != 1 or numbers.dtype.kind not in kinds:
        raise ServerError(f"an answer that is not understood: {name} is {shown(values)}")
    return numbers
