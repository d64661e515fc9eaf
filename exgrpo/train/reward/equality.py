r"""Whether two answers are equal, with a tolerance that the digits of the gold answer set.

Numbers ("72", "4.5e33", "\sqrt{2}", "x = 5", "50\%") are compared here:
    A gold answer with decimals ("20.39", "4.5e33", "3e8") is taken as rounded. An answer may be off by less than
    half a unit of its last digit, and by less than 0.1 %. The limit is for short decimals: half a unit of 0.5 would
    be 10 %, and most of them are exact. Rounding further (20.4 for 20.39) is refused. The last digits of a double
    ("0.30000000000000004" in a table of numbers) are noise: 2^-52 of the number is no mistake.
    Every other gold answer ("72", "142.0", "\frac{1}{3}", "\pi", "5 \times 10^5") is exact. An answer must be equal
    to it; only where it is no integer a decimal with at least six significant digits will do, if it is off by at most
    one unit of its last digit: 0.333333 for \frac{1}{3}, but neither 0.3333 nor 0.333335.
    A percent sign may be left out: "50\%" is 50 and 0.5. "N\%" is the gold answer N only above 1, as 0.5\% is not 0.5.

All else is left to Math-Verify's verify: formulas symbolically, sets, tuples, intervals and matrices by element, in
order where order counts. It rounds decimals, to six places or as many more as the small numbers of the gold answer
ask for. An inequality in one unknown is the set of its solutions.
"""

import functools
import logging
import math
from fractions import Fraction
from typing import Any

from exgrpo.train.reward.notation import Decimal, Written, is_inequality

_CAP = Fraction(1, 1000)
_FLOAT = Fraction(1, 2**52)
_ENOUGH_DIGITS = 6
_EVALUATED_DIGITS = 50
_LONGEST_MAGNITUDE = 10_000  # in bits; what is larger is not written out
_NOISE = Fraction(1, 10**40)


def equal(gold: Written, answer: Written) -> bool:
    """Whether `answer` is `gold`."""
    if not gold.latex or not answer.latex or (answer.base and answer.base != (gold.base or "10")):
        return False
    if gold.key == answer.key and gold.percent == answer.percent:
        return True
    if gold.decimal and answer.decimal and not gold.relation:
        return _numbers_equal(gold, answer, gold.decimal.value, answer.decimal.value)
    try:
        return _expressions_equal(gold, answer)
    except Exception:  # sympy cannot compare everything that it can hold
        return False


def _expressions_equal(gold: Written, answer: Written) -> bool:
    g, a = gold.expression, answer.expression
    if g is None or a is None:
        return False
    g, a = _without_names(g, a)
    g_value, a_value = _value(g), _value(a)
    if g_value is not None and a_value is not None:
        return _numbers_equal(gold, answer, g_value, a_value)
    g, a = _with_repetitions(*_as_sets(g, a))
    places = _extra_places(g)
    return math_verify().verify(g, a, float_rounding=6 + places, numeric_precision=15 + places, timeout_seconds=None)


def _numbers_equal(gold: Written, answer: Written, g: Fraction, a: Fraction) -> bool:
    """Compares the values with regard to percent signs."""

    def close(scale: Fraction) -> bool:
        return _close(gold.decimal, answer.decimal, g, a, scale)

    same, hundredfold, hundredth = Fraction(1), Fraction(100), Fraction(1, 100)
    if gold.percent == answer.percent:
        return close(same)
    if gold.percent:
        return close(same) or close(hundredfold)
    return close(hundredth) or (abs(g) > 1 and close(same))


def _close(gold: Decimal | None, answer: Decimal | None, g: Fraction, a: Fraction, scale: Fraction) -> bool:
    """Whether `a` times `scale` is within the tolerance of `g`; `gold` and `answer` tell how these are written."""
    off = abs(g - a * scale)
    if off == 0:
        return True
    if gold is not None and gold.rounded:
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
    """Takes "x = 5" beside "5" for 5, as verify does."""
    from math_verify.grader import is_assignment_relation, is_equation, take_last_relation

    if is_equation(a) and not is_equation(g):
        a = take_last_relation(a).rhs
    elif is_assignment_relation(g) and not is_equation(a):
        g = take_last_relation(g).rhs
    return g, a


def _value(expression: Any) -> Fraction | None:
    """What a real number is worth; decimals count as they are written, all else is evaluated."""
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
    """Inequalities as sets of solutions, where both are one or the other."""
    import sympy

    both = is_inequality(g) and is_inequality(a)
    if (both and g.free_symbols == a.free_symbols) or isinstance(g, sympy.Set) or isinstance(a, sympy.Set):
        g, a = (_solutions(side) if is_inequality(side) else side for side in (g, a))
    return g, a


def _with_repetitions(g: Any, a: Any) -> tuple[Any, Any]:
    """Where the gold answer repeats an element ("3, 1, 1"), so must the other."""
    import sympy
    from latex2sympy2_extended.sets import FiniteSet

    both = isinstance(g, FiniteSet) and isinstance(a, FiniteSet)
    if both and len(g._unsorted_args) > len(g.args):
        g, a = (sympy.Tuple(*sympy.ordered(side._unsorted_args)) for side in (g, a))
    return g, a


def _solutions(inequality: Any) -> Any:
    try:
        return inequality.as_set()
    except Exception:  # of several unknowns, or too hard for sympy
        return inequality


def _extra_places(gold: Any) -> int:
    """How many decimals the smallest number of the gold answer begins after the point."""
    import sympy

    values = [_value(number) for number in gold.atoms(sympy.Number, sympy.Pow)]
    smallest = min((abs(value) for value in values if value), default=Fraction(1))
    return max(0, math.ceil((smallest.denominator.bit_length() - smallest.numerator.bit_length()) * math.log10(2)))


@functools.cache
def math_verify() -> Any:
    """Math-Verify, imported on first use (it brings sympy); its warning that no time limit is set is silenced."""
    import math_verify

    for module in ("parser", "grader"):
        logging.getLogger(f"math_verify.{module}").setLevel(logging.ERROR)
    return math_verify
