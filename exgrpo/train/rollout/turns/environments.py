"""Find environment functions, bind their columns, and encode their replies."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from exgrpo.train.common.errors import ConfigError, RolloutError, shown
from exgrpo.train.common.functions import Needs
from exgrpo.train.common.records import TokenIds
from exgrpo.train.config.rollout import ENVIRONMENTS, EnvironmentConfig
from exgrpo.train.data.questions import Question
from exgrpo.train.reward.contract import Columns, columns_of

Reply = Callable[[str], str | None]
"""Takes the text that the policy has written since the last reply; returns the text to append, or None."""
Encode = Callable[[str, bool], TokenIds]
"""Takes a reply, and True if the turn before it ended with EOS; returns the token ids to append to that turn."""


@dataclass(frozen=True)
class Environment:
    """An environment function.

    Attributes:
        function: called at the beginning of an answer.
        columns: columns of a question's row that the function takes.
        stop: strings at which the policy waits for a reply.
    """

    name: str
    function: Callable[..., Reply]
    columns: Columns
    stop: tuple[str, ...]

    def begin(self, question: Question) -> Reply:
        """Return the reply function for one answer to a question.

        Raises:
            RolloutError: the environment raises, or returns something that is not callable.
        """
        try:
            reply = self.function(question.text, question.gold, **self.columns.of(question.columns))
        except Exception as error:  # user code may raise anything
            cause = f"{type(error).__name__}: {shown(error)}"
            raise self._useless(question, cause) from error
        if not callable(reply):
            raise self._useless(question, f"it gave {shown(reply)}, which cannot be called")
        return reply

    def _useless(self, question: Question, cause: str) -> RolloutError:
        return RolloutError(
            f"environment {self.name!r} cannot begin an answer to {shown(question.text)}: {cause}. Fix it, and go on "
            "with --resume auto"
        )


def find_environment(options: EnvironmentConfig) -> Environment | None:
    """Return the environment of a run; None: it has none.

    Raises:
        ConfigError: there is no such function, or it cannot be called with a question.
    """
    if options.function is None:
        return None
    name = options.function
    function = ENVIRONMENTS.find(name)
    columns = columns_of(function, f"environment {name!r}", "(question, gold)", ConfigError)
    stop = options.stop if options.stop is not None else Needs.of(function).stop
    return Environment(name, function, columns, stop)


def encoding(options: EnvironmentConfig, tokenizer: Any, eos: tuple[int, ...]) -> Encode:
    """Return the function that encodes replies: as plain text, or as messages of the role that the options name.

    Raises:
        ConfigError: the chat template does not accept messages of this role.
    """
    if options.role is None:
        return lambda text, closed: _ids(tokenizer, text)
    role = options.role

    def encode(text: str, closed: bool) -> TokenIds:
        """Encode a reply; after a turn without an EOS token, the template's own one comes first."""
        from exgrpo.train.policy.tokenizer import behind_an_answer  # brings torch, which early checks do without

        try:
            behind = behind_an_answer(tokenizer, {"role": role, "content": text})
        except Exception as error:  # a template may raise anything
            raise ConfigError(
                f"environment.role: the chat template refuses messages of {role}: {shown(error)}"
            ) from error
        ids = _ids(tokenizer, behind)
        return ids[1:] if closed else ids

    first = encode("", False)[:1]
    if not np.isin(first, eos).all():
        raise ConfigError(
            f"environment.role: the chat template closes an answer with {shown(tokenizer.decode(first))}, which does "
            "not end a turn of this model: leave environment.role out, and let the function write the text between "
            "two turns"
        )
    return encode


def _ids(tokenizer: Any, text: str) -> TokenIds:
    return np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
