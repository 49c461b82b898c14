"""Results of an evaluation: accuracy, pass@k and mean@k.

A trajectory is correct if its reward is at least `eval.success_reward`, up to rounding; dropped
ones count as wrong. If rewards are not 0 or 1, set that key to the reward of an answer that counts
as correct; `reward_mean` does not depend on it.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb, isclose

from turnwise.config import Config
from turnwise.engine.protocol import TurnTimes
from turnwise.errors import InputError
from turnwise.rollout.group import TOO_LONG, Group, check_failures, turn_times
from turnwise.rollout.problems import Problem
from turnwise.rollout.producer import RunGroup
from turnwise.trajectory import Trajectory

logger = logging.getLogger(__name__)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the probability that `k` of `n` attempts, without replacement, include a correct one.

    The unbiased estimator of Chen et al., arXiv 2107.03374, equation 1.

    Args:
        n: Number of attempts.
        c: Number of correct ones among them.
        k: From 1 to n.

    Example:
        >>> pass_at_k(4, 1, 2)
        0.5
    """
    assert 0 <= c <= n
    assert 1 <= k <= n
    return 1.0 - comb(n - c, k) / comb(n, k)


def mean_at_k(right: Sequence[bool], k: int) -> float:
    """Return the share of the first `k` attempts that are correct.

    Example:
        >>> mean_at_k([True, False, False, True], 2)
        0.5
    """
    assert 1 <= k <= len(right)
    return sum(right[:k]) / k


def summarize(groups: Sequence[Group], n: int, success_reward: float) -> dict[str, float]:
    """Return the means over at least one group of `n` attempts each.

    Returns:
        `accuracy` over all attempts, `reward_mean` over those that were not dropped (0 if all
        were), and `pass@k` and `mean@k` for each power of two below `n` and for `n` itself.

    Example:
        summary = summarize(groups, n=4, success_reward=1.0)
        print(summary["accuracy"], summary["pass@4"])
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
    """Return whether each attempt, by its index in the group, is correct."""
    right = [False] * n
    for trajectory in group.trajectories:
        reward = trajectory.reward or 0.0
        reached = reward >= success_reward or isclose(reward, success_reward)
        right[trajectory.sample_index] = reached
    return right


def _powers_of_two(n: int) -> list[int]:
    return [2**i for i in range(n.bit_length()) if 2**i < n] + [n]


@dataclass(slots=True)
class Evaluation:
    """The results of the model on held-out problems."""

    trajectories: list[Trajectory]
    """The finished trajectories."""
    calls: list[list[TurnTimes]]
    """Times of the turns of each of them."""
    dropped: Counter[str]
    """Number of dropped trajectories, by reason."""
    seconds: float
    """Duration in seconds."""
    summary: dict[str, float]
    """Results as `summarize` returns them."""

    @property
    def accuracy(self) -> float:
        """Share of trajectories with a reward of at least `eval.success_reward`; dropped ones
        count as wrong."""
        return self.summary["accuracy"]

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens per second."""
        return sum(t.sampled_tokens for t in self.trajectories) / self.seconds


async def run_groups(
    run_group: RunGroup,
    problems: Sequence[Problem],
    tag: str,
    on_group: Callable[[], None] = lambda: None,
) -> list[Group]:
    """Run the groups of all problems concurrently; return them in the problems' order.

    Args:
        on_group: Called after each group.
    """

    async def one(problem: Problem) -> Group:
        group = await run_group(problem, tag)
        on_group()
        return group

    return await asyncio.gather(*map(one, problems))


def without_left_out(groups: Sequence[Group]) -> list[Group]:
    """Return the groups that were run; the number of others, whose prompt is too long, is logged.

    Raises:
        InputError: when none was run.
    """
    kept = [group for group in groups if not group.left_out]
    if len(kept) < len(groups):
        first = next(group.causes[TOO_LONG] for group in groups if group.left_out)
        left_out = f"{len(groups) - len(kept)} of {len(groups)} rows"
        if not kept:
            raise InputError(f"{left_out} have too long a prompt, and none is left: {first}")
        logger.warning("%s have too long a prompt and are left out: %s", left_out, first)
    return kept


async def evaluate(
    run_group: RunGroup,
    problems: Sequence[Problem],
    config: Config,
    tag: str = "eval",
    on_group: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Evaluate the model on problems.

    Args:
        run_group: Runs a group with `eval.sampling`.
        on_group: Called after each group.

    Raises:
        StepError: when more than `rollout.max_failed_fraction` of the trajectories fail.
    """
    started = time.perf_counter()
    groups = without_left_out(await run_groups(run_group, problems, tag, on_group))
    seconds = time.perf_counter() - started
    dropped = check_failures(groups, config.rollout.max_failed_fraction, "evaluation")
    trajectories = [t for group in groups for t in group.trajectories]
    summary = summarize(groups, config.eval.sampling.n, config.eval.success_reward)
    return Evaluation(trajectories, turn_times(groups), dropped, seconds, summary)
