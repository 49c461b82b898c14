"""The one tool of the example: a calculator that does one operation at a time."""

import operator
from typing import Literal

_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def calculate(a: int, operation: Literal["+", "-", "*"], b: int) -> int:
    """Calculates a + b, a - b or a * b.

    Args:
        a: The first number.
        operation: The operation.
        b: The second number.
    """
    if operation not in _OPERATIONS:
        raise ValueError(f"operation must be one of + - *, not {operation!r}")
    return _OPERATIONS[operation](int(a), int(b))
