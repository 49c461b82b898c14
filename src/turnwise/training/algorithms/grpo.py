"""GRPO: rewards normalised within the group.

    A_i = (r_i - mean(r)) / (std(r) + 1e-6)

Group Relative Policy Optimization: Shao et al., "DeepSeekMath" (arXiv 2402.03300), section 4.1.2.
Differences: the standard deviation is that of the population (divided by n; TRL divides by n - 1),
which the paper leaves open, and 1e-6 avoids amplifying rewards that differ only by rounding.
"""

from collections.abc import Sequence

from turnwise.config import Grpo
from turnwise.training.algorithms.advantage import Advantage
from turnwise.training.algorithms.dapo import has_signal

_EPSILON = 1e-6


class GrpoAdvantage(Advantage):
    """Rewards normalised within the group."""

    def __init__(self, config: Grpo) -> None:
        """Accept the section, which has no options."""

    def of_group(self, rewards: Sequence[float]) -> list[float] | None:
        """Return all 0 if the rewards are equal, None if there are fewer than two."""
        if len(rewards) < 2:
            return None
        if not has_signal(rewards):
            return [0.0] * len(rewards)
        mean = sum(rewards) / len(rewards)
        std = (sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5
        return [(r - mean) / (std + _EPSILON) for r in rewards]
