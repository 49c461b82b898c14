"""The calculator environment: one problem, one tool, and a reward for the right number.

The reward looks only at the final answer, not at the way to it.
"""

import re
from typing import Any

from turnwise.errors import InputError

from .tool import calculate

_ANSWER = re.compile(r"\banswer is (-?\d+)(?![.,]?\d)")


class Calculator:
    """One attempt at a problem's row."""

    def __init__(self, row: dict[str, Any]) -> None:
        for name in ("question", "answer"):
            if name not in row:
                raise InputError(f"A calculator problem needs the field '{name}'.")
        self.problem = [{"role": "user", "content": row["question"]}]
        self.tools = [calculate]
        self._answer = int(row["answer"])

    def reward(self, trajectory: Any) -> float:
        """Return 1.0 if the final message says "The answer is N." with the right N, else 0.0."""
        stated = _ANSWER.findall(trajectory.final_text)
        return float(len(stated) == 1 and int(stated[0]) == self._answer)
