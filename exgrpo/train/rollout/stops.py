"""Stop strings: find where they end the tokens and the text of an answer."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from exgrpo.train.common.records import Rollout, TokenIds

Decode = Callable[[Any], str]
"""Decodes token ids to text, special tokens included. Appended tokens may only extend the text, or complete a last
character of several bytes."""
Tokens = Sequence[int] | TokenIds


@dataclass(frozen=True)
class Stops:
    """Stop strings and the decoder to find them: one rule for all engines.

    A response ends with the token that completes the first stop string. A string may span tokens or be a part of one.
    It must lie in the response: text of the prompt does not count.

    Attributes:
        strings: non-empty strings; may be none.
        decode: decoder of the trainer's tokenizer.
        before: tokens of the answer that come before the response, of which it is the rest; without a stop string.
    """

    strings: tuple[str, ...]
    decode: Decode
    before: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.strings)

    def end(self, response: Tokens) -> int | None:
        """Return the length of the shortest prefix of [R] token ids that has a stop string; None: there is none."""
        if not self._stopped(response):
            return None
        return 1 + bisect_left(range(1, len(response)), True, key=lambda length: self._stopped(response[:length]))

    def reached(self, response: Tokens) -> bool:
        """True if the last token completes a stop string; the cost does not grow with the response.

        Misses strings that are interrupted by tokens without text; `cut` finds them.
        """
        if not self.strings:
            return False
        # A token has at least one byte. One token more, since some decoders strip a space from the first token.
        tokens = 1 + max(len(string.encode()) for string in self.strings)
        return self._stopped(response[-tokens:], max(0, tokens - len(response))) and self._stopped(response)

    def cut(self, answer: Rollout) -> Rollout:
        """Cut an answer after the first stop string; without one, return it unchanged."""
        length = self.end(answer.response)
        if length is None:
            return answer
        parts = {"response": answer.response, "log_prob": answer.log_prob, "entropy": answer.entropy}
        shorter: dict[str, Any] = {name: of[:length].copy() for name, of in parts.items() if of is not None}
        allowed_tokens = None if answer.allowed_tokens is None else answer.allowed_tokens[:length]
        return replace(answer, finished=True, allowed_tokens=allowed_tokens, **shorter)

    def _stopped(self, tokens: Tokens, most: int | None = None) -> bool:
        """True if the tokens have a stop string, together with at most the last `most` of those before."""
        if not self.strings:
            return False
        before = self.before[-most:] if most else self.before if most is None else ()
        return _start(self.decode([*before, *tokens] if before else tokens), self.strings) is not None


NO_STOPS = Stops((), decode=lambda tokens: "")


def text_of(answer: Rollout, decode: Decode, stop: tuple[str, ...]) -> str:
    """Return an answer's text without what ended it: the first stop string of its last turn, or the EOS token."""
    if not answer.finished:
        return decode(answer.response)
    if not stop:
        return decode(answer.response[:-1])
    text = decode(answer.response)
    # Tokens that an answer was given to begin with hold no stop string, but perhaps a part of one.
    whole = answer.response_mask is None or not answer.response_mask[0]
    last = text if whole else decode(_turns(answer)[-1])
    start = _start(last, stop)
    return decode(answer.response[:-1]) if start is None else text[: len(text) - len(last) + start]


def turns_of(answer: Rollout, decode: Decode) -> list[str]:
    """Decode the turns, alternately the policy's and the environment's, special tokens included."""
    return [decode(turn) for turn in _turns(answer)]


def parts_of(answer: Rollout, decode: Decode, stop: tuple[str, ...]) -> list[str]:
    """Decode the turns as `turns_of`, the last one without what ended it, as `text_of`."""
    *before, last = _turns(answer)
    return [*map(decode, before), text_of(Rollout(last, answer.finished), decode, stop)]


def _turns(answer: Rollout) -> list[TokenIds]:
    if answer.response_mask is None:
        return [answer.response]
    return np.split(answer.response, np.flatnonzero(np.diff(answer.response_mask)) + 1)


def _start(text: str, strings: Sequence[str]) -> int | None:
    """Index at which the first completed stop string starts; the longer one if one character completes two."""
    found = [(start + len(string), start) for string in strings if (start := text.find(string)) >= 0]
    return min(found)[1] if found else None
