r"""Parse the notation of an answer: numbers, formulas and the words between them.

`understand` splits the content of a box. Differences of appearance are removed (colours, fonts, spaces, dollar signs),
"and", "or" and `\quad` between numbers become commas, and words next to numbers become the words of a quantity: "3
hours 20 minutes" is a list of two quantities, not a product of four symbols.

Math-Verify's LaTeX parser misreads some names: `\gamma` (as a function), dy/dx (as the derivative of a symbol, which is
0) and primes (which it drops). They are replaced by symbols of their own.
"""

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from exgrpo.train.reward.pieces import NUMBER, TEXT, Piece, canonical, pieces

_CHARACTERS = str.maketrans(
    {
        "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ",  # noqa: RUF001
        "°": r"^\circ ", "∞": r"\infty ", "π": r"\pi ", "∅": r"\emptyset ", "∪": r"\cup ", "∩": r"\cap ",  # noqa: RUF001
        "∈": r"\in ", "²": "^{2}", "³": "^{3}", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
        "，": ",", "、": ",", "。": ".", "．": ".", "：": ":", "；": ";", "（": "(", "）": ")", "＝": "=", "％": "%",  # noqa: RUF001
        "\u2010": "-", "\u2011": "-", "\n": " ", "\t": " ", "\u00a0": " ", "\u2009": " ", "\u202f": " ",
        "′": "'", "’": "'", "″": "''", "≡": r"\equiv ",  # noqa: RUF001
    }
)  # fmt: skip
_QUALIFIER = re.compile(
    r"(?i)\b(?:or|and|not|no|less|more|fewer|greater|larger|smaller|least|most|between|than|over|times|plus|minus|under|"
    r"above|below|is|wrong|incorrect|squared|cubed|half|halves|thirds?|quarters?|squares?(?!\s+[a-z])|roots?|pi|sqrt|sin|cos|tan|"
    r"log|ln|exp|from|to|until|dozen|hundred|thousand|million|billion|trillion|base|mod|modulo)\b"
)
_POWERS_OF_TEN = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}

_EXPONENT_OF_WHOLE = 16  # Python prints whole floats with an exponent from 1e16 on

_Replacement = str | Callable[[re.Match[str]], str]


def _repeating(match: re.Match[str]) -> str:
    whole, fixed, period = match[1], match[2], next(filter(None, match.groups()[2:]))
    before, after = int(f"{whole}{fixed}" or 0), int(f"{whole}{fixed}{period}")
    value = Fraction(after - before, 10 ** len(fixed) * (10 ** len(period) - 1))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _scientific(match: re.Match[str]) -> str:
    # Python prints whole numbers of 17 digits or more with an exponent; shorter ones with an exponent were rounded.
    exact = "." in match[1] or int(match[2]) >= _EXPONENT_OF_WHOLE
    return rf"{match[1]}{'' if exact else '.0'} \times 10^{{{match[2]}}}"


