"""The KL divergence from the reference model, estimated on sampled tokens.

    d = log pi_ref(t) - log pi(t)
    k1 = -d      k2 = d^2 / 2      k3 = exp(d) - d - 1

Schulman, "Approximating KL divergence" (joschu.net/blog/kl-approx.html, 2020). k1 and k3 have the
divergence's value on average, k3 is never negative. As a loss, k2's gradient is the divergence's
on average and k1's is zero on average. What differs: k3 bounds d to at most 20 (see `ratio`) and
has no gradient beyond.

In the reward (REINFORCE++, Hu et al., arXiv 2501.03262) a token's advantage pays for itself and
for everything after it:

    A_t = A - coef * sum_{i >= t} kl_i
"""

from collections.abc import Sequence
from typing import Literal

import torch

from turnwise.training.algorithms.ratio import MAX_LOG_RATIO


def kl_N(
    logprobs_N: torch.Tensor,
    reference_logprobs_N: torch.Tensor,
    estimator: Literal["k1", "k2", "k3"],
) -> torch.Tensor:
    """The estimate at each token, with the gradient of `logprobs_N`: [N]."""
    difference_N = reference_logprobs_N - logprobs_N
    match estimator:
        case "k1":
            return -difference_N
        case "k2":
            return difference_N.square() / 2
        case "k3":
            difference_N = difference_N.clamp(max=MAX_LOG_RATIO)
            return difference_N.expm1() - difference_N


def reward_penalty(kl_T: Sequence[float] | torch.Tensor, coef: float) -> torch.Tensor:
    """What comes off the advantage of each trained token of one sequence, in order: [T], without
    gradient. For whole trajectories' advantages; GAE takes `coef * kl` off each token's reward."""
    later_T = torch.as_tensor(kl_T).detach().flip(0).cumsum(0).flip(0)
    return coef * later_T
