"""Unexpected values, for tests that draw them."""

import math

from hypothesis import strategies as st

NUMBERS = (math.nan, math.inf, -math.inf, 1e308, 5e-324, -0.0, 0, -1, 2**31, 2**63, -(2**63) - 1, 10**400)
TEXTS = (
    *("", " ", "\n", "null", "~", "nan", "inf", "-", "--", "=", "{}", "[]", "%s", "{question}", "{0}", "builtin:"),
    *("\x00", "\x1b[31mred", "\u202eright to left", "\ufeff", "\u2028", "\ud800", "\x7f", "../../etc/passwd"),
    *("/dev/zero", "http://[", "x" * 100_000, "9" * 5000, "1e999", "!!python/object:os.system"),
)
ANY_TEXT = st.sampled_from(TEXTS) | st.text(st.characters(exclude_categories=()), max_size=20)
ANY = st.recursive(
    st.sampled_from((*NUMBERS, None, True, False)) | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3),
    max_leaves=6,
)
"""A value of JSON, or one that only YAML can write, such as NaN."""


def tried(call, expected):
    """Return the result of a call and "", or None and the text of an expected error."""
    try:
        return call(), ""
    except expected as error:
        return None, str(error)
