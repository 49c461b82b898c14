"""REINFORCE++: rewards normalised over the whole batch instead of within each group.

    baseline none:   a_i = r_i
    baseline group:  a_i = r_i - mean(r of its group)
    A_i = (a_i - mean(a over the batch)) / (std(a over the batch) + 1e-6)

Hu et al., "REINFORCE++" (arXiv 2501.03262). Differences: the batch's mean and standard deviation
are over trajectories, not tokens, so that a long answer counts once; and the paper subtracts the KL
penalty before it normalises, while `kl.reward_penalty` is subtracted from the normalised advantage,
so that `kl.coef` does not depend on the scale of the rewards.
"""

from collections.abc import Sequence

from turnwise.config import DrGrpo, ReinforcePP
from turnwise.training.algorithms.advantage import Advantage
from turnwise.training.algorithms.dapo import has_signal
from turnwise.training.algorithms.dr_grpo import DrGrpoAdvantage

_EPSILON = 1e-6


class ReinforcePPAdvantage(Advantage):
    """Rewards, optionally minus their group's mean, normalised over the batch."""

    def __init__(self, config: ReinforcePP) -> None:
        self._config = config

    def of_groups(self, rewards: Sequence[Sequence[float]]) -> list[list[float] | None]:
        """Return all 0 if all rewards, minus their baselines, are equal; with baseline `group`,
        None for a group of fewer than two."""
        by_group = self._config.baseline == "group"
        if by_group:
            shifted = DrGrpoAdvantage(DrGrpo()).of_groups(rewards)
        else:
            shifted = [list(group) for group in rewards]
        batch = [a for group in shifted if group is not None for a in group]
        if not has_signal(batch):
            return [None if group is None else [0.0] * len(group) for group in shifted]
        # The mean of differences from group means is 0, except for rounding.
        mean = 0.0 if by_group else sum(batch) / len(batch)
        std = (sum((a - mean) ** 2 for a in batch) / len(batch)) ** 0.5
        return [
            None if group is None else [(a - mean) / (std + _EPSILON) for a in group]
            for group in shifted
        ]
