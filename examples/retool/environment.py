"""A word problem of the demo, answered with code, as in ReTool (arXiv:2504.11536).

The model writes Python between <code> and </code>; its result is inserted into the same turn.
"""

import re
from typing import Any

_ANSWER = re.compile(r"\banswer is (-?\d+)(?![.,]?\d)")


class CodeArithmetic:
    """One attempt at a row with the fields `question` and `answer`."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.problem = row["question"]
        self._answer = int(row["answer"])

    def reward(self, trajectory: Any) -> float:
        """Return 1.0 if the text after the last result says "The answer is N." with the right N."""
        said = trajectory.final_text.rpartition("</interpreter>")[2]
        stated = _ANSWER.findall(said)
        return float(len(stated) == 1 and int(stated[0]) == self._answer)
