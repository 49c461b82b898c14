"""The one tool of the example: a calculator that does one operation at a time."""

import operator
from typing import Any, Literal

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


TOOL_SCHEMA: Any = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Calculates a + b, a - b or a * b.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "The first number."},
                "operation": {
                    "type": "string",
                    "enum": ["+", "-", "*"],
                    "description": "The operation.",
                },
                "b": {"type": "integer", "description": "The second number."},
            },
            "required": ["a", "operation", "b"],
        },
        "return": {"type": "integer"},
    },
}
"""The tool as chat templates and OpenAI's client take it. Written out, so that an agent does not
import Transformers for it."""
