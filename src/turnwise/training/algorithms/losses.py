"""Losses: each a function, or a class, with its formula, its paper and the differences from it.

    r_t = pi(t) / pi_old(t)        sg: stop gradient

Log ratios are bounded everywhere (see `importance_ratio`), which no paper does.
"""

from collections.abc import Callable, Sequence

import torch

from turnwise.config import Cispo, Dpo, Gspo, PpoClip
from turnwise.training.algorithms.advantages import has_signal
from turnwise.training.algorithms.interface import Loss, TokenLoss, Tokens, importance_ratio


class Formula(Loss):
    """A loss by a function of the tokens, such as `ppo_clip`."""

    def __init__(self, formula: Callable[[Tokens], TokenLoss]) -> None:
        self._formula = formula

    def __call__(self, tokens: Tokens) -> TokenLoss:
        return self._formula(tokens)


def ppo_clip(config: PpoClip, tokens: Tokens) -> TokenLoss:
    """The clipped policy-gradient loss of PPO and GRPO, with DAPO's two bounds and the dual clip.

        loss_t = -min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t)
        dual clip c > 1, where A_t < 0:  loss_t = min(loss_t, -c A_t)

    Schulman et al., "Proximal Policy Optimization Algorithms" (arXiv 1707.06347), eq. 7; two
    bounds: Yu et al., "DAPO" (arXiv 2503.14476), eq. 10; dual clip: Ye et al., "Mastering Complex
    Control in MOBA Games" (arXiv 1912.09729), eq. 5.
    """
    ratio_N = importance_ratio(tokens.logprobs_N - tokens.old_logprobs_N)
    result = _clipped(ratio_N, tokens.advantages_N, config.clip_low, config.clip_high)
    if config.dual_clip is None:
        return result
    most_N = -config.dual_clip * tokens.advantages_N
    dual_N = (tokens.advantages_N < 0) & (result.loss_N > most_N)
    return TokenLoss(
        loss_N=torch.where(dual_N, most_N, result.loss_N),
        ratio_N=result.ratio_N,
        clipped_N=result.clipped_N | dual_N,
    )


def _clipped(
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


def gspo(config: Gspo, tokens: Tokens) -> TokenLoss:
    """GSPO: one clipped ratio for a whole sequence.

        s_i    = exp(mean over the sequence's tokens of (log pi(t) - log pi_old(t)))
        s_t    = sg(s_i) * pi(t) / sg(pi(t))
        loss_t = -min(s_t A_t, clip(s_t, 1 - low, 1 + high) A_t)

    Zheng et al., "Group Sequence Policy Optimization" (arXiv 2507.18071), eq. 5 to 7 and, for s_t,
    the paper's GSPO-token. Every token has its sequence's ratio as its value and the gradient of
    its own log-prob: if all tokens of a sequence have the same advantage, their sum is exactly
    GSPO's gradient, while token-level advantages or correction weights still apply to their own
    tokens. The paper's reduction is `sequence_mean`. Difference: each branch of a trajectory has
    its own ratio, over its trained tokens, while the reduction weights the branches together as one
    trajectory.
    """
    logprobs_N = tokens.logprobs_N
    log_ratio_S = tokens.means_S(logprobs_N.detach() - tokens.old_logprobs_N)
    value_N = importance_ratio(log_ratio_S)[tokens.sequence_N]
    ratio_N = value_N * (logprobs_N - logprobs_N.detach()).exp()
    return _clipped(ratio_N, tokens.advantages_N, config.clip_low, config.clip_high)


def cispo(config: Cispo, tokens: Tokens) -> TokenLoss:
    """CISPO: the clip bounds the weight of a token's gradient and never removes the gradient.

        loss_t = -sg(clip(r_t, 1 - low, 1 + high)) * A_t * log pi(t)

    MiniMax, "MiniMax-M1" (arXiv 2506.13585), eq. 4 and 5. The paper has only the upper bound, which
    corresponds to a `clip_low` of 1, and averages over tokens.
    """
    ratio_N = importance_ratio((tokens.logprobs_N - tokens.old_logprobs_N).detach())
    weight_N = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high)
    return TokenLoss(
        loss_N=-weight_N * tokens.advantages_N * tokens.logprobs_N,
        ratio_N=ratio_N,
        clipped_N=weight_N != ratio_N,
    )


class DpoLoss(Loss):
    """Online DPO: a group's best trajectory is preferred to its worst.

        h(y) = sum over y's trained tokens of (log pi(t) - log pi_ref(t))
        loss of a pair = -log sigmoid(beta * (h(chosen) - h(rejected)))

    Every token of both sequences has its pair's loss; `sequence_mean` is the mean over pairs.
    Rafailov et al., "Direct Preference Optimization" (arXiv 2305.18290), eq. 7; online: Guo et al.,
    "Direct Language Model Alignment from Online AI Feedback" (arXiv 2402.04792). Differences: pairs
    are ranked by reward, where the paper asks a language model to compare two answers, and a pair
    is the best and worst of a group, where the paper samples two.
    """

    needs_reference = True
    needs_pairs = True

    def __init__(self, config: Dpo) -> None:
        self._config = config

    def __call__(self, tokens: Tokens) -> TokenLoss:
        assert tokens.sequences % 2 == 0, f"{tokens.sequences} sequences are not pairs"
        assert tokens.reference_logprobs_N is not None, "DPO needs the reference model's log-probs"
        gain_S = tokens.sums_S(tokens.logprobs_N - tokens.reference_logprobs_N)
        margin_P = gain_S[0::2] - gain_S[1::2]
        pair_loss_P = -torch.nn.functional.logsigmoid(self._config.beta * margin_P)
        return self.unclipped(tokens, pair_loss_P[tokens.sequence_N // 2])


def choose_pairs(rewards: Sequence[float]) -> tuple[int, int] | None:
    """Return the indices of a group's best and worst reward, the first of ties; None if all rewards
    are equal or there are fewer than two."""
    if not has_signal(rewards):
        return None
    indices = range(len(rewards))
    return max(indices, key=rewards.__getitem__), min(indices, key=rewards.__getitem__)
