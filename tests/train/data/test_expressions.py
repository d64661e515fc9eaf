"""Expressions against Python's own parser and arithmetic, and their one form against equality as functions."""

import ast
import re
from fractions import Fraction
from itertools import permutations, product

from hypothesis import assume, given
from hypothesis import strategies as st

from exgrpo.train.data.expressions import Node, combine, key_of, parse, write

OPERATORS = "+-*/"
PRIMES = [number for number in range(2, 200) if all(number % divisor for divisor in range(2, number))]


def value_of(text):
    """By Python; None for a division by zero."""
    try:
        return eval(re.sub(r"\d+", r"Fraction('\g<0>')", text), {"Fraction": Fraction})
    except ZeroDivisionError:
        return None


def all_expressions(numbers):
    """Each order, grouping and choice of operators, with all brackets."""
    if len(numbers) == 1:
        yield str(numbers[0])
    for cut in range(1, len(numbers)):
        for left, right in product(all_expressions(numbers[:cut]), all_expressions(numbers[cut:])):
            for operator in OPERATORS:
                yield f"({left} {operator} {right})"


def plain(tree):
    """Whether Python reads the text as numbers joined by our operators alone."""
    match tree:
        case ast.BinOp(left, ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), right):
            return plain(left) and plain(right)
        case ast.Constant(int()):
            return True
    return False


def python_reads(text):
    try:
        return plain(ast.parse(text.strip(), mode="eval").body)
    except SyntaxError:
        return False


@st.composite
def trees(draw, most=6):
    """A number, or a tuple of an operator and two trees."""
    size = draw(st.integers(1, most))
    if size == 1:
        return draw(st.integers(1, 30))
    return draw(st.sampled_from(OPERATORS)), draw(trees(size - 1)), draw(trees(size - 1))


def bracketed(tree):
    return str(tree) if isinstance(tree, int) else f"({bracketed(tree[1])} {tree[0]} {bracketed(tree[2])})"


def with_primes(tree, primes):
    """The same with numbers of which no two are equal."""
    return next(primes) if isinstance(tree, int) else (tree[0], *(with_primes(part, primes) for part in tree[1:]))


def rearranged(tree, draw):
    """The same sums and products in another order or grouping."""
    if isinstance(tree, int):
        return tree
    operator, left, right = tree[0], rearranged(tree[1], draw), rearranged(tree[2], draw)
    if operator in "+*" and draw(st.booleans()):
        left, right = right, left
    family = "+-" if operator in "+-" else "*/"
    if not isinstance(right, int) and right[0] in family and draw(st.booleans()):
        # a - (b - c) is (a - b) + c
        flipped = right[0] if operator == family[0] else family[1 - family.index(right[0])]
        return flipped, (operator, left, right[1]), right[2]
    return operator, left, right


@given(st.text("0123456789+-*/() ", max_size=12))
def test_a_text_is_read_as_python_reads_it(text):
    found = parse(text)
    if found is not None:
        assert found.value == value_of(re.sub(r"\b0+(?=\d)", "", text))
    if python_reads(text) and value_of(text) is not None:
        assert found is not None or re.search(r"\d{7}", text)


@given(trees())
def test_what_is_written_is_read_again(tree):
    node = parse(bracketed(tree))
    assume(node is not None)
    text = write(node)
    assert value_of(text) == node.value
    assert list(parse(text).numbers()) == list(node.numbers()) == [int(number) for number in re.findall(r"\d+", text)]


@given(trees())
def test_it_has_the_brackets_that_it_needs(tree):
    """Of equal numbers some pairs of brackets change nothing, as in 1 - (1 + 1 - 1)."""
    node = parse(bracketed(with_primes(tree, iter(PRIMES))))
    assume(node is not None)
    text = write(node)
    for opening in (match.start() for match in re.finditer(r"\(", text)):
        depth, closing = 0, opening
        for closing in range(opening, len(text)):
            depth += {"(": 1, ")": -1}.get(text[closing], 0)
            if depth == 0:
                break
        without = text[:opening] + text[opening + 1 : closing] + text[closing + 1 :]
        assert key_of(parse(without) or Node(Fraction(0))) != key_of(node)


@given(trees(), st.data())
def test_rearrangements_have_one_form(tree, data):
    node = parse(bracketed(tree))
    assume(node is not None)
    other = parse(f"(({bracketed(rearranged(tree, data.draw))}))")
    assert key_of(other) == key_of(node)


@given(trees(), trees())
def test_expressions_of_other_values_or_numbers_have_other_forms(one, other):
    first, second = parse(bracketed(one)), parse(bracketed(other))
    assume(first is not None and second is not None)
    if key_of(first) == key_of(second):
        assert first.value == second.value
        assert sorted(first.numbers()) == sorted(second.numbers())
    again = parse(key_of(first))
    assert (again.value, key_of(again)) == (first.value, key_of(first))


def test_expressions_of_three_numbers_have_one_form_if_they_are_the_same_function():
    """At numbers this far apart different functions have different values. There are 68 (OEIS A140606)."""
    form_of = {}
    for order in permutations((7, 101, 1009)):
        for text in all_expressions(order):
            form_of.setdefault(value_of(text), set()).add(key_of(parse(text)))
    assert len(form_of) == 68
    assert all(len(forms) == 1 for forms in form_of.values())


def test_latex_and_typographic_signs_are_read():
    for text in (r"3 \times 4 \div 2", r"3\cdot4/2", "3 \u00d7 4 \u00f7 2", "3\u00b74/2"):
        assert parse(text).value == 6
    assert parse("3 \u2212 4").value == -1


def test_a_division_by_zero_is_no_expression():
    assert parse("1 / (2 - 2)") is None
    assert combine("/", Node(Fraction(1)), Node(Fraction(0))) is None
