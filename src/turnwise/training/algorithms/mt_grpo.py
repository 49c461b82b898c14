"""MT-GRPO: GRPO's advantage of the outcome, plus one for each earlier turn's own reward.

    A_{i,k} = norm_i(r_{i,k}) + outcome_weight * norm_i(outcome_i)     before the last turn
    A_{i,K} = norm_i(outcome_i)                                        at the last turn K

`norm_i` subtracts the mean over the group and divides by the standard deviation plus 1e-6; of turn
`k`, the group is the trajectories that continue after it. The outcome is the rest of the reward:
that of the last turn and of the whole trajectory.

Zeng et al., "Reinforcing Multi-Turn Reasoning in LLM Agents via Turn-Level Credit Assignment"
(arXiv 2505.11821v1). Differences: the paper has two turns, of which the first has a reward; here
any number of turns does, and trajectories may differ in their number.
"""

from collections.abc import Sequence

from turnwise.config import MtGrpo
from turnwise.training.algorithms.advantage import Advantage
from turnwise.training.algorithms.turn_returns import normalised_by_turn


class MtGrpoAdvantage(Advantage):
    """The outcome and each earlier turn's reward, normalised separately within the group."""

    per_turn = True

    def __init__(self, config: MtGrpo) -> None:
        self._config = config

    def of_turns(self, rewards: Sequence[Sequence[float]]) -> list[list[float]] | None:
        """Return None if there are fewer than two trajectories."""
        if len(rewards) < 2:
            return None
        outcomes = normalised_by_turn([turns[-1:] for turns in rewards], scale=True)
        earlier = normalised_by_turn([turns[:-1] for turns in rewards], scale=True)
        weight = self._config.outcome_weight
        return [
            [advantage + weight * outcome[0] for advantage in turns] + outcome
            for turns, outcome in zip(earlier, outcomes, strict=True)
        ]
