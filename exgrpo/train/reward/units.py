"""Normalise the words of a quantity: "cm", "apples", "square inches", "km per hour".

Two numbers with words are compared only if the words are the same, or units of one quantity, which are converted ("3
hours" and "180 minutes"). A word that is no known unit is a quantity of its own.
"""

import functools
import re
from fractions import Fraction
from typing import NamedTuple

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
