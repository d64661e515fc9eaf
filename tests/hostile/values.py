"""Values that nobody expects."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import sampled_from as of

from tests.hostile.judge import Trial

Draw = Callable[[st.SearchStrategy[Any]], Any]
"""Takes a value from a strategy."""
Way = Callable[[Draw, Path], Trial]
"""Draws a case of one kind; its files go into an empty folder. A module of a kind has its ways in WAYS."""

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
ANY_TEXT = of(TEXTS) | of(TEXTS) | st.text(st.characters(exclude_categories=()), max_size=20)
ANY = st.recursive(
    of(NUMBERS) | of((None, True, False)) | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3),
    max_leaves=6,
)
"""A value of JSON, or one that only YAML can write, such as NaN."""
ODD_BYTES = (b"\x00", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\x1b[2J", b"\xef\xbb\xbf", b"\r", b"\x85")


def damaged(draw: Draw, content: bytes) -> bytes:
    """A content of which a part is gone, twice there or other bytes."""
    start = draw(st.integers(0, len(content)))
    end = min(len(content), start + draw(of((1, 1, 4, 64))))
    before, part, rest = content[:start], content[start:end], content[end:]
    other = draw(st.binary(min_size=len(part), max_size=len(part)))
    odd = before + draw(of(ODD_BYTES)) + part + rest
    return draw(of((before, before + rest, before + part * 2 + rest, before + other + rest, odd)))


def some(draw: Draw, low: int, high: int) -> int:
    """A whole number between two, both included."""
    return draw(st.integers(low, high))
