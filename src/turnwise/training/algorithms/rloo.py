"""RLOO: rewards minus the mean of the other rewards in the group (leave one out).

    A_i = r_i - sum_{j != i} r_j / (n - 1)

Ahmadian et al., "Back to Basics" (arXiv 2402.14740). Differences: the paper's policy
gradient treats the whole answer as one action; here the loss is chosen independently of the
advantage. A KL penalty in the reward is subtracted from the advantage, not the baseline's rewards
(see `kl`).
"""

from collections.abc import Sequence

from turnwise.config import Rloo
from turnwise.training.algorithms.advantage import Advantage
from turnwise.training.algorithms.dapo import has_signal


class RlooAdvantage(Advantage):
    """Rewards minus the mean of the other rewards in the group."""

    def __init__(self, config: Rloo) -> None:
        """Accept the section, which has no options."""

    def of_group(self, rewards: Sequence[float]) -> list[float] | None:
        """Return all 0 if the rewards are equal, None if there are fewer than two."""
        if len(rewards) < 2:
            return None
        if not has_signal(rewards):
            return [0.0] * len(rewards)
        total = sum(rewards)
        return [r - (total - r) / (len(rewards) - 1) for r in rewards]