_REWRITINGS: list[tuple[re.Pattern[str], _Replacement]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?<![\w)}\]])\*\*([^*]+)\*\*(?![\w(])", r"\1"),
        (r"^[*\s]+|[*\s]+$", ""),
        (r"\\\\\[[^\]]*\]", r"\\\\"),  # the space between two rows of a matrix
        # Invisible parts, fonts and colours.
        (r"\\[hv]?phantom\s*\{[^{}]*\}", ""),
        (r"\\[hv]space\*?\s*\{[^{}]*\}", r"\\quad "),
        (r"\\(?:text)?color\s*(?:\[[^\]]*\])?\s*\{[^{}]*\}", ""),
        (r"\\(?:math(?:bf|it|sf|tt)|emph|boldsymbol|bm|bf|underline|ensuremath|(?:display|text)style|[lL]arge|LARGE|huge|left\.|"
         r"right\.)(?![a-zA-Z])", ""),
        (r"\\(?:left|right|middle)\s*(?=[\[\]()|{}\\/<>])", ""),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\colon(?![A-Za-z])", ":"),
        (TEXT + r"\{\s*(\\?\$|[-+]?" + NUMBER + r"(?:[eE][-+]?\d+)?|[ei])\s*\}", r"\1"),
        (r"\\\$|\$|(?<!\\)\\[()\[\]]", ""),
        (r"(?<![A-Za-z\\.])(?:[AaPp]\.\s?[Mm]|B\.\s?C|A\.\s?D)\.?(?![A-Za-z])",
         lambda match: match[0].replace(".", "").replace(" ", "")),
        # Numbers.
        (r"(?<=\d)(?:\\[,!;: ]\s*|,\\!\s*|\{,\}|~)(?=\d{3}(?!\d))", ""),
        (r"^(-?\d{1,3})((?: \d{3})+)(?![\d/ ])", lambda match: match[1] + match[2].replace(" ", "")),
        (r"\.(\d*)\\dot\s*\{?(\d)\}?(\d*)\\dot\s*\{?(\d)\}?", r".\1\\overline{\2\3\4}"),
        (r"(?<![\d.])(\d{0,30})\.(\d{0,30})(?:\\(?:overline|bar|dot)\s*(?:\{(\d{1,30})\}|(\d))|\((\d{1,30})\))(?!\d)",
         _repeating),
        (r"(?<=\d)\.(?=\s*/)|(?<!\\right)[.](?:\s|~|\\[,;:! ])*$", ""),
        (r"(?<![\w.\\}])(\d+\.?\d*|\.\d+)[eE]\+?(-?\d+)(?![\w.])", _scientific),
        (r"\s*\*\*\s*", "^"),
        (r"\^\s*([-+])\s*(?:(\d+|[A-Za-z])(?![\w({])|\{([^{}]*)\})",
         lambda match: f"^{{{match[1]}{match[2] or f'({match[3]})'}}}"),
        (r"(?<=\d)\s*[x*]\s*(?=10\s*\^)", r" \\times "),
        (r"(?<![\d.^_{}])(\d+)\s+(\d+)\s*/\s*(\d+)", r"\1\\frac{\2}{\3}"),
        (r"(?<=[\d)}])\s*(?:" + TEXT + r"\{\s*)?(?:percent|pct|per cent)\b(?:\s*\})?", r"\\%"),
        (rf"(?<![\w.])(-?{NUMBER}) ?(?:{TEXT}\{{\s*)?({'|'.join(_POWERS_OF_TEN)})(?![A-Za-z])(?:\s*\}})?",
         lambda match: rf"{match[1]} \times 10^{{{_POWERS_OF_TEN[match[2]]}}} "),
        (r"(" + TEXT + r"\{[^{}]*)\}\s*(?:\^\s*\{?\s*(-?\d+)\s*\}?)\s*(?=[/.]|\\cdot|" + TEXT + ")", r"\1^\2}"),
        (r"(" + TEXT + r"\{[^{}]*)\}\s*(?:(/)|\\cdot)\s*" + TEXT + r"\{\s*([^{}]*)\}", r"\1 \2 \3}"),
        # Names and signs.
        (r"√\s*(\d+)", r"\\sqrt{\1}"),
        (r"√", "sqrt"),
        (r"(?<![\\A-Za-z.])(arcsin|arccos|arctan|sin|cos|tan|ln|log|exp|pi)(?![A-Za-z])", r"\\\1"),
        (r"\\log\s*(?:_\s*\{?\s*e(?![A-Za-z])\s*\}?|(?!\s*_)(?![A-Za-z]))", r"\\ln "),
        (r"\\[cdt]frac(?![A-Za-z])", r"\\frac"),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset "),
        (r"\\langle(?![A-Za-z])", "("),
        (r"\\rangle(?![A-Za-z])", ")"),
        (r"\\([lg])eqslant(?![A-Za-z])", r"\\\1e "),
        (r"<=", r"\\le "),
        (r">=", r"\\ge "),
        # Spaces; wide ones separate numbers.
        (r"(?<!\\)\\[,;:! ]|~|^(?:\\q?quad\b\s*)+|(?:\\q?quad\s*)+(?=\\text|\\mathrm|\\mbox|$)", " "),
        (r"\\q?quad(?![A-Za-z])", ", "),
        (r",(?:\s*,)+", ", "),
        (r"\s+", " "),
        # A set defined by a condition.
        (r"^\\\{\s*([A-Za-z])\s*(?:\\in\s*\\mathbb\s*\{?\s*R\s*\}?\s*)?(?:\\?\||\\mid|\\[lr]?vert|:)\s*(.+)\\\}$",
         r"\2"),
    )
]  # fmt: skip
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_PERCENT = re.compile(r"^([^,;<>]+?|[\d,.]+?) ?\\?%$")
_SIDE_BY_SIDE = re.compile(r"(?<![\w^_\\.])\d[\d.]*\s+[\d.]|\d\s*[Rr]\s*\d")
_WORDS_BETWEEN = re.compile(rf"\d\s*(?:{TEXT}\{{[^{{}}]*[A-Za-z]{{2}}[^{{}}]*\}}|\s[A-Za-z]{{2,}}\s)\s*\d")
_DECIMAL = re.compile(
    rf"([-+]?)\s*({NUMBER})(?:\s*\\(?:times|cdot)\s*10\s*\^\s*(?:\{{\s*([-+]?\d{{1,3}})\s*\}}|(\d{{1,3}})))?"
)
_BASE = re.compile(r"(?<![\w.])[0-9A-Z]+_(?:\{\s*(\d+)\s*\}|(\d+))")
_MODULUS = re.compile(
    r"\s*(?:\\pmod\s*(?:\{\s*(\w+)\s*\}|(\d+|\w))|"
    r"(?<=\d|[A-Za-z])\s*\\mod\s*\{?\s*(\w+)\s*\}?|"
    r"\(\s*(?:\\b?mod(?![A-Za-z])|" + TEXT + r"\{\s*mod\s*\}|mod\b)\s*\{?\s*(\w+)\s*\}?\s*\))\s*$"
)
_RELATION = re.compile(r"[=<>≈]|\\(?:le|ge|ne|leq|geq|neq|lt|gt|approx|in|equiv)(?![A-Za-z])")
# The "x =" of "x = 5"; in "x = 5, y = 6", "x = 5 or x = 6" and "x = 5 = 6" the last number is not the answer.
_NAME = re.compile(r"^(?!.*(?:=.*=|[<>,;≈]|\\(?:le|ge|ne|lt|gt|in|approx|lor|land)|\b(?:or|and)\b)).*=")
_CASES = re.compile(r"(?:[^={}]*=)?\s*\\begin\s*\{[dr]?cases\}(.*)\\end\s*\{[dr]?cases\}")
_BEFORE_CONDITION = re.compile(rf"\s*(?:,|{TEXT}\{{\s*(?:if|for|when)\s*\}}|\b(?:if|for|when)\b)\s*")
_CONDITION = re.compile(rf"^(?:{TEXT}\{{\s*(?:if|for|when)\s*\}}|(?:if|for|when)\b)\s*|[,;.\s]+$")


