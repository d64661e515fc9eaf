"""Strings that end an answer: where they end its tokens, and its text."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from exgrpo.train.common.records import Mask, Rollout, TokenIds

Decode = Callable[[Any], str]
"""Turns token ids into text, special tokens kept. More tokens make a text longer, and change no more of it than a last
character that was not whole."""
Tokens = Sequence[int] | TokenIds


@dataclass(frozen=True)
class Stops:
    """Stop strings, and the decoder by which they are found: one rule for all engines.

    A response ends with the token that completes the first stop string. A string spans tokens or is a part of one,
    and it counts only in the response: what the prompt ends with is no part of it.

    Attributes:
        strings: each of at least one character; none: nothing stops.
        decode: of the trainer's tokenizer.
    """

    strings: tuple[str, ...]
    decode: Decode

    def __bool__(self) -> bool:
        return bool(self.strings)

    def end(self, response: Tokens) -> int | None:
        """Length of the shortest prefix of [R] token ids whose text holds a stop string; None: there is none."""
        if not self._stopped(response):
            return None
        return 1 + bisect_left(range(1, len(response)), True, key=lambda length: self._stopped(response[:length]))

    def reached(self, response: Tokens) -> bool:
        """Whether the last token completes a stop string, at a cost that does not grow with the response.

        It misses strings that tokens without text interrupt; `cut` does not.
        """
        if not self.strings:
            return False
        # A token has at least one byte. One token more, as some decoders strip a space from the first one.
        tokens = 1 + max(len(string.encode()) for string in self.strings)
        return self._stopped(response[-tokens:]) and self._stopped(response)

    def cut(self, answer: Rollout) -> Rollout:
        """The answer without what was generated after the first stop string; as it is if it has none."""
        length = self.end(answer.response)
        if length is None:
            return answer
        parts = {"response": answer.response, "log_prob": answer.log_prob, "entropy": answer.entropy}
        shorter: dict[str, Any] = {name: of[:length].copy() for name, of in parts.items() if of is not None}
        kept = None if answer.kept is None else answer.kept[:length]
        return replace(answer, finished=True, kept=kept, **shorter)

    def _stopped(self, tokens: Tokens) -> bool:
        return bool(self.strings) and _start(self.decode(tokens), self.strings) is not None


NO_STOPS = Stops((), decode=lambda tokens: "")


def text_of(answer: Rollout, decode: Decode, stop: tuple[str, ...]) -> str:
    """What an answer says: its text before what ended it, the first stop string of its last turn or the EOS token."""
    if not answer.finished:
        return decode(answer.response)
    text = decode(answer.response) if stop else ""
    last = text if answer.written is None or not stop else decode(answer.response[_last_turn(answer.written) :])
    start = _start(last, stop)
    return decode(answer.response[:-1]) if start is None else text[: len(text) - len(last) + start]


def turns_of(answer: Rollout, decode: Decode) -> list[str]:
    """The text of each turn, special tokens kept: the policy's and the environment's in turn."""
    return [decode(turn) for turn in _turns(answer)]


def parts_of(answer: Rollout, decode: Decode, stop: tuple[str, ...]) -> list[str]:
    """The text of each turn as of `turns_of`, the last one before what ended it, as of `text_of`."""
    *before, last = _turns(answer)
    return [*map(decode, before), text_of(Rollout(last, answer.finished), decode, stop)]


def _turns(answer: Rollout) -> list[TokenIds]:
    """The tokens of each turn, the policy's and the environment's in turn."""
    if answer.written is None:
        return [answer.response]
    return np.split(answer.response, np.flatnonzero(np.diff(answer.written)) + 1)


def _last_turn(written: Mask) -> int:
    """Where the policy begins to write behind the last observation."""
    return int(np.flatnonzero(~written)[-1]) + 1


def _start(text: str, strings: Sequence[str]) -> int | None:
    """Where the stop string starts that is completed first; of two completed by one character, the longer one."""
    found = [(start + len(string), start) for string in strings if (start := text.find(string)) >= 0]
    return min(found)[1] if found else None
