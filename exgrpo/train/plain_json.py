"""JSON from people, whatever it holds: plain values, or an error."""

import json
from typing import Any


def parse(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is none, is nested more deeply or has a number of more digits than Python reads, or holds half of
            a surrogate pair, which no file can take; a JSONDecodeError where the place is known.
    """
    try:
        value = json.loads(text)
        if isinstance(text, bytes) or "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("it holds half of a surrogate pair, which is no character") from None
    return value
