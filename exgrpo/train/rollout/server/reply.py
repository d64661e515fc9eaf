"""Validate the responses of a server."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from exgrpo.train.common.errors import cut, printable, shown
from exgrpo.train.common.records import Rollout
from exgrpo.train.config.section import explain
from exgrpo.train.rollout.engine import Sampling

LARGEST_ID = 2**31 - 1
LOWEST_LOG_PROB = float(np.finfo(np.float32).min)
ROUNDING = 1e-3
"""Rounding error by which a log-prob may exceed 0."""
UNKNOWN = "an answer that is not understood"
T = TypeVar("T")


class ServerError(RuntimeError):
    """A request to a server failed; the message is the server's or the network's, in one line.

    Attributes:
        status: HTTP status; None: there was no response.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(printable(message))
        self.status = status


class SilentServerError(ServerError):
    """Raised when a server does not respond in time."""


@dataclass(frozen=True, eq=False)
class Reply:
    """A server's answers to one prompt.

    Attributes:
        rollouts: answers in sampling order.
        versions: labels of the weights that wrote them, at least one.
        cached_tokens: prompt tokens read from the prefix cache, summed over the samples.
    """

    rollouts: tuple[Rollout, ...]
    versions: frozenset[str]
    cached_tokens: int


Number = Annotated[int, Field(ge=0, le=LARGEST_ID)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)


class _Token(_Part):
    logprob: float = Field(ge=LOWEST_LOG_PROB, le=ROUNDING)  # a NaN is neither


class _LogProbs(_Part):
    content: list[_Token]


class _Span(_Part):
    version: str = Field(min_length=1)


class _Choice(_Part):
    index: int
    finish_reason: Literal["stop", "length"]
    token_ids: list[Number] = Field(min_length=1)
    weight_versions: list[_Span] = Field(min_length=1)
    logprobs: _LogProbs | None = None


class _Details(_Part):
    cached_tokens: Number | None = None


class _Usage(_Part):
    prompt_tokens_details: _Details | None = None


class _Answers(_Part):
    choices: list[_Choice]
    usage: _Usage


def part(answer: Any, key: str, kind: type[T]) -> T:
    """Return the value of a key in a server's response.

    Raises:
        ServerError: it is missing, of another type, or an empty text.
    """
    value = answer.get(key) if isinstance(answer, dict) else None
    if type(value) is not kind or value == "":
        raise ServerError(f"{UNKNOWN}: {key} is {shown(value)}")
    return value


def read_reply(reply: Any, count: int, sampling: Sampling, vocabulary: int) -> Reply:
    """Parse the response to a request for `count` answers.

    Raises:
        ServerError: it is not `count` complete answers.
    """
    try:
        answers = _Answers.model_validate(reply)
    except ValidationError as error:
        raise ServerError(cut(explain(error, _Answers, UNKNOWN), 300)) from None
    choices = sorted(answers.choices, key=lambda choice: choice.index)
    if [choice.index for choice in choices] != list(range(count)):
        raise ServerError(f"{len(choices)} answers of {count}")
    details = answers.usage.prompt_tokens_details
    cached = details.cached_tokens if details else None
    return Reply(
        rollouts=tuple(sampling.stop.cut(_rollout(choice, sampling, vocabulary)) for choice in choices),
        versions=frozenset(span.version for choice in choices for span in choice.weight_versions),
        # The server reports one sample that read the cache; the first sample filled it for the others.
        cached_tokens=(cached or 0) * max(1, count - 1),
    )


def _rollout(choice: _Choice, sampling: Sampling, vocabulary: int) -> Rollout:
    tokens = np.array(choice.token_ids, np.int32)
    if len(tokens) > sampling.max_tokens:
        raise ServerError(f"an answer of {len(tokens)} tokens, and 1 to {sampling.max_tokens} were asked for")
    if tokens.max() >= vocabulary:
        raise ServerError(f"an answer with the token id {tokens.max()}, and ids are from 0 to {vocabulary - 1}")
    log_prob = None
    if sampling.log_prob:
        log_prob = np.array([token.logprob for token in choice.logprobs.content] if choice.logprobs else [], np.float32)
        if len(log_prob) != len(tokens):
            raise ServerError(f"an answer of {len(tokens)} tokens with {len(log_prob)} log-probs")
    return Rollout(tokens, choice.finish_reason == "stop", log_prob)
