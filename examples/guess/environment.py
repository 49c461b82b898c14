"""Find the number: the environment answers each guess with "higher" or "lower".

A turn earns its share of the search: 0.5 * log(before / after) / log(50), where `before` and
`after` count the numbers that the answers allow. In a game that finds the number, these rewards add
up to 0.5, and finding the number earns 1 more.
"""

import math
import re
from typing import Any

import turnwise

SMALLEST, LARGEST = 1, 50
PROBLEM = f"Find my number, from {SMALLEST} to {LARGEST}."
NO_NUMBER = "a number"


class Guess(turnwise.Environment):
    """One game; the row's `number` is to be found. `rollout.max_turns` limits the guesses."""

    def __init__(self, row: dict[str, int]) -> None:
        self.problem = PROBLEM
        self.number = row["number"]
        self.low, self.high = SMALLEST, LARGEST
        self.found = False
        self.turns: list[float] = []

    def step(self, message: dict[str, Any]) -> str | None:
        """Answer a guess; None, which ends the game, if it is right."""
        guess = read_guess(message["content"])
        before = self.high - self.low + 1
        if guess is None:
            answer: str | None = NO_NUMBER
        elif guess == self.number:
            self.found, self.low, self.high, answer = True, guess, guess, None
        elif guess < self.number:
            self.low, answer = max(self.low, guess + 1), "higher"
        else:
            self.high, answer = min(self.high, guess - 1), "lower"
        after = self.high - self.low + 1
        self.turns.append(0.5 * math.log(before / after) / math.log(LARGEST - SMALLEST + 1))
        return answer

    def reward(self, trajectory: Any) -> turnwise.Rewards:
        return turnwise.Rewards(float(self.found), turns=self.turns)

    def metrics(self, trajectory: Any) -> dict[str, float]:
        return {"found": float(self.found), "numbers_left": float(self.high - self.low + 1)}


def read_guess(text: str) -> int | None:
    """Return the number if a message has nothing else; otherwise None."""
    text = text.strip()
    return int(text) if re.fullmatch(r"[0-9]{1,2}", text) else None
