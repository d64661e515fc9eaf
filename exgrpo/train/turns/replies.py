"""What an environment says, as token ids: text as it is, or a message in the chat template."""

from collections.abc import Callable
from typing import Any

import numpy as np

from exgrpo.train.errors import ConfigError, shown
from exgrpo.train.records import TokenIds
from exgrpo.train.turns.settings import EnvironmentConfig

Encode = Callable[[str, bool], TokenIds]
"""A reply, and whether the turn before it ended with an EOS token, to the token ids behind that turn."""
_ASKED, _ANSWERED = "QUESTION", "ANSWER"
"""Messages of a conversation that is only looked at."""


def encoding(options: EnvironmentConfig, tokenizer: Any, eos: tuple[int, ...]) -> Encode:
    """How the replies of a run are encoded.

    Args:
        options: whether replies are messages.
        tokenizer: of the model.
        eos: ids of the tokens that end a turn.

    Raises:
        ConfigError: the chat template has no place for such messages.
    """
    if options.role is None:
        return lambda text, closed: _ids(tokenizer, text)
    role = options.role

    def encode(text: str, closed: bool) -> TokenIds:
        """Behind a turn that an EOS token has not closed, the one of the template comes first."""
        ids = _ids(tokenizer, _behind_an_answer(tokenizer, role, text))
        return ids[1:] if closed else ids

    first = encode("", False)[:1]
    if not np.isin(first, eos).all():
        raise ConfigError(
            f"environment.role: the chat template closes an answer with {shown(tokenizer.decode(first))}, which does "
            "not end a turn of this model: leave environment.role out, and let the function write what stands between "
            "two turns"
        )
    return encode


def _behind_an_answer(tokenizer: Any, role: str, text: str) -> str:
    """What the template writes between an answer and the next one, when a message of the role lies between them."""
    conversation = [
        {"role": "user", "content": _ASKED},
        {"role": "assistant", "content": _ANSWERED},
        {"role": role, "content": text},
    ]
    try:
        written = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template may raise anything
        raise ConfigError(f"environment.role: the chat template refuses messages of {role}: {shown(error)}") from error
    return written.partition(_ASKED)[2].partition(_ANSWERED)[2]


def _ids(tokenizer: Any, text: str) -> TokenIds:
    return np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
