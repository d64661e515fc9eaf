r"""What is written in an answer, rewritten so that Math-Verify's LaTeX parser reads what a mathematician would.

Some of it the parser refuses: colours, `\bm`, "≤", "**42**", "72 clips". Some of it it misreads: "4.5e33" (as
4.5 * e * 33), "1 000" (as 1 * 0), "2 1/2", "5 million" (as 5), "3t" (as 3 tonnes), "R" (as "r").
"""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

_CHARACTERS = str.maketrans(
    {
        "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ",  # noqa: RUF001
        "°": r"^\circ ", "∞": r"\infty ", "π": r"\pi ", "∅": r"\emptyset ", "∪": r"\cup ", "∩": r"\cap ",  # noqa: RUF001
        "∈": r"\in ", "²": "^{2}", "³": "^{3}", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
        "，": ",", "。": ".", "．": ".", "：": ":", "；": ";", "（": "(", "）": ")", "＝": "=", "％": "%",  # noqa: RUF001
        "\u2010": "-", "\u2011": "-", "\n": " ", "\t": " ", "\u00a0": " ", "\u2009": " ", "\u202f": " ",
    }
)  # fmt: skip
_NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d*)?|\d+(?:\.\d*)?|\.\d+)"
_UNIT = (
    r"(?:mm|cm|dm|km|mg|kg|ms|ml|mL|ft|in|lb|mi|oz|yd|hr|min|sec|day|mph|rad|mol|erg|cal|gal|atm|Hz|eV|keV|MeV|GeV|"
    r"Pa|(?<=[ /])[mgshL])s?(?:\^\{?-?\d\}?)?"
)
_QUALIFIER = re.compile(
    r"(?i)\b(?:or|and|not|no|less|more|fewer|greater|larger|smaller|least|most|between|than|over|times|plus|minus|under|"
    r"above|below|is|wrong|incorrect|squared|cubed|half|halves|thirds?|quarters?|squares?(?!\s+[a-z])|roots?|pi|sqrt|sin|cos|tan|"
    r"log|ln|exp|from|to|until|dozen|hundred|thousand|million|billion|trillion|base|mod|modulo)\b"
)
_POWERS_OF_TEN = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}

