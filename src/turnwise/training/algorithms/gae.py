"""GAE and the value model's loss: PPO with a critic.

    delta_t = r_t + gamma * V_{t+1} - V_t,     V = 0 after the last token
    A_t     = delta_t + gamma * lambda * A_{t+1}
    R_t     = A_t + V_t                        (target of the value model)

    value loss_t = max((V_t - R_t)^2, (clip(V_t, Vold_t - c, Vold_t + c) - R_t)^2) / 2

Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation"
(arXiv 1506.02438), eq. 16; "Proximal Policy Optimization Algorithms" (arXiv 1707.06347), eq. 11 and
12. The clipped value loss is not in the papers but in their authors' implementation. Differences:
time steps are the trained tokens of a branch only, so tool results between them are not discounted.
With `level: turn` they are its turns, as in turn-level PPO (Zeng et al., arXiv 2505.11821v2): the
value of a turn is that of its first token, and all of its tokens get its advantage and its return.
Advantages are normalised by the population standard deviation (divided by the number of tokens, not
by one less).
"""

import math
from collections.abc import Sequence

import torch

from turnwise.config import Gae
from turnwise.training.algorithms.advantage import Advantage, ValueModel

_EPSILON = 1e-6


class GaeAdvantage(Advantage):
    """Advantages of each token, from rewards and a value model."""

    normalise = True

    def __init__(self, advantage: Gae) -> None:
        self._config = advantage
        self.level = advantage.level
        self.value_model = ValueModel(
            advantage.model, advantage.learning_rate, advantage.warmup_steps
        )

    def of_group(self, rewards: Sequence[float]) -> list[float]:
        """Return the rewards themselves, from which `of_tokens` computes advantages."""
        return list(rewards)

    def of_tokens(
        self, rewards_T: torch.Tensor, values_T: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return advantages and returns; see `gae`."""
        return gae(rewards_T, values_T, self._config)

    def value_loss(
        self, values_N: torch.Tensor, old_values_N: torch.Tensor, returns_N: torch.Tensor
    ) -> torch.Tensor:
        """Return the clipped squared error of each value; see `value_loss`."""
        return value_loss(values_N, old_values_N, returns_N, self._config.clip)


def gae(
    rewards_T: torch.Tensor, values_T: torch.Tensor, config: Gae
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages and returns, [T] each and without gradient, of one branch's trained tokens.

    The tokens are in order, `values_T` are from before the step, and the advantages are not yet
    normalised.
    """
    rewards, values = rewards_T.tolist(), values_T.tolist()
    assert len(rewards) == len(values), f"{len(rewards)} rewards for {len(values)} values"
    advantages = [0.0] * len(values)
    advantage = next_value = 0.0
    for t in reversed(range(len(values))):
        delta = rewards[t] + config.gamma * next_value - values[t]
        advantage = delta + config.gamma * config.lam * advantage
        advantages[t] = advantage
        next_value = values[t]
    advantages_T = values_T.new_tensor(advantages)
    return advantages_T, advantages_T + values_T.detach()


def moments(advantages_N: torch.Tensor) -> torch.Tensor:
    """Return count, sum and sum of squares, [3] in float64, for `normalised`; sum them
    over micro-batches and ranks."""
    wide_N = advantages_N.double()
    return torch.stack([torch.ones_like(wide_N).sum(), wide_N.sum(), wide_N.square().sum()])


def normalised(advantages_N: torch.Tensor, moments_3: torch.Tensor) -> torch.Tensor:
    """Return (A - mean) / (std + 1e-6), with mean and standard deviation given by the moments."""
    count, total, squares = (float(moment) for moment in moments_3)
    mean = total / max(1.0, count)
    std = math.sqrt(max(0.0, squares / max(1.0, count) - mean**2))
    return (advantages_N - mean) / (std + _EPSILON)


def value_loss(
    values_N: torch.Tensor, old_values_N: torch.Tensor, returns_N: torch.Tensor, clip: float
) -> torch.Tensor:
    """Return half the clipped squared error of each value: [N]."""
    near_N = old_values_N + (values_N - old_values_N).clamp(-clip, clip)
    error_N = torch.maximum((values_N - returns_N).square(), (near_N - returns_N).square())
    return error_N / 2
