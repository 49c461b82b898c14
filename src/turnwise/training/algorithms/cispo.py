"""CISPO: the clip bounds the weight of a token's gradient and never removes the gradient.

    loss_t = -sg(clip(r_t, 1 - low, 1 + high)) * A_t * log pi(t),     r_t = pi(t) / pi_old(t)

MiniMax, "MiniMax-M1" (arXiv 2506.13585), eq. 4 and 5; sg: stop gradient. The paper has only the
upper bound, which corresponds to a `clip_low` of 1, and averages over tokens.
"""

from turnwise.config import Cispo
from turnwise.training.algorithms.loss import Loss
from turnwise.training.algorithms.ratio import importance_ratio
from turnwise.training.tokens import TokenLoss, Tokens


class CispoLoss(Loss):
    """Clipped importance weights."""

    def __init__(self, config: Cispo) -> None:
        self._config = config

    def __call__(self, tokens: Tokens) -> TokenLoss:
        """Return the loss of each token; `clipped_N` marks the clipped weights."""
        config = self._config
        ratio_N = importance_ratio((tokens.logprobs_N - tokens.old_logprobs_N).detach())
        weight_N = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high)
        return TokenLoss(
            loss_N=-weight_N * tokens.advantages_N * tokens.logprobs_N,
            ratio_N=ratio_N,
            clipped_N=weight_N != ratio_N,
        )
