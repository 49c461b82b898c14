"""Dr. GRPO: rewards minus their group's mean.

    A_i = r_i - mean(r)

Liu et al., "Understanding R1-Zero-Like Training" (arXiv 2503.20783), section 3.2: omits GRPO's
division by the standard deviation, which favours very easy and very hard problems. The paper's
other change, a constant instead of each answer's length, is `algorithm.reduction: constant`.
"""

from collections.abc import Sequence

from turnwise.config import DrGrpo
from turnwise.training.algorithms.advantage import Advantage
from turnwise.training.algorithms.dapo import has_signal


class DrGrpoAdvantage(Advantage):
    """Rewards minus their group's mean."""

    def __init__(self, config: DrGrpo) -> None:
        """Accept the section, which has no options."""

    def of_group(self, rewards: Sequence[float]) -> list[float] | None:
        """Return all 0 if the rewards are equal, None if there are fewer than two."""
        if len(rewards) < 2:
            return None
        if not has_signal(rewards):
            return [0.0] * len(rewards)
        mean = sum(rewards) / len(rewards)
        return [r - mean for r in rewards]
