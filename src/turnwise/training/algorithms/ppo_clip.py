"""The clipped policy-gradient loss of PPO and GRPO, with DAPO's two bounds and the dual clip.

    loss_t = -min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t),     r_t = pi(t) / pi_old(t)
    dual clip c > 1, where A_t < 0:  loss_t = min(loss_t, -c A_t)

Schulman et al., "Proximal Policy Optimization Algorithms" (arXiv 1707.06347), eq. 7; two bounds:
Yu et al., "DAPO" (arXiv 2503.14476), eq. 10; dual clip: Ye et al., "Mastering Complex Control in
MOBA Games" (arXiv 1912.09729), eq. 5. Difference: log ratios are bounded (see `ratio`).
"""

import torch

from turnwise.config import PpoClip
from turnwise.training.algorithms.loss import Loss
from turnwise.training.algorithms.ratio import importance_ratio
from turnwise.training.tokens import TokenLoss, Tokens


class PpoClipLoss(Loss):
    """Clipped ratio of each token."""

    def __init__(self, config: PpoClip) -> None:
        self._config = config

    def __call__(self, tokens: Tokens) -> TokenLoss:
        """Return the loss of each token by its own ratio."""
        config = self._config
        ratio_N = importance_ratio(tokens.logprobs_N - tokens.old_logprobs_N)
        result = clipped_loss(ratio_N, tokens.advantages_N, config.clip_low, config.clip_high)
        if config.dual_clip is None:
            return result
        most_N = -config.dual_clip * tokens.advantages_N
        dual_N = (tokens.advantages_N < 0) & (result.loss_N > most_N)
        return TokenLoss(
            loss_N=torch.where(dual_N, most_N, result.loss_N),
            ratio_N=result.ratio_N,
            clipped_N=result.clipped_N | dual_N,
        )


def clipped_loss(
    ratio_N: torch.Tensor, advantages_N: torch.Tensor, low: float, high: float
) -> TokenLoss:
    """Return -min(r A, clip(r, 1 - low, 1 + high) A) for the given ratios r."""
    plain_N = ratio_N * advantages_N
    bounded_N = ratio_N.clamp(1 - low, 1 + high) * advantages_N
    return TokenLoss(
        loss_N=-torch.minimum(plain_N, bounded_N),
        ratio_N=ratio_N.detach(),
        clipped_N=bounded_N < plain_N,
    )
