"""The calculator: one operation on two numbers a call, so that longer problems need several calls.

Place: a built-in tool. It evaluates no code: the expression is matched, and the numbers are decimals.
"""

import re
from decimal import Context, Decimal

from asyncrl.tools.base import tool

_NUMBER = r"-?[0-9]{1,30}(?:\.[0-9]{1,30})?"
_EXPRESSION = re.compile(rf"\s*({_NUMBER})\s*([-+*/])\s*({_NUMBER})\s*")
_HELP = "error: one operation on two numbers at a time, such as 12 + 34"
_EXACT = Context(prec=400)
"""Sums, differences and products of two numbers of 60 digits are exact, and so is a quotient of 130 digits times its divisor."""
_LONG = Context(prec=130)
_QUOTIENT = Context(prec=12)
"""Digits of a quotient that has no end."""


@tool
def calculator(expression: str) -> str:
    """Calculate one operation (+, -, * or /) on two numbers.

    Args:
        expression: Two numbers with an operation between them, such as "12 + 34".
    """
    found = _EXPRESSION.fullmatch(expression)
    if found is None:
        return _HELP
    left, operation, right = Decimal(found[1]), found[2], Decimal(found[3])
    if operation == "/" and right == 0:
        return "error: division by zero"
    return _text(_calculate(left, operation, right))


def _calculate(left: Decimal, operation: str, right: Decimal) -> Decimal:
    match operation:
        case "+":
            return _EXACT.add(left, right)
        case "-":
            return _EXACT.subtract(left, right)
        case "*":
            return _EXACT.multiply(left, right)
    quotient = _LONG.divide(left, right)
    # A quotient that ends is given whole: 10**20 / 2 keeps all its digits.
    return quotient if _EXACT.multiply(quotient, right) == left else _QUOTIENT.plus(quotient)


def _text(value: Decimal) -> str:
    """Without exponent or trailing zeros: whole numbers read as whole numbers."""
    text = f"{value:f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text
