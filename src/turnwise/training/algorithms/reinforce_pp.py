"""REINFORCE++: rewards normalised over the whole batch instead of within each group.

    baseline none:   a_i = r_i
    baseline group:  a_i = r_i - mean(r of its group)
    A_i = (a_i - mean(a over the batch)) / (std(a over the batch) + 1e-6)

Hu et al., "REINFORCE++" (arXiv 2501.03262). What differs: the batch's mean and deviation are over
trajectories, not tokens, so that a long answer counts once; and the paper takes the KL penalty off
before it normalises, while `kl.reward_penalty` comes off the normalised advantage, so that
`kl.coef` does not depend on the scale of the rewards.
"""

from collections.abc import Sequence

from turnwise.config import ReinforcePP
from turnwise.training.algorithms import dr_grpo
from turnwise.training.algorithms.dapo import has_signal

_EPSILON = 1e-6


def advantages(rewards: Sequence[Sequence[float]], config: ReinforcePP) -> list[list[float] | None]:
    """A step's, by group: all 0 where no reward differs from its baseline. With baseline `group`,
    None for a group of fewer than two."""
    if config.baseline == "group":
        shifted = [dr_grpo.advantages(group) for group in rewards]
    else:
        shifted = [list(group) for group in rewards]
    batch = [a for group in shifted if group is not None for a in group]
    if not has_signal(batch):
        return [None if group is None else [0.0] * len(group) for group in shifted]
    # The mean of differences to their groups' means is 0, but for rounding.
    mean = 0.0 if config.baseline == "group" else sum(batch) / len(batch)
    std = (sum((a - mean) ** 2 for a in batch) / len(batch)) ** 0.5
    return [
        None if group is None else [(a - mean) / (std + _EPSILON) for a in group]
        for group in shifted
    ]
