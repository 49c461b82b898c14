"""A well-known model learns to use a tool, and to answer in a sentence. README.md shows this class.

turnwise train examples/weather/config.yaml
"""

from typing import Any


class Weather:
    """A question about a city; the tool knows the temperature."""

    def __init__(self, row: dict[str, Any]) -> None:
        shown = [*solved("Suva", 26), *solved("Nuuk", -8)]
        self.problem = [*shown, {"role": "user", "content": row["question"]}]
        self.tools = [self.temperature]
        self.celsius, self.answer = row["celsius"], row["answer"]

    def temperature(self, city: str) -> str:
        """Measure the temperature of a city.

        Args:
            city: Name of the city.
        """
        return f"{self.celsius} degrees"

    def reward(self, trajectory: Any) -> float:
        return float(trajectory.final_text == self.answer)


def solved(city: str, celsius: int) -> list[dict[str, Any]]:
    """Return the conversation of a solved question."""
    call = {"name": "temperature", "arguments": {"city": city}}
    return [
        {"role": "user", "content": f"How warm is it in {city}?"},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": f"{celsius} degrees"},
        {"role": "assistant", "content": f"It is {celsius} degrees in {city}."},
    ]
