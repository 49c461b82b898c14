"""Returns of turns: each turn is credited with the rewards from it on, compared within the group.

    G_{i,k} = sum_{j >= k} gamma^(j - k) r_{i,j}
    A_{i,k} = (G_{i,k} - mean_i(G_{i,k})) / (std_i(G_{i,k}) + 1e-6)

`i` counts the trajectories of a group that have a turn `k`; `r_{i,k}` is the reward of turn `k`,
and the last turn's includes the reward of the whole trajectory.

REINFORCE with the reward-to-go and a baseline per time step: Sutton and Barto, "Reinforcement
Learning" (2nd edition), section 13.4; the baseline and the scale are GRPO's (see `grpo`), over the
group at the same turn. Difference: where the turn has no other trajectory, its advantage is 0.
"""

from collections.abc import Sequence

from turnwise.config import TurnReturns
from turnwise.training.algorithms.advantage import Advantage
from turnwise.training.algorithms.dapo import has_signal

_EPSILON = 1e-6


class TurnReturnsAdvantage(Advantage):
    """Discounted rewards from each turn on, compared with the group's at the same turn."""

    per_turn = True

    def __init__(self, config: TurnReturns) -> None:
        self._config = config

    def of_turns(self, rewards: Sequence[Sequence[float]]) -> list[list[float]] | None:
        """Return None if there are fewer than two trajectories."""
        if len(rewards) < 2:
            return None
        returns = [turn_returns(turns, self._config.gamma) for turns in rewards]
        return normalised_by_turn(returns, scale=self._config.scale)


def turn_returns(rewards: Sequence[float], gamma: float) -> list[float]:
    """Return the discounted sum of rewards from each turn on.

    Example:
        >>> turn_returns([1.0, 0.0, 4.0], gamma=0.5)
        [2.0, 2.0, 4.0]
    """
    returns, following = [0.0] * len(rewards), 0.0
    for turn in reversed(range(len(rewards))):
        following = returns[turn] = rewards[turn] + gamma * following
    return returns


def normalised_by_turn(values: Sequence[Sequence[float]], *, scale: bool) -> list[list[float]]:
    """Return values minus their mean over the trajectories that have that turn, 0 without others.

    Args:
        scale: Also divide by their standard deviation.
    """
    normalised = [[0.0] * len(turns) for turns in values]
    for turn in range(max(map(len, values), default=0)):
        present = [index for index, turns in enumerate(values) if turn < len(turns)]
        column = [values[index][turn] for index in present]
        if not has_signal(column):
            continue
        mean = sum(column) / len(column)
        std = (sum((value - mean) ** 2 for value in column) / len(column)) ** 0.5
        for index in present:
            difference = values[index][turn] - mean
            normalised[index][turn] = difference / (std + _EPSILON) if scale else difference
    return normalised
