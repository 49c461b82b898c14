"""GRPO: advantages relative to the group, and a clipped token-level policy-gradient loss.

Group Relative Policy Optimization, Shao et al., "DeepSeekMath" (arXiv 2402.03300), eq. 3 and
section 4.1.2; the asymmetric clip is from Yu et al., "DAPO" (arXiv 2503.14476), eq. 10, as is the
mean over all tokens of the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_EPSILON = 1e-6


def group_advantages(rewards: Sequence[float]) -> list[float] | None:
    """A_i = (r_i - mean(r)) / std(r) within one group; None where all rewards are equal."""
    if len(set(rewards)) < 2:
        return None
    mean = sum(rewards) / len(rewards)
    std = (sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5
    return [(r - mean) / (std + _EPSILON) for r in rewards]


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Per-token values over the `N` trained tokens of a micro-batch."""

    loss_N: torch.Tensor
    ratio_N: torch.Tensor
    clipped_N: torch.Tensor
    """Where the clip took the gradient away."""
    kl_N: torch.Tensor | None


def grpo_loss(
    logprobs_N: torch.Tensor,
    engine_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    kl_coef: float = 0.0,
    reference_logprobs_N: torch.Tensor | None = None,
) -> TokenLoss:
    """-min(r A, clip(r, 1 - low, 1 + high) A) + kl_coef * KL, r = exp(logprob - engine's).

    The ratio is taken against the log-probs that the engine recorded when it sampled. KL is the
    k3 estimator (Schulman, "Approximating KL divergence"): exp(d) - d - 1, d = reference - policy.
    """
    ratio_N = torch.exp(logprobs_N - engine_logprobs_N)
    bounded_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    plain_N, clipped_N = ratio_N * advantages_N, bounded_N * advantages_N
    loss_N = -torch.minimum(plain_N, clipped_N)
    kl_N = None
    if reference_logprobs_N is not None:
        difference_N = reference_logprobs_N - logprobs_N
        kl_N = torch.exp(difference_N) - difference_N - 1
        loss_N = loss_N + kl_coef * kl_N
    return TokenLoss(loss_N, ratio_N.detach(), (clipped_N < plain_N).detach(), kl_N)
