r"""Split an answer into formulas and the words between them: "3\text{ hours }20\text{ minutes}" has four pieces.

Letters without \text count as words where a formula would not have them: "12 chickens and 8 rabbits", but not "2ab",
"MR=SRMC" or "n mod 3". Two numbers with words are compared only if the words are the same, or units of one quantity,
which are converted ("3 hours" and "180 minutes"). A word that is no known unit is a quantity of its own.
"""

import functools
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Literal, NamedTuple

_INCH = Fraction(254, 10_000)  # in metres
_POUND = Fraction(45_359_237, 100_000)  # in grams
_GALLON = Fraction(3_785_411_784, 10**9)  # in litres
_TABLE: dict[str, dict[str, Fraction | int]] = {
    "length": {
        "mm millimeter millimetre": Fraction(1, 1000), "cm centimeter centimetre": Fraction(1, 100),
        "dm decimeter decimetre": Fraction(1, 10), "m meter metre": 1, "km kilometer kilometre": 1000,
        "in inch": _INCH, "ft foot feet": 12 * _INCH, "yd yard": 36 * _INCH, "mi mile": 63_360 * _INCH,
    },
    "time": {
        "ms millisecond": Fraction(1, 1000), "s sec second": 1, "min minute": 60, "h hr hour": 3600, "day": 86_400,
        "week": 604_800,
    },
    "months": {"month": 1, "yr year": 12, "decade": 120, "century": 1200},
    "mass": {
        "mg milligram": Fraction(1, 1000), "g gram": 1, "kg kilogram": 1000, "ton tonne": 10**6,
        "oz ounce": _POUND / 16, "lb pound": _POUND,
    },
    "volume": {
        "ml milliliter millilitre": Fraction(1, 1000), "cl": Fraction(1, 100), "dl": Fraction(1, 10),
        "l liter litre": 1, "gal gallon": _GALLON, "quart": _GALLON / 4, "pint": _GALLON / 8, "cup": _GALLON / 16,
    },
    "money": {"dollar": 1, "cent": Fraction(1, 100)},
    "angle": {"degree deg": 1, "arcminute": Fraction(1, 60), "arcsecond": Fraction(1, 3600)},
    "radian": {"radian rad": 1},
    "frequency": {"hz hertz": 1, "khz kilohertz": 1000, "mhz megahertz": 10**6, "ghz gigahertz": 10**9},
    "energy": {"j joule": 1, "kj kilojoule": 1000},
    "electronvolt": {"ev": 1, "kev": 1000, "mev": 10**6, "gev": 10**9},
    "pressure": {"pa pascal": 1, "kpa kilopascal": 1000},
}  # fmt: skip
"""Names and sizes of units, in the base unit of each quantity."""
_UNITS = {
    name: (quantity, Fraction(size))
    for quantity, units in _TABLE.items()
    for names, size in units.items()
    for name in names.split()
}
_SYMBOLS = {"mol", "erg", "cal", "kcal", "atm", "mph", "kmh"}  # units that are not converted
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
_WORD = re.compile(r"([^\s/^]+)(?:\s*\^\s*\{?\s*(-?\d{1,3})\s*\}?)?|/")


class Measure(NamedTuple):
    """Physical meaning of the words of a number.

    Attributes:
        quantity: powers of base quantities, such as {("length", 1), ("time", -1)}.
        factor: size of the unit in the base units of that quantity.
    """

    quantity: frozenset[tuple[str, int]]
    factor: Fraction


@functools.lru_cache(maxsize=4096)
def measure(words: str) -> Measure:
    """Return the meaning of words normalised by `canonical`."""
    powers: dict[str, int] = {}
    factor, sign, before = Fraction(1), 1, 1
    last = ""
    for match in _WORD.finditer(words):
        word = match[1]
        if word is None or word == "per":
            sign = -1
        elif word in ("squared", "cubed") and last:
            more = _POWERS[word] - 1
            name, size = _UNITS.get(last, (last, Fraction(1)))
            step = (1 if powers[name] > 0 else -1) * more
            powers[name] += step
            factor *= size**step
        elif word in _POWERS and word not in ("squared", "cubed"):
            before = _POWERS[word]
        else:
            power = sign * before * int(match[2] or 1)
            name, size = _UNITS.get(word, (word, Fraction(1)))
            powers[name] = powers.get(name, 0) + power
            factor *= size**power
            sign, before, last = 1, 1, word
    return Measure(frozenset((name, power) for name, power in powers.items() if power), factor)


def is_unit(word: str) -> bool:
    """Return True if a word without spaces is a unit of measurement, singular or plural: "cm", "Hours"."""
    word = _singular(word.lower())
    return word in _UNITS or word in _SYMBOLS


def canonical(words: str) -> str:
    """Return words in lower case and singular, without full stops: "Hours" becomes "hour"."""
    text = re.sub(r"(?<=[A-Za-z])\.|[~\\{}$]|\*\*", lambda match: "" if match[0] == "." else " ", words).lower()
    text = re.sub(r"^[\s:.,;!]+|[\s:.,;!]+$", "", text)
    return re.sub(r"[^\W\d_]+", lambda word: _singular(word[0]), " ".join(text.split()))


