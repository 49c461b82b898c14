"""A word problem that is answered with code inside the answer, as in ReTool (arXiv:2504.11536).

The model writes code between <code> and </code>, the code's result is inserted into the same turn
between <interpreter> and </interpreter>, and the model continues from there. The code runs in
`evaluator`, a small subset of Python; a sandbox for all of Python is not part of this example.
"""

import re
from typing import Any

from turnwise.errors import InputError

from .evaluator import evaluate

INSTRUCTION = (
    "Solve the problem. You may write Python between <code> and </code>; what it prints follows "
    "between <interpreter> and </interpreter>. End with: The answer is N."
)
_ANSWER = re.compile(r"\banswer is (-?\d+)(?![.,]?\d)")
_FENCE = re.compile(r"\s*```(?:python|py)?\n(.*?)```\s*", re.DOTALL)


class CodeProblem:
    """One attempt at a row with the fields `question` and `answer`, an integer."""

    def __init__(self, row: dict[str, Any]) -> None:
        for name in ("question", "answer"):
            if name not in row:
                raise InputError(f"A problem for code needs the field '{name}'.")
        self.problem = [{"role": "user", "content": f"{row['question']}\n\n{INSTRUCTION}"}]
        self.tools = [self.run]
        self._answer = int(row["answer"])

    def run(self, code: str) -> str:
        """Run Python code.

        Args:
            code: The code; a Markdown fence around it is ignored.
        """
        fenced = _FENCE.fullmatch(code)
        return evaluate((fenced[1] if fenced else code).strip("\n"))

    def reward(self, trajectory: Any) -> float:
        """Return 1.0 if the text after the last result says "The answer is N." with the right N."""
        said = trajectory.final_text.rpartition("</interpreter>")[2]
        stated = _ANSWER.findall(said)
        return float(len(stated) == 1 and int(stated[0]) == self._answer)
