"""An environment: a row of data goes in; a problem, tools and a reward come out."""

from typing import Any

from examples.calculator.tool import calculate


class Chain:
    """Two operations, one call of the tool for each."""

    def __init__(self, row: dict[str, int]) -> None:
        self.problem = f"Compute (({row['a']} - {row['b']}) + {row['c']})."
        self.tools = [calculate]  # any typed and documented function, or a method of this class
        self.answer = row["a"] - row["b"] + row["c"]

    def reward(self, trajectory: Any) -> float:
        return float(f"answer is {self.answer}." in trajectory.final_text)
