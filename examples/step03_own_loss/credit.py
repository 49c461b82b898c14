"""Credit for each token: a function spreads a trajectory's advantage over its tool calls."""

from collections.abc import Sequence

import numpy as np

from turnwise import Trajectory
from turnwise.training.algorithms.advantages import WithinGroup, grpo


class CreditCalls(WithinGroup):
    """GRPO's advantage, scaled in each turn by the share of its tool calls that worked; it decays
    from the end of the turn to its beginning."""

    def __init__(self, decay: float = 0.9) -> None:
        super().__init__(grpo)
        self.decay = decay

    def annotate(self, trajectory: Trajectory, advantages: Sequence[float]) -> None:
        shares: list[list[bool]] = []
        for message in trajectory.messages:
            if message["role"] == "assistant":
                shares.append([])
            elif message["role"] == "tool":
                shares[-1].append(not str(message["content"]).startswith("Error"))
        for turn, advantage, worked in zip(trajectory.turns, advantages, shares, strict=True):
            share = sum(worked) / len(worked) if worked else 1.0
            ages_N = np.arange(len(turn.completion_token_ids), dtype=np.float32)[::-1]
            turn.streams["advantage"] = advantage * share * self.decay**ages_N
