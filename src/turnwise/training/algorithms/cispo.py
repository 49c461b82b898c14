"""CISPO: the clip bounds the weight of a token's gradient and never takes the gradient away.

    loss_t = -sg(clip(r_t, 1 - low, 1 + high)) * A_t * log pi(t),     r_t = pi(t) / pi_old(t)

MiniMax, "MiniMax-M1" (arXiv 2506.13585), eq. 4 and 5; sg: without gradient. The paper bounds only
above, which is what `clip_low` of 1 does, and takes the mean over tokens.
"""

from turnwise.config import Cispo
from turnwise.training.algorithms.ratio import importance_ratio
from turnwise.training.tokens import TokenLoss, Tokens


def loss(tokens: Tokens, config: Cispo) -> TokenLoss:
    """The loss of each token; `clipped_N` is where the weight was bounded."""
    ratio_N = importance_ratio((tokens.logprobs_N - tokens.old_logprobs_N).detach())
    weight_N = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high)
    return TokenLoss(
        loss_N=-weight_N * tokens.advantages_N * tokens.logprobs_N,
        ratio_N=ratio_N,
        clipped_N=weight_N != ratio_N,
    )