@dataclass(frozen=True)
class Decimal:
    """A number in digits."""

    value: Fraction
    unit: Fraction
    """Value of one unit of its last digit."""
    digits: int
    """Number of significant digits."""
    rounded: bool
    """True if it may be rounded: "20.39", "4.5e33" and "3e8", but not "142.0"."""
    scientific: bool
    """True if it has a power of ten."""


@dataclass(frozen=True)
class Written:
    """Parsed content of a box, or a parsed gold answer."""

    latex: str
    """Formula without words, currency and percent sign."""
    percent: bool = False
    base: str = ""
    """Subscript of "52_8"; "" without one."""
    modulus: str = ""
    """"3" of "1 (mod 3)"; "" without one."""
    words: str = ""
    """`canonical` words of the number, such as "hour"; without a number, the answer itself."""
    binding: bool = False
    """True if the words change the meaning of the number, so that they cannot be dropped: "or more"."""
    terms: tuple["Written", ...] = ()
    """Several quantities with their own words: "3 hours 20 minutes"; the other fields are then unused."""
    ordered: bool = False
    """True if the order of the terms counts."""

    @property
    def key(self) -> str:
        """Formula without spaces and braces that change nothing, equal for answers with the same notation."""
        return re.sub(r"(?<=[_^])\{(\w)\}", r"\1", re.sub(r"(?<!\d) | (?!\d)", "", self.latex))

    @functools.cached_property
    def decimal(self) -> Decimal | None:
        """Number, if the answer is nothing else ("5", "x = 5", "4.5 \\times 10^{33}")."""
        match = _DECIMAL.fullmatch(_NAME.sub("", self.latex, count=1).strip())
        if match is None or len(match[2]) > 1000:
            return None
        whole, _, decimals = match[2].replace(",", "").partition(".")
        exponent = match[3] or match[4]
        unit = Fraction(10) ** (int(exponent or 0) - len(decimals))
        value = int(f"{match[1]}{whole}{decimals}") * unit
        rounded = "." in match[2] and (value.denominator != 1 or exponent is not None)
        return Decimal(value, unit, len(f"{whole}{decimals}".lstrip("0")), rounded, exponent is not None)

    @property
    def relation(self) -> bool:
        """True for an equation, an inequality or the like."""
        return _RELATION.search(self.latex) is not None

    @functools.cached_property
    def expression(self) -> Any:
        """Sympy object, None if it cannot be parsed."""
        return None if _SIDE_BY_SIDE.search(self.latex) or _WORDS_BETWEEN.search(self.latex) else parse(self.latex)


