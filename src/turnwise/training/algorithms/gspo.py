"""GSPO: one clipped ratio for a whole sequence.

    s_i    = exp(mean over the sequence's tokens of (log pi(t) - log pi_old(t)))
    s_t    = sg(s_i) * pi(t) / sg(pi(t))          sg: stop gradient
    loss_t = -min(s_t A_t, clip(s_t, 1 - low, 1 + high) A_t)

Zheng et al., "Group Sequence Policy Optimization" (arXiv 2507.18071), eq. 5 to 7 and, for s_t, the
paper's GSPO-token. Every token has its sequence's ratio as its value and the gradient of its own
log-prob: if all tokens of a sequence have the same advantage, their sum is exactly GSPO's gradient,
while token-level advantages or correction weights still apply to their own tokens. The paper's
reduction is `sequence_mean`. Differences: log ratios are bounded (see `ratio`), and each branch of
a trajectory has its own ratio, over its trained tokens, while the reduction weights the branches
together as one trajectory.
"""

from turnwise.config import Gspo
from turnwise.training.algorithms.loss import Loss
from turnwise.training.algorithms.ppo_clip import clipped_loss
from turnwise.training.algorithms.ratio import importance_ratio
from turnwise.training.tokens import TokenLoss, Tokens


class GspoLoss(Loss):
    """Clipped ratio of a whole sequence."""

    def __init__(self, config: Gspo) -> None:
        self._config = config

    def __call__(self, tokens: Tokens) -> TokenLoss:
        """Return the loss of each token by its sequence's ratio."""
        config = self._config
        logprobs_N = tokens.logprobs_N
        log_ratio_S = tokens.means_S(logprobs_N.detach() - tokens.old_logprobs_N)
        value_N = importance_ratio(log_ratio_S)[tokens.sequence_N]
        ratio_N = value_N * (logprobs_N - logprobs_N.detach()).exp()
        return clipped_loss(ratio_N, tokens.advantages_N, config.clip_low, config.clip_high)
