"""Values that nobody expects, drawn from a generator."""

import math
import random
from typing import Any

NUMBERS: tuple[Any, ...] = (
    *(math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324, -0.0),
    *(0, -1, 2**31, 2**63, -(2**63) - 1, 10**400, -(10**400)),
)
TEXTS = (
    *("", " ", "\n", "\t", "null", "~", "nan", "inf", "true", "-", "--", "=", "{}", "[]", "%s", "{question}", "{0}"),
    *("\x00", "\x1b[31mred", "\u202eright to left", "\ufeff", "\u2028", "e\u0301", "\U0001f600", "\ud800", "\x7f"),
    *("../../etc/passwd", "/dev/null", "/dev/zero", "builtin:", "builtin:nothing", "http://[", "a" * 300, "\\", "'\""),
    *("x" * 100_000, "9" * 5000, "1e999", "0x10", "1_000", "١٢٣", "!!python/object:os.system"),
)


def text(rng: random.Random) -> str:
    """A text that somebody might not expect."""
    if rng.random() < 0.7:
        return rng.choice(TEXTS)
    return "".join(chr(rng.choice((rng.randrange(128), rng.randrange(0x110000)))) for _ in range(rng.randrange(20)))


def value(rng: random.Random, depth: int = 3) -> Any:
    """A value of JSON, or one that only YAML can write, such as NaN."""
    kind = rng.randrange(7 if depth else 4)
    match kind:
        case 0:
            return rng.choice(NUMBERS)
        case 1:
            return rng.choice((None, True, False))
        case 2 | 3:
            return text(rng)
        case 4 | 5:
            return [value(rng, depth - 1) for _ in range(rng.randrange(4))]
        case _:
            return {text(rng): value(rng, depth - 1) for _ in range(rng.randrange(4))}


def damaged(rng: random.Random, content: bytes) -> bytes:
    """A content of which a part is gone, twice there or other bytes."""
    start, end = sorted(rng.randrange(len(content) + 1) for _ in range(2))
    end = min(end, start + rng.choice((1, 1, 4, 64)))
    match rng.randrange(5):
        case 0:
            return content[:start]
        case 1:
            return content[:start] + content[end:]
        case 2:
            return content[:start] + content[start:end] * 2 + content[end:]
        case 3:
            return content[:start] + rng.randbytes(end - start) + content[end:]
        case _:
            odd = rng.choice((b"\x00", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\x1b[2J", b"\xef\xbb\xbf", b"\r", b"\x85"))
            return content[:start] + odd + content[start:]
