r"""Parse formulas into sympy objects with Math-Verify's LaTeX parser.

The parser misreads some names: `\gamma` (as a function), dy/dx (as the derivative of a symbol, which is 0) and primes
(which it drops). They are replaced by symbols of their own.
"""

import re
from collections.abc import Callable
from typing import Any

_NAMES: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\gamma(?![A-Za-z])", r"\\text{lowergamma}"),
        (r"\\frac(\s*\{\s*d\s*(?:\^\s*\{?\s*\d\s*\}?)?\s*[^{}\d]*(?:\{\w+\}[^{}\d]*)?\}"
         r"\s*\{\s*d\s*[^{}\d]+(?:\^\s*(?:\d|\{\d\})\s*)?\})",
         lambda match: rf"\text{{D{re.sub(r'[^A-Za-z0-9]', '', match[1])}}}"),
        (r"(?<![A-Za-z\\])E(?=\s*_)", r"\\text{E}"),
        (r"\{\s*([A-Za-z])\s*\}(?=\s*(?:'|\^\s*\{?\s*\\prime))", r"\1"),
        (r"\^\s*(?:\{\s*((?:\\prime\s*)+)\}|(\\prime)(?![A-Za-z]))",
         lambda match: "'" * (match[1] or match[2]).count("prime")),
        (r"([A-Za-z])\s*(?:_\s*(?:\{([^{}]*)\}|(\w)))?\s*('+)(?:\s*_\s*(?:\{([^{}]*)\}|(\w)))?",
         lambda match: f"{match[1]}_{{{''.join(filter(None, match.group(2, 3, 5, 6)))}{'prime' * len(match[4])}}}"),
    )
]  # fmt: skip


def parse(latex: str) -> Any:
    """Return the sympy object of a formula, None if it cannot be parsed."""
    import sympy
    from latex2sympy2_extended import NormalizationConfig, latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig

    # "x<2 or x>3" is a union, but the parser reads "or" as a comma.
    for sign, joined in ((r"\\lor", sympy.Or), (r"\\land", sympy.And)):
        parts = re.split(rf"{sign}(?![A-Za-z])", latex)
        if len(parts) > 1 and re.search(r"[<>]|\\[lg]", latex):
            relations = [parse(part.strip()) for part in parts]
            return joined(*relations) if all(is_inequality(part) for part in relations) else None
    before, choose, _ = latex.partition(r"\choose")
    if choose and before.count("{") == before.count("}"):
        latex = f"{{{latex}}}"
    for pattern, replacement in _NAMES:
        latex = pattern.sub(replacement, latex)
    if "'" in latex or "\\prime" in latex:
        return None
    normalization = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
    )
    try:
        expression = latex2sympy(
            latex,
            is_real=True,
            normalization_config=normalization,
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
        # The parser reads a word as a product of letters; xreplace on a set would lose the order of its elements.
        if isinstance(expression, sympy.Expr) and (latex == "i" or not latex.isalpha()):
            expression = expression.xreplace({sympy.Symbol("i", real=True): sympy.I})
    except Exception:  # the parser raises bare exceptions for invalid input
        return None
    return None if expression.has(sympy.zoo, sympy.nan) else expression


def is_inequality(expression: Any) -> bool:
    """Return True for "x > 3", or several inequalities joined by and, or."""
    import sympy

    relations = expression.atoms(sympy.core.relational.Relational) if isinstance(expression, sympy.Basic) else ()
    return isinstance(expression, sympy.logic.boolalg.Boolean) and not any(
        isinstance(relation, sympy.Eq) for relation in relations
    )