@functools.lru_cache(maxsize=8192)
def understand(content: str) -> Written:
    """Parse the content of a box; cached, since the answers of one question repeat."""
    latex = content.translate(_CHARACTERS).strip()
    for pattern, replacement in _REWRITINGS:
        latex = pattern.sub(replacement, latex)
    latex = _without_braces(latex.strip())
    if match := _CASES.fullmatch(latex):
        return _cases(match[1])
    modulus = ""
    if match := _MODULUS.search(latex):
        latex, modulus = latex[: match.start()].replace(r"\equiv", "="), next(filter(None, match.groups()))
    written = _quantities(pieces(latex))
    return replace(written, modulus=modulus) if modulus else written


def qualified(words: str) -> bool:
    """Return True if `words` change the meaning of a number ("less than", "or", "million"), unlike a unit."""
    return _QUALIFIER.search(words) is not None


def closing_brace(text: str, start: int) -> int | None:
    """Return the index of the brace that closes the one opened just before `start`, None without one."""
    depth = 1
    for token in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(token.group(), 0)
        if depth == 0:
            return token.start()
    return None


def _without_braces(latex: str) -> str:
    while latex.startswith("{") and closing_brace(latex, 1) == len(latex) - 1:
        latex = latex[1:-1].strip()
    return latex


def _cases(body: str) -> Written:
    """Parse a function by cases: rows of a value and its condition, in any order."""
    rows = [[_CONDITION.sub("", cell.strip()) for cell in row.split("&")] for row in body.split(r"\\") if row.strip()]
    rows = [[cell for cell in row if cell] for row in rows]
    if all(len(row) == 1 for row in rows):
        rows = [_BEFORE_CONDITION.split(row[0], maxsplit=1) for row in rows]
    if all(len(row) == 1 for row in rows):
        return understand(", ".join(row[0] for row in rows))  # a system of equations
    return Written("", terms=tuple(Written("", terms=tuple(map(understand, row)), ordered=True) for row in rows))


@dataclass(frozen=True)
class _Term:
    lead: str = ""
    math: str = ""
    trail: str = ""
    droppable: bool = True

    def written(self) -> Written:
        words, binding = canonical(self.trail), not self.droppable or qualified(self.trail)
        if self.lead:
            lead, binding = canonical(self.lead), True
            words = lead if not words and not qualified(lead) else f"{lead} _ {words}"
        return replace(_formula(self.math), words=words, binding=binding)


def _quantities(found: Sequence[Piece]) -> Written:
    terms = [term for segment in _segments(found) for term in _terms(segment)]
    plain = [term for term in terms if term.math]
    words = {canonical(term.trail) for term in terms if term.trail}
    bare = [not term.trail for term in terms]
    alone = len(plain) == len(terms) and not any(term.lead for term in terms)
    droppable = all(term.droppable and not qualified(term.trail) for term in terms)
    if alone and len(words) <= 1 and (droppable or len(terms) == 1) and (not any(bare[:-1]) or all(bare[:-1])):
        # "1, 2", "1 cm, 2 cm" and "1, 2 cm".
        if not all(bare[:-1]) and bare[-1]:
            return Written("", terms=tuple(term.written() for term in terms), ordered=True)
        return replace(_formula(", ".join(term.math for term in plain)), words="".join(words), binding=not droppable)
    if len(terms) == 1:
        return terms[0].written()
    written = tuple(term.written() for term in terms)
    return Written("", terms=written, ordered=not all(term.words for term in written))


def _segments(found: Iterable[Piece]) -> list[list[Piece]]:
    segments: list[list[Piece]] = [[]]
    for piece in found:
        if piece.kind == "separator":
            segments.append([])
        else:
            segments[-1].append(piece)
    return [segment for segment in segments if segment]


def _terms(segment: Sequence[Piece]) -> list[_Term]:
    """Attach words to the number before them, or to the number after if every number of the segment follows words."""
    labels = segment[0].kind == "words" and segment[-1].kind == "math"
    terms: list[_Term] = []
    lead = ""
    for piece in segment:
        if piece.kind == "math":
            terms.append(_Term(lead=lead, math=piece.text))
            lead = ""
        elif labels or not terms:
            lead = f"{lead} {piece.text}".strip()
        else:
            last = terms[-1]
            trail = f"{last.trail} {piece.text}".strip()
            terms[-1] = replace(last, trail=trail, droppable=last.droppable and piece.droppable)
    return [*terms, _Term(trail=lead)] if lead else terms


def _formula(latex: str) -> Written:
    latex, percent = _without_braces(latex.strip()), False
    if match := _PERCENT.match(latex):
        latex, percent = match[1].strip(), True
    base = _BASE.fullmatch(latex)
    return Written(latex, percent, (base[1] or base[2]) if base else "")


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
