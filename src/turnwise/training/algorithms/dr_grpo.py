"""Dr. GRPO: rewards less their group's mean.

    A_i = r_i - mean(r)

Liu et al., "Understanding R1-Zero-Like Training" (arXiv 2503.20783), section 3.2: without GRPO's
division by the deviation, which favours problems that are very easy or very hard. The paper's
other half, a constant in place of each answer's length, is `algorithm.reduction: constant`.
"""

from collections.abc import Sequence

from turnwise.training.algorithms.dapo import has_signal


def advantages(rewards: Sequence[float]) -> list[float] | None:
    """One group's: all 0 where its rewards are equal, None where it has fewer than two."""
    if len(rewards) < 2:
        return None
    if not has_signal(rewards):
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    return [r - mean for r in rewards]
