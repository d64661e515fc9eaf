"""Arithmetic expressions with + - * / and brackets: parse safely, evaluate exactly, print, normalise."""

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction

LONGEST = 200
"""Characters. Longer texts are rejected, so that every function here is fast for any text."""

_SIGNS = {"\\times": "*", "\\cdot": "*", "\\div": "/", "\u00d7": "*", "\u00b7": "*", "\u00f7": "/", "\u2212": "-"}
_SIGN = re.compile("|".join(map(re.escape, _SIGNS)))
_NUMBERS_AND_SIGNS = re.compile(r"[-+*/()\s]*(?:[0-9]{1,6}(?![0-9])[-+*/()\s]*)*")
_LEADING_ZEROS = re.compile(r"(?<![0-9])0+(?=[0-9])")
_OPERATORS: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}
_OPERATIONS: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
}


@dataclass(frozen=True)
class Node:
    """A number, or an operation on two expressions, with its value."""

    value: Fraction
    operator: str = ""
    """One of + - * /; empty for a number."""
    left: "Node | None" = None
    right: "Node | None" = None

    def numbers(self) -> Iterator[int]:
        """Yield the numbers of the expression from left to right."""
        if self.left and self.right:
            yield from self.left.numbers()
            yield from self.right.numbers()
        else:
            yield int(self.value)


def combine(operator: str, left: Node, right: Node) -> Node | None:
    """Return the operation on two expressions, None for a division by zero."""
    if operator == "/" and right.value == 0:
        return None
    return Node(_OPERATIONS[operator](left.value, right.value), operator, left, right)


def parse(text: str) -> Node | None:
    r"""Return the expression of a whole text, None if it is not one or divides by zero.

    Numbers have 1 to 6 digits 0 to 9 without a sign. \times, \cdot, \div, ×, ·, ÷ and − are read as operations too.
    """
    if len(text) > LONGEST:
        return None
    text = _SIGN.sub(lambda match: _SIGNS[match[0]], text)
    if not _NUMBERS_AND_SIGNS.fullmatch(text):
        return None
    try:
        tree = ast.parse(" ".join(_LEADING_ZEROS.sub("", text).split()), mode="eval")
    except SyntaxError:
        return None
    return _node(tree.body)


def _node(tree: ast.expr) -> Node | None:
    """Convert a Python syntax tree; None if it has more than numbers and operations on two of them."""
    if isinstance(tree, ast.Constant) and isinstance(tree.value, int):
        return Node(Fraction(tree.value))
    if not isinstance(tree, ast.BinOp) or type(tree.op) not in _OPERATORS:
        return None
    left, right = _node(tree.left), _node(tree.right)
    return combine(_OPERATORS[type(tree.op)], left, right) if left and right else None


def write(node: Node) -> str:
    """Return the expression as text with only the necessary brackets, and spaces around operators."""
    if not (node.left and node.right):
        return str(node.value)
    rank = _PRECEDENCE[node.operator]
    left, right = write(node.left), write(node.right)
    if _PRECEDENCE.get(node.left.operator, 3) < rank:
        left = f"({left})"
    if _PRECEDENCE.get(node.right.operator, 3) < rank + (node.operator in "-/"):
        right = f"({right})"
    return f"{left} {node.operator} {right}"


def key_of(node: Node) -> str:
    """Return the canonical form of an expression, up to order, grouping and brackets of sums and of products.

    It is an expression of the same numbers with the same value: added terms come first, then subtracted ones, each in
    the order of their text; factors come before divisors.
    """
    terms = list(_parts(node, "+", "-"))
    if len(terms) == 1:
        return _product_key(node)
    return _joined([(inverse, _product_key(term)) for inverse, term in terms], "+", "-")


def _product_key(node: Node) -> str:
    factors = list(_parts(node, "*", "/"))
    texts = [(inverse, f"({key_of(part)})" if part.operator else str(part.value)) for inverse, part in factors]
    return _joined(texts, "*", "/")


def _parts(node: Node, direct: str, inverse: str) -> Iterator[tuple[bool, Node]]:
    """Yield the terms of a sum (factors of a product), with True for those subtracted (divided by)."""
    if node.left and node.right and node.operator in (direct, inverse):
        yield from _parts(node.left, direct, inverse)
        for turned, part in _parts(node.right, direct, inverse):
            yield turned != (node.operator == inverse), part
    else:
        yield False, node


def _joined(texts: list[tuple[bool, str]], direct: str, inverse: str) -> str:
    ordered = sorted(texts)
    return "".join(f"{inverse if turned else direct}{text}" for turned, text in ordered).removeprefix(direct)
