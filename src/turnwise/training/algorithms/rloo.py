"""RLOO: rewards less the mean of the group's others (leave one out).

    A_i = r_i - sum_{j != i} r_j / (n - 1)

Ahmadian et al., "Back to Basics" (arXiv 2402.14740). What differs: the paper's policy
gradient takes the whole answer as one action; here the loss is chosen apart from the advantage. A
KL penalty in the reward comes off the advantage and has no part in the baseline (see `kl`).
"""

from collections.abc import Sequence

from turnwise.training.algorithms.dapo import has_signal


def advantages(rewards: Sequence[float]) -> list[float] | None:
    """One group's: all 0 where its rewards are equal, None where it has fewer than two."""
    if len(rewards) < 2:
        return None
    if not has_signal(rewards):
        return [0.0] * len(rewards)
    total = sum(rewards)
    return [r - (total - r) / (len(rewards) - 1) for r in rewards]
