r"""Equality of two answers, with a tolerance set by the digits of the gold answer.

Numbers ("72", "4.5e33", "\sqrt{2}", "x = 5", "50\%") are compared here:
    A gold answer with decimals ("20.39", "4.5e33", "3e8") is taken as rounded. An answer may be off by less than
    half a unit of its last digit, and by less than 0.1 %. The second limit is for short decimals: half a unit of 0.5
    would be 10 %, and most of them are exact. Rounding further (20.4 for 20.39) is rejected. The last digits of a
    double ("0.30000000000000004" in a table of numbers) are noise: an error of 2^-52 of the number is accepted.
    Every other gold answer ("72", "142.0", "\frac{1}{3}", "\pi", "5 \times 10^5") is exact: an answer must be equal.
    For one that is not an integer, a decimal with at least six significant digits is also accepted if it is off by at
    most one unit of its last digit: 0.333333 for \frac{1}{3}, but neither 0.3333 nor 0.333335.
    A percent sign may be left out: "50\%" is 50 and 0.5. "N\%" equals the gold answer N only above 1, as 0.5\% is not
    0.5.

Everything else goes to Math-Verify's `verify`: formulas symbolically; sets, tuples, intervals and matrices by element,
in order where order counts. Decimals are rounded to six places, or to as many more as small numbers of the gold answer
need. An inequality in one unknown is compared as the set of its solutions.
"""

import functools
import logging
import math
from fractions import Fraction
from typing import Any

from exgrpo.train.reward.notation import Decimal, Written, is_inequality
from exgrpo.train.reward.pieces import canonical, measure

_CAP = Fraction(1, 1000)
_FLOAT = Fraction(1, 2**52)
_ENOUGH_DIGITS = 6
_WORD = 3  # letters
_DIGITS_OF_POWER = 2  # digits of "3e8", which is rewritten as 3.0 \times 10^8
_EVALUATED_DIGITS = 50
_LONGEST_MAGNITUDE = 10_000  # bits; larger numbers are not expanded
_NOISE = Fraction(1, 10**40)


def equal(gold: Written, answer: Written) -> bool:
    """Return True if `answer` equals `gold`."""
    if gold.terms or answer.terms:
        return _terms_equal(gold, answer)
    if gold.modulus != answer.modulus or (answer.base and answer.base != (gold.base or "10")):
        return False
    if not gold.latex or not answer.latex:
        return _text(gold) == _text(answer) != ""
    scale = _scale(gold, answer)
    return scale is not None and _quantity_equal(gold, answer, scale)


def readable(written: Written) -> bool:
    """Return True if an answer and all its terms are words, a number, or a formula that the parser reads."""
    if written.terms:
        return all(map(readable, written.terms))
    return (not written.latex and bool(written.words)) or written.decimal is not None or written.expression is not None


def _terms_equal(gold: Written, answer: Written) -> bool:
    """Compare several quantities one by one, in any order if each has its own words."""
    if len(gold.terms) != len(answer.terms):
        return False

    def same(g: Written, a: Written) -> bool:
        return (bool(g.words) == bool(a.words) or not g.latex or not a.latex) and equal(g, a)

    if gold.ordered or answer.ordered:
        return all(map(same, gold.terms, answer.terms))
    left = list(answer.terms)
    for term in gold.terms:
        found = next((place for place, other in enumerate(left) if same(term, other)), None)
        if found is None:
            return False
        del left[found]
    return True


def _text(written: Written) -> str:
    return written.words or canonical(written.latex)


def _scale(gold: Written, answer: Written) -> Fraction | None:
    """Return the answer's unit in units of the gold answer, None if their words differ in meaning."""
    if not gold.words or not answer.words:
        dropped = gold if gold.words else answer
        return None if dropped.binding else Fraction(1)
    if gold.words == answer.words:
        return Fraction(1)
    if gold.binding or answer.binding:
        return None
    g, a = measure(gold.words), measure(answer.words)
    return a.factor / g.factor if g.quantity == a.quantity else None


def _quantity_equal(gold: Written, answer: Written, scale: Fraction) -> bool:
    if gold.key == answer.key and gold.percent == answer.percent:
        return scale == 1
    if gold.latex.isalpha() and answer.latex.isalpha() and len(gold.latex) >= _WORD:
        return False  # "saw" is not "was", though as products of letters they are equal
    if gold.decimal and answer.decimal and not gold.relation:
        return _numbers_equal(gold, answer, gold.decimal.value, answer.decimal.value, scale)
    try:
        return _expressions_equal(gold, answer, scale)
    except Exception:  # sympy cannot compare everything it can represent
        return False


def _expressions_equal(gold: Written, answer: Written, scale: Fraction) -> bool:
    g, a = gold.expression, answer.expression
    if g is None or a is None:
        return False
    g, a = _without_names(g, a)
    g_value, a_value = _value(g), _value(a)
    if g_value is not None and a_value is not None:
        return _numbers_equal(gold, answer, g_value, a_value, scale)
    if scale != 1:
        return False
    g, a = _with_repetitions(*_as_sets(g, a))
    places = _extra_places(g)

    def verified(g: Any, a: Any) -> bool:
        library = math_verify()
        return library.verify(g, a, float_rounding=6 + places, numeric_precision=15 + places, timeout_seconds=None)

    if verified(g, a):
        return True
    split = _roots_of_fractions(g), _roots_of_fractions(a)
    return split != (g, a) and verified(*split)


