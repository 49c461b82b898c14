"""Short stories in which things come and go, with the tool that counts them.

A row is a story and its answer. In the conversations for training one or two things happen, in the
words of `TAUGHT`; in the rows for evaluation two or three, in all words.
"""

import random
import re
from typing import Any

TAUGHT = (("buys {n} more", 1), ("gives {n} away", -1), ("finds {n}", 1), ("loses {n}", -1))
NEW = (
    ("picks up another {n}", 1),
    ("hands {n} to a friend", -1),
    ("gets {n} for a birthday", 1),
    ("throws {n} into the sea", -1),
    ("wins {n} in a game", 1),
    ("sells {n} at the market", -1),
)
_PEOPLE = ("Mia", "Omar", "Lena", "Ravi", "Ana", "Tom", "Zoe", "Ken")
_THINGS = ("coins", "stamps", "shells", "books", "beads", "cards")
_SUM = re.compile(r"\s*\d+(\s*[-+]\s*\d+)*\s*")
_TERM = re.compile(r"[-+]?\s*\d+")


def calculate(expression: str) -> int:
    """Calculate a sum such as 12 + 30 - 4.

    Args:
        expression: Whole numbers with + and - between them.
    """
    if not _SUM.fullmatch(expression):
        raise ValueError("expression must be whole numbers with + and - between them")
    return sum(int("".join(term.split())) for term in _TERM.findall(expression))


def make_row(rng: random.Random, words: tuple[tuple[str, int], ...], events: int) -> dict[str, Any]:
    """Return a story of `events` events as a row with the fields question, sum and answer."""
    count = rng.randint(100, 900)
    person, thing, total = rng.choice(_PEOPLE), rng.choice(_THINGS), str(count)
    parts = []
    for text, sign in rng.sample(words, events):
        number = rng.randint(2, 99) if sign > 0 else rng.randint(2, min(99, count))
        count += sign * number
        total += f" {'+' if sign > 0 else '-'} {number}"
        parts.append(text.format(n=number))
    happened = ", then ".join(parts)
    first = total.split()[0]
    question = f"{person} has {first} {thing}, {happened}. How many {thing} are left?"
    return {"question": question, "sum": total, "answer": str(count)}


def solved(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the conversation in which a row is solved with the tool."""
    function = {"name": "calculate", "arguments": {"expression": row["sum"]}}
    return [
        {"role": "user", "content": row["question"]},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": row["answer"]},
        {"role": "assistant", "content": row["answer"]},
    ]


class Stories:
    """A story to be counted with the tool; the last message must be the number alone."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.problem = [{"role": "user", "content": row["question"]}]
        self.tools = [calculate]
        self.answer = row["answer"]

    def reward(self, trajectory: Any) -> float:
        """Return 1 for the right number."""
        return float(trajectory.final_text.strip() == self.answer)
