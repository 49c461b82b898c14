"""The race of step07, whose players are two policies: each is an adapter of one model."""

from typing import Any

import turnwise
from examples.step07_self_play.game import Race


class Match(Race):
    """A player is the policy of the same name. In held-out rows, the player that is not measured is
    the model before training."""

    def __init__(self, row: dict[str, Any]) -> None:
        super().__init__(row)
        self._measured = row.get("measured")
        if self._measured:
            self.policies = {who: who if who == self._measured else "base" for who in self.players}

    def reward(self, trajectory: Any) -> turnwise.Rewards:
        """Return each player's reward; in held-out rows 1 for a win of the measured player, 0.5 for
        a draw, 0 for a loss."""
        rewards = super().reward(trajectory)
        if not self._measured:
            return rewards
        return turnwise.Rewards((1 + rewards.players[self._measured]) / 2)
