"""Find the number, which another model holds: it plays the user and answers the guesses.

The environment keeps the score. The policy is never trained on the tokens of the user.
"""

from typing import Any

import turnwise
from examples.guess.environment import Guess

STOP = "correct"


class AskedGuess(Guess):
    """One game; the row has the number, and the URL of the user's model."""

    def __init__(self, row: dict[str, Any]) -> None:
        super().__init__(row)
        self.user = turnwise.SimulatedUser(
            row["user_url"],
            "any",  # a server of one model takes any name
            instructions(self.number),
            stop=STOP,
            max_calls=6,
            request={"temperature": 0, "max_tokens": 8},
        )
        self.mistakes = 0

    async def step(self, message: dict[str, Any]) -> str | None:  # type: ignore[override]
        right = super().step(message)  # the score of this turn
        answer = await self.user.answer(message)
        self.mistakes += answer != right
        return answer

    def metrics(self, trajectory: Any) -> dict[str, float]:
        users = {**self.user.metrics(), "user_mistakes": float(self.mistakes)}
        return {**super().metrics(trajectory), **users}


def instructions(number: int) -> str:
    return f"Your number is {number}. Say higher, lower or {STOP}."