_Replacement = str | Callable[[re.Match[str]], str]
_REWRITINGS: list[tuple[re.Pattern[str], _Replacement]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\\\\[[^\]]*\]", r"\\\\"),  # the space between two rows of a matrix
        # What is not seen, and how the rest looks.
        (r"\\(?:[hv]?phantom|[hv]space\*?)\s*\{[^{}]*\}", ""),
        (r"\\(?:text)?color\s*(?:\[[^\]]*\])?\s*\{[^{}]*\}", ""),
        (r"\\(?:mathbf|mathit|boldsymbol|bm|bf|underline|ensuremath|(?:display|text)style|[lL]arge|LARGE|huge|left\.|"
         r"right\.)(?![a-zA-Z])", ""),
        (r"\\(?:text\w*|mathrm|mbox)\s*\{\s*(\\?\$|[-+]?" + _NUMBER + r"|[ei])\s*\}", r"\1"),
        (r"\\\$|\$|(?<!\\)\\[()\[\]]", ""),
        # Numbers.
        (r"(?<=\d)(?:\\[,!;: ]\s*|,\\!\s*|\{,\}|~)(?=\d{3}(?!\d))", ""),
        (r"^(-?\d{1,3})((?: \d{3})+)(?![\d/ ])", lambda match: match[1] + match[2].replace(" ", "")),
        (r"(?<=\d)\.(?=\s*/)|(?<!\\right)[.]\s*$", ""),
        (r"(?<![\w.\\}])(\d+\.?\d*|\.\d+)[eE]([+-]?\d+)(?![\w.])",
         lambda match: rf"{match[1]}{'' if '.' in match[1] else '.0'} \times 10^{{{match[2]}}}"),
        (r"(?<=\d)\s*[x*]\s*(?=10\s*\^)", r" \\times "),
        (r"(?<![\d.^_{}])(\d+)\s+(\d+)\s*/\s*(\d+)", r"\1\\frac{\2}{\3}"),
        (r"√\s*(\d+)", r"\\sqrt{\1}"),
        (r"√", "sqrt"),
        # Names. The parser would take the derivative of a symbol, which is 0, and \gamma for a function.
        (r"\\gamma(?![A-Za-z])", r"\\text{lowergamma}"),
        (r"\\[dt]?frac(\s*\{\s*d\s*(?:\^\s*\{?\s*\d\s*\}?)?\s*[^{}\d]*(?:\{\w+\}[^{}\d]*)?\}"
         r"\s*\{\s*d\s*[^{}\d]+(?:\^\s*(?:\d|\{\d\})\s*)?\})",
         lambda match: rf"\text{{D{re.sub(r'[^A-Za-z0-9]', '', match[1])}}}"),
        (r"(?<![\\A-Za-z.])(arcsin|arccos|arctan|sin|cos|tan|ln|log|exp|pi)(?![A-Za-z])", r"\\\1"),
        (r"\\log\s*(?:_\s*\{?\s*e(?![A-Za-z])\s*\}?|(?!\s*_)(?![A-Za-z]))", r"\\ln "),
        (r"\\[cdt]frac(?![A-Za-z])", r"\\frac"),
        (r"(?<![A-Za-z\\])E(?=\s*_)", r"\\text{E}"),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset "),
        (r"\\langle(?![A-Za-z])", "("),
        (r"\\rangle(?![A-Za-z])", ")"),
        (r"\\([lg])eqslant(?![A-Za-z])", r"\\\1e "),
        (r"<=", r"\\le "),
        (r">=", r"\\ge "),
        (r"(?<!\\)\\[,;:! ]|~|^(?:\\q?quad\b)+|\\q?quad\s*(?=\\text|\\mathrm|\\mbox|$)", " "),
        (r"\\q?quad(?![A-Za-z])", ", "),
        (r"\s+", " "),
    )
]  # fmt: skip
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_TEN = re.compile(
    rf"^(-?{_NUMBER}) ?(?:\\(?:text|mbox|mathrm)\s*\{{\s*)?({'|'.join(_POWERS_OF_TEN)})(?:\s*\}})?(?![A-Za-z])"
)
_TEXT_UNIT = re.compile(r"(?:[ /.]|\\cdot)*\\(?:text\w*|mbox|mathrm)\s*\{([^{}]*)\}(?:\s*\^\s*(?:\{-?\d+\}|\d))?\s*$")
_PLAIN_UNIT = re.compile(
    rf"^(-?{_NUMBER}(?: ?\\(?:times|cdot) ?10\^\{{?-?\d+\}}?)?)"
    rf"(?: ?{_UNIT}(?: ?/ ?{_UNIT})?|((?: [A-Za-z]{{2,}}(?:/[a-z]+)?)* [A-Za-z]{{4,}}))$"
)
_PERCENT = re.compile(r"^([^,;<>]+?|[\d,.]+?) ?(?:\\?%|\\?(?:text\s*\{)?\s*(?:percent|pct)\b\s*\}?)$")
_SIDE_BY_SIDE = re.compile(r"(?<![\w^_\\.])\d[\d.]*\s+[\d.]")
_DECIMAL = re.compile(
    rf"([-+]?)\s*({_NUMBER})(?:\s*\\(?:times|cdot)\s*10\s*\^\s*(?:\{{\s*([-+]?\d{{1,3}})\s*\}}|(\d{{1,3}})))?"
)
_BASE = re.compile(r"(?<![\w.])[0-9A-Z]+_(?:\{\s*(\d+)\s*\}|(\d+))")
_RELATION = re.compile(r"[=<>≈]|\\(?:le|ge|ne|leq|geq|neq|lt|gt|approx|in)(?![A-Za-z])")
# The "x =" of "x = 5"; in "x = 5, y = 6", "x = 5 or x = 6" and "x = 5 = 6" the last number is not the answer.
_NAME = re.compile(r"^(?!.*(?:=.*=|[<>,;≈]|\\(?:le|ge|ne|lt|gt|in|approx|lor|land)|\b(?:or|and)\b)).*=")


@dataclass(frozen=True)
class Decimal:
    """A number written in digits."""

    value: Fraction
    unit: Fraction
    """Worth of one unit of the last digit that is written."""
    digits: int
    """How many significant digits are written."""
    rounded: bool
    """Whether it has decimals that may stand for more of them: "20.39", "4.5e33" and "3e8", but not "142.0"."""


