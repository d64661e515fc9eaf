"""Questions that are conversations: a list of messages, the last of them the user's."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from exgrpo.train.errors import DataError, shown

ROLES = ("system", "user", "assistant")


class Message(NamedTuple):
    """One message; `role` is one of `ROLES`."""

    role: str
    content: str


def read_conversation(messages: list[Any]) -> list[Message]:
    """The messages {role, content} of a row, at least one.

    Raises:
        DataError: one is none or has another role, a system message is not the first, or the last is not the user's.
    """
    found = [_message(number, message) for number, message in enumerate(messages, start=1)]
    if not found or found[-1].role != "user":
        last = f"is of the {found[-1].role}" if found else "is missing"
        raise DataError(f"the last message of the question must be of the user, and it {last}")
    return found


def _message(number: int, message: Any) -> Message:
    role, content = (message.get(key) if isinstance(message, dict) else None for key in ("role", "content"))
    if not isinstance(role, str) or not isinstance(content, str):
        raise DataError(f"message {number} of the question must be {{role, content}} with texts, got {shown(message)}")
    if role not in ROLES or (role == "system" and number > 1):
        raise DataError(
            f"message {number} of the question has the role {shown(role)}: it must be user or assistant, or system in "
            "the first message"
        )
    return Message(role, content)


def as_text(messages: Iterable[Message]) -> str:
    """A conversation as people read it."""
    return "\n\n".join(f"{message.role}: {message.content}" for message in messages)