def _singular(word: str) -> str:
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    if re.search(r"(?:ss|x|ch|sh)es$", word):
        return word[:-2]
    return word[:-1] if len(word) > 2 and word.endswith("s") and not word.endswith(("ss", "us", "is")) else word


NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d*)?|\d+(?:\.\d*)?|\.\d+)"
TEXT = r"\\(?:text\w*|mathrm|mbox|operatorname)\s*"

_SHORT = frozenset(
    ("a", "all", "am", "an", "and", "any", "as", "at", "be", "but", "by", "each", "ft", "if", "in", "is", "it", "no",
     "none", "not", "odd", "of", "off", "on", "one", "only", "or", "out", "per", "pm", "six", "so", "ten", "than",
     "the", "then", "to", "two", "up", "vs", "yes")
)  # fmt: skip
_CAPITALS = frozenset(("AD", "AM", "BC", "BCE", "CE", "PM", "USD", "EUR", "GBP"))
_HALVES = frozenset(("am", "pm"))
_SEEN = 200  # characters of the formula so far that are matched backwards
_LONG = 4  # letters from which on a word is not a product of symbols
_TOKEN = re.compile(
    rf"(?P<text>{TEXT}\{{(?P<content>[^{{}}]*)\}}(?P<power>\s*\^\s*(?:\{{\s*-?\d+\s*\}}|\d))?)"
    r"|(?P<open>\\begin\s*\{\w+\*?\}|\\?\{|[(\[])|(?P<close>\\end\s*\{\w+\*?\}|\\?\}|[)\]])"
    r"|(?P<row>\\\\)|(?P<logic>\\(?:lor|vee|land|wedge)(?![A-Za-z]))|(?P<also>\\&)"
    r"|(?P<degree>\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})(?:\s*(?P<scale>[CFK])(?![A-Za-z]))?)"
    rf"|(?P<command>\\(?:[A-Za-z]+|.))|(?P<number>{NUMBER})|(?P<separator>[,;])"
    r"|(?P<plain>(?:[A-Za-z]{2,}(?:[-.][A-Za-z]+)*(?:'s\b|n't\b)?)"
    r"(?: (?:[A-Za-z]{2,}(?:-[A-Za-z]+)*|a(?= )))*\.?)"
    r"|(?P<other>.)",
    re.DOTALL,
)
_IN_TEXT = re.compile(rf"\s*(?:(?P<number>(?<![\w^])(?<!\^-)[-+]?{NUMBER}(?![\w/^]))|(?P<separator>[,;]))\s*")
_CONNECTIVE = re.compile(r"\s*\b(and/or|and also|as well as|and|or)\b\s*")
_LEADING = re.compile(r"^\s*(?:either|both)\b\s*", re.IGNORECASE)
_NUMBER_AND_WORD = re.compile(rf"({NUMBER}) ([a-z]{{3}})")
_COMMANDS = "cdot|times|div|pm|mp|le|ge|ne|leq|geq|neq|approx|in|to"
_OPERATOR_BEFORE = re.compile(rf"(?:[=+\-*/^_<>|(]|\\(?:{_COMMANDS}))\s*$")
_OPERATOR_BEHIND = re.compile(rf"\s*(?:[=+\-*/^_<>(]|\\(?:{_COMMANDS})(?![A-Za-z]))")
_POWER = r"(?:\^\{?\d\}?(?!\d))"
_PLAIN_RATIO = re.compile(rf" ?/ ?([A-Za-z]+){_POWER}?")
_PLAIN_POWER = re.compile(_POWER)
_SYMBOL_UNIT = re.compile(rf" [mgshL](?![A-Za-z']){_POWER}?(?: ?/ ?[A-Za-z]+{_POWER}?)?\s*(?=$|[,;])")
_OPERAND = re.compile(r"\s*[\dA-Za-z\\]")
_PURE = re.compile(r"[-+]?(?:[\d\s.,/{}+-]|\\(?:frac|sqrt|pi|pm)(?![A-Za-z]))+")
ORDER = re.compile(r"[<>]|\\(?:[lg]eq?|[lg]t)(?![A-Za-z])")


class Piece(NamedTuple):
    """A part of an answer.

    Attributes:
        kind: a formula, words, or a separator of two answers (text is then empty).
        text: the part verbatim.
        droppable: True if the words may be the unit of the number before them, which an answer may omit.
    """

    kind: Literal["math", "words", "separator"]
    text: str = ""
    droppable: bool = True


_SEPARATOR = Piece("separator")


def pieces(latex: str) -> list[Piece]:
    """Return the parts of an answer outside all brackets, in order."""
    found: list[Piece] = []
    math = ""
    for piece in _read(_LEADING.sub("", latex)):
        if piece.kind == "math":
            math += piece.text
            continue
        if math.strip():
            found.append(Piece("math", math.strip()))
        math = ""
        found.append(piece)
    found += [Piece("math", math.strip())] if math.strip() else []
    if all(piece.kind != "words" for piece in found):
        return found
    return [part for piece in found for part in _shortest_words(piece)]


