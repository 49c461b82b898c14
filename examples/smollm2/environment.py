"""Sums of several numbers, of the kind that reasoning-gym calls chain_sum, and a calculator.

The model is as it was published; nobody taught it this tool. The prompt shows one sum that is
solved with it. A problem is solved if the last number of the last message is the sum: the way to it
earns nothing.
"""

import random
import re
from collections.abc import Iterator
from typing import Any

QUESTION = "State the final answer to the following arithmetic problem: {} ="
TERMS, DIGITS = (2, 4), (2, 4)
"""Smallest and largest number of terms of a sum, and of digits of a number."""
_SUM = re.compile(r"\s*-?\d+(\s*[-+]\s*\d+)*\s*")
_TERM = re.compile(r"[-+]?\s*\d+")
_NUMBER = re.compile(r"-?\d+")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


def calculate(expression: str) -> int:
    """Calculate a sum.

    Args:
        expression: The sum, for example 12 + 30 - 4.
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
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": call}],
        },
        {"role": "tool", "content": result},
        {"role": "assistant", "content": f"The answer is {result}."},
    ]


class Sums:
    """One sum; a row has a `question` and its `answer`."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.problem = [*solved("31 + 8 - 12"), {"role": "user", "content": row["question"]}]
        self.tools = [calculate]
        self._answer = int(row["answer"])

    def reward(self, trajectory: Any) -> float:
        """Return 1.0 if the last number of the final message is the answer, else 0.0."""
        numbers = _NUMBER.findall(_THOUSANDS.sub("", trajectory.final_text))
        return float(bool(numbers) and int(numbers[-1]) == self._answer)


def rows(seed: int) -> Iterator[dict[str, str]]:
    """Yield problems without end; no two have the same sum."""
    rng, seen = random.Random(seed), set[str]()
    while True:
        digits = rng.randint(*DIGITS)
        terms = [
            rng.randint(10 ** (digits - 1), 10**digits - 1) for _ in range(rng.randint(*TERMS))
        ]
        expression = str(terms[0]) + "".join(f" {rng.choice('+-')} {term}" for term in terms[1:])
        if expression not in seen:
            seen.add(expression)
            yield {"question": QUESTION.format(expression), "answer": str(calculate(expression))}
