"""A game for two: both compute the same, and whoever is right with fewer turns wins."""

from collections import Counter
from typing import Any

import turnwise
from examples.calculator.tool import calculate


class Race(turnwise.Environment):
    """One round; `ada` plays first, and neither sees what the other does."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.players = {"ada": row["question"], "bob": row["question"]}
        self.tools = [calculate]  # a call is followed by another turn of the same player
        self._answer = f"answer is {row['answer']}."
        self._right = {"ada": False, "bob": False}

    def step(self, message: dict[str, Any]) -> dict[str, str] | None:
        """Note a player's answer, and pass the turn on; the game ends after bob's."""
        self._right[message["name"]] = self._answer in message["content"]
        return {"bob": ""} if message["name"] == "ada" else None

    def reward(self, trajectory: Any) -> turnwise.Rewards:
        """Return 1 for the winner and -1 for the other; 0 for both after a draw."""
        turns = Counter(trajectory.turn_players)
        ada, bob = (right / turns[name] if right else 0.0 for name, right in self._right.items())
        win = float(ada > bob) - float(ada < bob)
        return turnwise.Rewards(players={"ada": win, "bob": -win})
