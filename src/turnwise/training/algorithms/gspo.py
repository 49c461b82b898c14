"""GSPO: one clipped ratio for a whole sequence.

    s_i    = exp(mean over the sequence's tokens of (log pi(t) - log pi_old(t)))
    s_t    = sg(s_i) * pi(t) / sg(pi(t))          sg: without gradient
    loss_t = -min(s_t A_t, clip(s_t, 1 - low, 1 + high) A_t)

Zheng et al., "Group Sequence Policy Optimization" (arXiv 2507.18071), eq. 5 to 7 and, for s_t, the
paper's GSPO-token. Every token has its sequence's ratio as value and its own log-prob's gradient:
where all tokens of a sequence have one advantage, the sum over them is GSPO's gradient exactly, and
advantages that differ by token, or weights of a correction, still act on their own tokens. The
paper's reduction is `sequence_mean`. What differs: log ratios are bounded (see `ratio`), and where
a trajectory has several branches each has a ratio of its own, over the tokens that it trains, while
the reduction weighs them together as one trajectory.
"""

from turnwise.config import Gspo
from turnwise.training.algorithms.ppo_clip import clipped_loss
from turnwise.training.algorithms.ratio import importance_ratio
from turnwise.training.tokens import TokenLoss, Tokens


def loss(tokens: Tokens, config: Gspo) -> TokenLoss:
    """The loss of each token by its sequence's ratio."""
    logprobs_N = tokens.logprobs_N
    log_ratio_S = tokens.means_S(logprobs_N.detach() - tokens.old_logprobs_N)
    value_N = importance_ratio(log_ratio_S)[tokens.sequence_N]
    ratio_N = value_N * (logprobs_N - logprobs_N.detach()).exp()
    return clipped_loss(ratio_N, tokens.advantages_N, config.clip_low, config.clip_high)
