"""GRPO: rewards normalised within the group.

    A_i = (r_i - mean(r)) / (std(r) + 1e-6)

Group Relative Policy Optimization: Shao et al., "DeepSeekMath" (arXiv 2402.03300), section 4.1.2.
What differs: the deviation is that of the population (divided by n; TRL divides by n - 1), which
the paper leaves open, and 1e-6 keeps rewards that are equal but for rounding from being blown up.
"""

from collections.abc import Sequence

from turnwise.training.algorithms.dapo import has_signal

_EPSILON = 1e-6


def advantages(rewards: Sequence[float]) -> list[float] | None:
    """One group's: all 0 where its rewards are equal, None where it has fewer than two."""
    if len(rewards) < 2:
        return None
    if not has_signal(rewards):
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    std = (sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5
    return [(r - mean) / (std + _EPSILON) for r in rewards]
