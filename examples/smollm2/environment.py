"""Sums of reasoning-gym, with a calculator that the model has never seen.

The problems and their scorer are reasoning-gym's `chain_sum` as it is: two to six numbers of one to
four digits. The prompt begins with problems that are solved with the tool.
"""

import re
from typing import Any

from turnwise.compat.reasoning_gym import ReasoningGym

QUESTION = "State the final answer to the following arithmetic problem: {} ="
"""The question of `chain_sum`."""
SHOWN = ("31 + 8 - 12", "704 - 25", "6 + 9 - 3 + 5")
"""Sums of the prompt. With only one, the model answers at once and never calls the tool."""
_SUM = re.compile(r"\s*-?\d+(\s*[-+]\s*\d+)*\s*")
_TERM = re.compile(r"[-+]?\s*\d+")


class Sums(ReasoningGym):
    """A sum to be calculated with the tool; the last message must be the number alone."""

    dataset = "chain_sum"

    def __init__(self, row: dict[str, Any], **config: Any) -> None:
        super().__init__(row, **{"system_prompt": None, **config})
        shown = [message for expression in SHOWN for message in solved(expression)]
        self.problem = [*shown, *self.problem]
        self.tools = [calculate]


def calculate(expression: str) -> int:
    """Calculate a sum.

    Args:
        expression: Whole numbers with + and - between them, such as 12 + 30 - 4.
    """
    if not _SUM.fullmatch(expression):
        raise ValueError("expression must be whole numbers with + and - between them")
    return sum(int("".join(term.split())) for term in _TERM.findall(expression))


def solved(expression: str) -> list[dict[str, Any]]:
    """Return the conversation in which a sum is solved with the tool."""
    function = {"name": "calculate", "arguments": {"expression": expression}}
    call = {"type": "function", "function": function}
    result = str(calculate(expression))
    return [
        {"role": "user", "content": QUESTION.format(expression)},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": result},
    ]