def _numbers_equal(gold: Written, answer: Written, g: Fraction, a: Fraction, unit: Fraction) -> bool:
    """Compare two values, allowing for percent signs; `unit` is the answer's unit in units of the gold answer."""

    def close(scale: Fraction) -> bool:
        return _close(gold.decimal, answer.decimal, g, a, scale * unit)

    same, hundredfold, hundredth = Fraction(1), Fraction(100), Fraction(1, 100)
    if gold.percent == answer.percent:
        return close(same)
    if gold.percent:
        return close(same) or close(hundredfold)
    return close(hundredth) or (abs(g) > 1 and close(same))


def _close(gold: Decimal | None, answer: Decimal | None, g: Fraction, a: Fraction, scale: Fraction) -> bool:
    """Return True if `a` times `scale` is within the tolerance of `g`; the decimals are these numbers as written."""
    off = abs(g - a * scale)
    if off == 0:
        return True
    if gold is not None and gold.rounded:
        if gold.scientific and gold.digits <= _DIGITS_OF_POWER and answer is not None and not answer.scientific:
            return False  # an integer written out is not a rounding of "1e16"
        return off < min(max(gold.unit / 2, _FLOAT * abs(g)), _CAP * abs(g))
    if gold is not None and answer is not None:
        return False
    size = abs(g)
    if off <= _NOISE * (size if 0 < size < 1 else 1):
        return True
    if answer is None or answer.digits < _ENOUGH_DIGITS or abs(g - round(g)) <= _NOISE:
        return False
    return off <= answer.unit * scale


def _without_names(g: Any, a: Any) -> tuple[Any, Any]:
    """Replace "x = 5" by 5 if the other side is just "5", as verify does."""
    from math_verify.grader import is_assignment_relation, is_equation, take_last_relation

    if is_equation(a) and not is_equation(g):
        a = take_last_relation(a).rhs
    elif is_assignment_relation(g) and not is_equation(a):
        g = take_last_relation(g).rhs
    return g, a


def _value(expression: Any) -> Fraction | None:
    """Return the value of a real number: decimals exactly as written, everything else evaluated."""
    import sympy

    if isinstance(expression, sympy.FiniteSet) and len(expression) == 1:
        expression = expression.args[0]
    if not isinstance(expression, sympy.Expr) or expression.free_symbols:
        return None
    decimals = {number: sympy.Rational(str(number)) for number in expression.atoms(sympy.Float)}
    expression = expression.xreplace(decimals) if decimals else expression
    number = sympy.N(expression, _EVALUATED_DIGITS)
    if not (number.is_Rational or number.is_Float) or not number.is_finite:
        return None
    if number.is_Float:
        magnitude = number._mpf_[2] + number._mpf_[3]  # exponent and width of the mantissa, in bits
        if abs(magnitude) > _LONGEST_MAGNITUDE:
            return None
        if magnitude > 0:  # so that 2^{1000} and 2^{1000} + 1 differ
            number = sympy.N(expression, _EVALUATED_DIGITS + math.ceil(magnitude * math.log10(2)))
    exact = sympy.Rational(number)
    return Fraction(int(exact.p), int(exact.q))


def _as_sets(g: Any, a: Any) -> tuple[Any, Any]:
    """Replace inequalities by their solution sets if both sides are inequalities or sets."""
    import sympy

    both = is_inequality(g) and is_inequality(a)
    if (both and g.free_symbols == a.free_symbols) or isinstance(g, sympy.Set) or isinstance(a, sympy.Set):
        g, a = (_solutions(side) if is_inequality(side) else side for side in (g, a))
    return g, a


def _with_repetitions(g: Any, a: Any) -> tuple[Any, Any]:
    """Compare sets as multisets if the gold answer repeats an element ("3, 1, 1")."""
    import sympy
    from latex2sympy2_extended.sets import FiniteSet

    both = isinstance(g, FiniteSet) and isinstance(a, FiniteSet)
    if both and len(g._unsorted_args) > len(g.args):
        g, a = (sympy.Tuple(*sympy.ordered(side._unsorted_args)) for side in (g, a))
    return g, a


def _roots_of_fractions(expression: Any) -> Any:
    """Split roots of products and quotients as if all factors were positive: sympy keeps the root of 1/n."""
    import sympy

    def apart(base: Any, exponent: Any) -> Any:
        return sympy.Mul(
            *(
                factor.base ** (-exponent) if factor.is_Pow and factor.exp == -1 else factor**exponent
                for factor in sympy.Mul.make_args(base)
            )
        )

    def is_root(power: Any) -> bool:
        return power.is_Pow and power.exp.is_Rational and not power.exp.is_Integer and bool(power.base.free_symbols)

    if not isinstance(expression, sympy.Basic) or not expression.free_symbols:
        return expression
    return expression.replace(is_root, lambda power: apart(power.base.doit(), power.exp))


def _solutions(inequality: Any) -> Any:
    try:
        return inequality.as_set()
    except Exception:  # several unknowns, or too hard for sympy
        return inequality


def _extra_places(gold: Any) -> int:
    """Return the number of zeros after the point in the smallest number of the gold answer."""
    import sympy

    values = [_value(number) for number in gold.atoms(sympy.Number, sympy.Pow)]
    smallest = min((abs(value) for value in values if value), default=Fraction(1))
    return max(0, math.ceil((smallest.denominator.bit_length() - smallest.numerator.bit_length()) * math.log10(2)))


@functools.cache
def math_verify() -> Any:
    """Return Math-Verify, imported on first use (it imports sympy), without its warning about a missing time limit."""
    import math_verify

    for module in ("parser", "grader"):
        logging.getLogger(f"math_verify.{module}").setLevel(logging.ERROR)
    return math_verify