@dataclass(frozen=True)
class Written:
    """The content of a box, or a gold answer, as it is understood."""

    latex: str
    """For the parser; without units, currency and percent sign."""
    percent: bool
    base: str
    """Index of "52_8"; "" without one."""

    @property
    def key(self) -> str:
        """Equal for answers that are written alike, up to spaces and braces that change nothing."""
        return re.sub(r"(?<=[_^])\{(\w)\}", r"\1", re.sub(r"(?<!\d) | (?!\d)", "", self.latex))

    @functools.cached_property
    def decimal(self) -> Decimal | None:
        """The number, if it is no more than that ("5", "x = 5", "4.5 \\times 10^{33}")."""
        match = _DECIMAL.fullmatch(_NAME.sub("", self.latex, count=1).strip())
        if match is None or len(match[2]) > 1000:
            return None
        whole, _, decimals = match[2].replace(",", "").partition(".")
        exponent = match[3] or match[4]
        unit = Fraction(10) ** (int(exponent or 0) - len(decimals))
        value = int(f"{match[1]}{whole}{decimals}") * unit
        rounded = "." in match[2] and (value.denominator != 1 or exponent is not None)
        return Decimal(value, unit, len(f"{whole}{decimals}".lstrip("0")), rounded)

    @property
    def relation(self) -> bool:
        """Whether it is an equation, an inequality or the like."""
        return _RELATION.search(self.latex) is not None

    @functools.cached_property
    def expression(self) -> Any:
        """The sympy object, None when it cannot be read."""
        return None if _SIDE_BY_SIDE.search(self.latex) else _parse(self.latex)


@functools.lru_cache(maxsize=8192)
def understand(content: str) -> Written:
    """Rewrites the content of a box; the group of rollouts of one question meets the same ones again and again."""
    latex = content.translate(_CHARACTERS).strip("* ")
    for pattern, replacement in _REWRITINGS:
        latex = pattern.sub(replacement, latex)
    latex, percent = _without_braces(latex.strip()), False
    latex = _TEN.sub(lambda match: rf"{match[1]} \times 10^{{{_POWERS_OF_TEN[match[2]]}}}", latex)
    if match := _PERCENT.match(latex):
        latex, percent = match[1].strip(), True
    latex = _without_units(latex)
    base = _BASE.fullmatch(latex)
    return Written(latex, percent, (base[1] or base[2]) if base else "")


def qualified(words: str) -> bool:
    """Whether `words` beside a number change what it says ("less than", "or", "million"), unlike a unit."""
    return _QUALIFIER.search(words) is not None


def closing_brace(text: str, start: int) -> int | None:
    """Index of the brace that closes the one opened just before `start`."""
    depth = 1
    for token in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(token.group(), 0)
        if depth == 0:
            return token.start()
    return None


def is_inequality(expression: Any) -> bool:
    """Whether it is "x > 3", or several of that kind joined by and, or."""
    import sympy

    relations = expression.atoms(sympy.core.relational.Relational) if isinstance(expression, sympy.Basic) else ()
    return isinstance(expression, sympy.logic.boolalg.Boolean) and not any(
        isinstance(relation, sympy.Eq) for relation in relations
    )


def _without_braces(latex: str) -> str:
    while latex.startswith("{") and closing_brace(latex, 1) == len(latex) - 1:
        latex = latex[1:-1].strip()
    return latex


def _without_units(latex: str) -> str:
    while (match := _TEXT_UNIT.search(latex)) and not qualified(match[1]):
        rest = latex[: match.start()].rstrip()
        if not rest or (rest[-1] not in ")]}" and not re.search(r"[\dA-Za-z]$", rest)):
            break
        latex = rest
    match = _PLAIN_UNIT.match(latex)
    return match[1] if match and not qualified(match[2] or "") else latex


def _parse(latex: str) -> Any:
    import sympy
    from latex2sympy2_extended import NormalizationConfig, latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig

    # "x<2 or x>3" is a union, but the parser takes "or" for a comma.
    parts = re.split(r"\\text\s*\{\s*or\s*\}|\\lor(?![A-Za-z])|\bor\b", latex)
    if len(parts) > 1 and re.search(r"[<>]|\\[lg]", latex):
        relations = [_parse(part.strip()) for part in parts]
        return sympy.Or(*relations) if all(is_inequality(part) for part in relations) else None
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
        # A word is a product of letters to the parser; a set would forget the order of its elements.
        if isinstance(expression, sympy.Expr) and (latex == "i" or not latex.isalpha()):
            expression = expression.xreplace({sympy.Symbol("i", real=True): sympy.I})
    except Exception:  # the parser raises bare ones for what it cannot read
        return None
    return None if expression.has(sympy.zoo, sympy.nan) else expression