def _shortest_words(piece: Piece) -> list[Piece]:
    """Count three letters after a number as a word if there are other words: "5 blue and 3 red"."""
    match = _NUMBER_AND_WORD.fullmatch(piece.text) if piece.kind == "math" else None
    return [Piece("math", match[1]), Piece("words", match[2], droppable=False)] if match else [piece]


def _read(latex: str) -> Iterator[Piece]:
    """Yield pieces; adjacent formulas are not yet joined."""
    order, digits = ORDER.search(latex) is not None, re.search(r"\d", latex) is not None
    depth, position, math = 0, 0, ""
    while position < len(latex):
        match = _TOKEN.match(latex, position)
        assert match is not None  # `other` matches every character
        kind = "text" if match["text"] is not None else "degree" if match["degree"] else match.lastgroup
        depth = max(0, depth + (kind == "open") - (kind == "close"))
        text = match[0]
        unit = _SYMBOL_UNIT.match(latex, position) if depth == 0 and math[-1:].isdigit() else None
        if unit:
            text, given = unit[0], [Piece("words", unit[0].strip())]
        elif depth or kind in ("open", "close", "number", "command", "other"):
            given = [Piece("math", text)]
        elif kind in ("separator", "row", "also"):
            given = [_SEPARATOR]
        elif kind == "logic":
            given = [_SEPARATOR if digits and not order else Piece("math", text)]
        elif kind == "degree":
            pure = _PURE.fullmatch(math.strip()) and not _OPERATOR_BEHIND.match(latex, match.end())
            given = [Piece("words", f"degree {match['scale'] or ''}") if pure else Piece("math", text)]
        elif kind == "text":
            given = _of_text(match, math, order=order)
        else:
            given, text = _of_plain(match, math, order=order)
        yield from given
        for piece in given:
            math = (math + piece.text)[-_SEEN:] if piece.kind == "math" else ""
        position += len(text)


def _of_text(match: re.Match[str], math: str, *, order: bool) -> list[Piece]:
    content = match["content"]
    alone = match.start() == 0 and not match.string[match.end() :].strip()
    operator = _OPERATOR_BEFORE.search(math) or _OPERATOR_BEHIND.match(match.string, match.end())
    if (operator or (alone and len(content.strip()) == 1)) and not re.search(r"\d", content):
        return [Piece("math", match[0])]  # the name of a quantity
    power = re.sub(r"[\s{}]", "", match["power"] or "")
    return list(_words(f"{content}{power}", droppable=True, order=order))


def _words(text: str, *, droppable: bool, order: bool) -> Iterator[Piece]:
    for start, part in enumerate(_CONNECTIVE.split(_LEADING.sub("", text))):
        if start % 2:
            yield Piece("math", r" \lor " if part == "or" else r" \land ") if order else _SEPARATOR
            continue
        position = 0
        for match in _IN_TEXT.finditer(part):
            if part[position : match.start()].strip():
                yield Piece("words", part[position : match.start()], droppable)
            yield _SEPARATOR if match["separator"] else Piece("math", f" {match['number']} ")
            position = match.end()
        if part[position:].strip():
            yield Piece("words", part[position:], droppable)


def _of_plain(match: re.Match[str], math: str, *, order: bool) -> tuple[list[Piece], str]:
    r"""Return the pieces of letters without \text, and the text that they consume."""
    text, latex, end = match[0], match.string, match.end()
    operator = _OPERATOR_BEHIND.match(latex, end)
    if math.rstrip()[-1:].isdigit() or math.rstrip()[-1:] in ("}", ")"):
        ratio, power = _PLAIN_RATIO.match(latex, end), _PLAIN_POWER.match(latex, end)
        more = ratio[0] if ratio and is_unit(ratio[1]) else power[0] if power else ""
        if is_unit(text) and (more or not operator):
            return [Piece("words", text + more)], text + more
    adjacent = math[-1:] and not math[-1:].isspace()
    if adjacent or operator or _OPERATOR_BEFORE.search(math):
        return [Piece("math", text)], text
    words = text.rstrip(".").split()
    between = bool(math.strip()) and _OPERAND.match(latex, end) is not None
    if not any(_is_word(word, between=between) for word in words):
        return [Piece("math", text)], text
    droppable = len(words[-1]) >= _LONG or is_unit(words[-1]) or words[-1] in _CAPITALS or words[-1] in _HALVES
    return list(_words(text, droppable=droppable, order=order)), text


def _is_word(word: str, *, between: bool) -> bool:
    if word.lower() in _SHORT or word in _CAPITALS or "." in word or is_unit(word):
        return True
    short = len(word) == 3 and (word.istitle() or (word.islower() and between))
    return short or (len(word) >= _LONG and not word.isupper())
