"""The calculator against Python's own arithmetic."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exgrpo.train.config.rollout import EnvironmentConfig
from exgrpo.train.rollout.turns.environments import find_environment


def reply(turn):
    environment = find_environment(EnvironmentConfig(function="calculator"))
    assert environment.stop == ("=",)
    return environment.function("question", "gold")(turn)


OPERATIONS = st.tuples(st.sampled_from("+-*/"), st.integers(0, 999))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 999), st.lists(OPERATIONS, max_size=4), st.sampled_from(["", "first 7 and ", "12 + 3: ", "<b>"]))
def test_it_writes_the_value_of_the_expression_before_the_sign(first, operations, before):
    text = str(first) + "".join(f" {operator} {number}" for operator, number in operations)
    exact = "".join(f" {operator} Fraction({number})" for operator, number in operations)
    try:
        value = eval(f"Fraction({first}){exact}", {"Fraction": Fraction})
    except ZeroDivisionError:
        value = None
    expected = None if value is None or value.denominator != 1 else str(value)
    assert reply(f"{before}{text} =") == (None if expected is None else f" {expected}")
    assert reply(f"{before}{text} = ") == expected
    assert reply(f"{before}{text}=") == expected


@pytest.mark.parametrize("turn", ["", "=", "x =", "2 + =", "(1 + 2 =", "so it is 4", "9 ** 9 =", "1 2 =", "9 " * 300])
def test_there_is_no_reply_to_what_is_no_expression(turn):
    assert reply(turn) is None


def test_a_product_of_many_large_numbers_is_quick():
    assert reply(" * ".join(["999999"] * 20) + " =") == f" {999999**20}"
