"""The KL divergence from the reference model, estimated on sampled tokens.

    d = log pi_ref(t) - log pi(t)
    k1 = -d      k2 = d^2 / 2      k3 = exp(d) - d - 1

Schulman, "Approximating KL divergence" (joschu.net/blog/kl-approx.html, 2020). k1 and k3 are
unbiased estimates of the divergence, and k3 is never negative. As a loss, k2 has the divergence's
gradient on average, and k1 a zero gradient on average. Differences: k3 bounds d to at most 20 (see
`ratio`) and has no gradient beyond.

The averages are over tokens that the policy itself sampled. By default, a penalty in the loss is
not reweighted for tokens of an older policy; `kl.importance_weight` multiplies it by
pi(t) / pi_old(t) (DeepSeek-AI, "DeepSeek-V3.2", arXiv 2512.02556, section 3.1, and TRL's default),
which with k3 has the divergence's gradient on average too.

In the reward (REINFORCE++, Hu et al., arXiv 2501.03262) the penalty on a token's advantage
sums the divergence of that token and all later ones:

    A_t = A - coef * sum_{i >= t} kl_i

It is subtracted after the advantages are computed, so it is never part of a baseline; TRL's RLOO
subtracts it from the rewards first.
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
    """Return the estimate at each token, with the gradient of `logprobs_N`: [N]."""
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
    """Return the penalty on the advantage of each trained token of a sequence, in order: [T],
    without gradient. For trajectory-level advantages; GAE subtracts `coef * kl` from each token's
    reward."""
    later_T = torch.as_tensor(kl_T).detach().flip(0).cumsum(0).flip(0)
    return coef * later_T
