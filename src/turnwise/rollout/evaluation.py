"""What an evaluation's groups say: accuracy, pass@k and mean@k.

A trajectory is right when its reward is `eval.success_reward` or more (but for the rounding of a
sum of weighted parts); one that was dropped is wrong. For rewards that are not 0 or 1, set that key
to the reward of an answer that counts as solved; `reward_mean` does not depend on it.
"""

from collections.abc import Sequence
from math import comb, isclose

from turnwise.rollout.group import Group


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that `k` of `n` attempts, drawn without replacement, hold a right one.

    The unbiased estimator of Chen et al., arXiv 2107.03374, equation 1.

    Args:
        n: Attempts that were made.
        c: Those of them that are right.
        k: From 1 to n.
    """
    assert 0 <= c <= n
    assert 1 <= k <= n
    return 1.0 - comb(n - c, k) / comb(n, k)


def mean_at_k(right: Sequence[bool], k: int) -> float:
    """The share of the first `k` attempts that are right: what k attempts alone would tell."""
    assert 1 <= k <= len(right)
    return sum(right[:k]) / k


def summarize(groups: Sequence[Group], n: int, success_reward: float) -> dict[str, float]:
    """Means over the groups, each of `n` attempts; at least one group.

    Returns `accuracy` (of all attempts), `reward_mean` (of those that came through; 0 of none),
    and `pass@k` and `mean@k` for each power of two below `n` and `n` itself.
    """
    rights = [_right(group, n, success_reward) for group in groups]
    rewards = [t.reward or 0.0 for group in groups for t in group.trajectories]
    summary = {
        "accuracy": sum(map(sum, rights)) / (n * len(groups)),
        "reward_mean": sum(rewards) / max(1, len(rewards)),
    }
    for k in _powers_of_two(n):
        summary[f"pass@{k}"] = sum(pass_at_k(n, sum(r), k) for r in rights) / len(groups)
        summary[f"mean@{k}"] = sum(mean_at_k(r, k) for r in rights) / len(groups)
    return summary


def _right(group: Group, n: int, success_reward: float) -> list[bool]:
    """Of each attempt by its place in the group."""
    right = [False] * n
    for trajectory in group.trajectories:
        reward = trajectory.reward or 0.0
        reached = reward >= success_reward or isclose(reward, success_reward)
        right[trajectory.sample_index] = reached
    return right


def _powers_of_two(n: int) -> list[int]:
    return [2**i for i in range(n.bit_length()) if 2**i < n] + [n]
