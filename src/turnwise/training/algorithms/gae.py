"""GAE and the value model's loss: PPO with a critic.

    delta_t = r_t + gamma * V_{t+1} - V_t,     V = 0 after the last token
    A_t     = delta_t + gamma * lambda * A_{t+1}
    R_t     = A_t + V_t                        (what the value model learns)

    value loss_t = max((V_t - R_t)^2, (clip(V_t, Vold_t - c, Vold_t + c) - R_t)^2) / 2

Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation"
(arXiv 1506.02438), eq. 16; "Proximal Policy Optimization Algorithms" (arXiv 1707.06347), eq. 11 and
12. The clipped value loss is not in the papers but in their authors' implementation. What differs:
time runs over the trained tokens of a branch alone, so what a tool says between two of them takes
no discount. Advantages are normalised by the deviation of the population: divided by the number of
tokens, not by one less.
"""

import math

import torch

from turnwise.config import Gae

_EPSILON = 1e-6


def gae(
    rewards_T: torch.Tensor, values_T: torch.Tensor, config: Gae
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns, [T] each and without gradient, of one branch's trained tokens in
    order. `values_T` are from before the step; advantages are not normalised yet."""
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
    """Count, sum and sum of squares, [3] in float64: added up over micro-batches and ranks they
    are what `normalised` needs."""
    wide_N = advantages_N.double()
    return torch.stack([torch.ones_like(wide_N).sum(), wide_N.sum(), wide_N.square().sum()])


def normalised(advantages_N: torch.Tensor, moments_3: torch.Tensor) -> torch.Tensor:
    """(A - mean) / (std + 1e-6), mean and deviation over the tokens that the moments are of."""
    count, total, squares = (float(moment) for moment in moments_3)
    mean = total / max(1.0, count)
    std = math.sqrt(max(0.0, squares / max(1.0, count) - mean**2))
    return (advantages_N - mean) / (std + _EPSILON)


def value_loss(
    values_N: torch.Tensor, old_values_N: torch.Tensor, returns_N: torch.Tensor, clip: float
) -> torch.Tensor:
    """The clipped squared error of each value, halved: [N]."""
    near_N = old_values_N + (values_N - old_values_N).clamp(-clip, clip)
    error_N = torch.maximum((values_N - returns_N).square(), (near_N - returns_N).square())
    return error_N / 2
