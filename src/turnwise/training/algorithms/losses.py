"""Losses of tokens, and the batch's loss from them: each part a function, or a class, with its
formula, its paper and the differences from it.

    loss of the batch = sum_N weight_N * (correction_N * loss_N + coef * kl_N)

    r_t = pi(t) / pi_old(t)        sg: stop gradient

A loss gives `loss_N`; `correction_weights`, `kl_N` and `token_weights` (the reduction) the rest.
Log ratios are bounded everywhere (see `importance_ratio`), which no paper does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from turnwise.config.algorithm import AlgorithmConfig, Cispo, CorrectionConfig, Dpo, Gspo, PpoClip
from turnwise.training.algorithms.advantages import has_signal
from turnwise.training.algorithms.interface import (
    MAX_LOG_RATIO,
    Loss,
    TokenLoss,
    Tokens,
    importance_ratio,
)


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


@dataclass(frozen=True, slots=True)
class Objective:
    """A micro-batch's part of the loss, and its components."""

    loss: torch.Tensor
    """Scalar with gradient; the sum over all micro-batches and ranks is the batch's loss."""
    result: TokenLoss
    """Per-token losses before correction, penalty and reduction."""
    weights_N: torch.Tensor
    """Weight of each token in the batch's loss, from `algorithm.reduction`."""
    correction_N: torch.Tensor
    """Weight of each token that corrects the mismatch between engine and trainer."""
    divergence_N: torch.Tensor | None
    """Divergence from the reference model, without gradient; None without a KL penalty."""


def objective(
    config: AlgorithmConfig,
    loss: Loss,
    tokens: Tokens,
    *,
    total_tokens: int,
    total_trajectories: int,
    constant: int,
) -> Objective:
    """Return the loss of a micro-batch.

    With `kl.importance_weight` a token's kl is multiplied by its own ratio pi(t) / pi_old(t),
    gradient included, regardless of the ratio in the loss.

    Args:
        loss: The one that `config.loss` names.
        total_tokens: Trained tokens of the whole batch.
        total_trajectories: Trajectories of the whole batch.
        constant: Length that `reduction: constant` divides by.
    """
    result = loss(tokens)
    correction_N = correction_weights(tokens, config.correction)
    loss_N = result.loss_N * correction_N
    divergence_N = None
    if config.kl.coef:
        assert tokens.reference_logprobs_N is not None, "a KL penalty needs a reference model"
        divergence_N = kl_N(tokens.logprobs_N, tokens.reference_logprobs_N, config.kl.estimator)
        if config.kl.where == "loss":
            penalty_N = divergence_N
            if config.kl.importance_weight:
                penalty_N = penalty_N * importance_ratio(tokens.logprobs_N - tokens.old_logprobs_N)
            loss_N = loss_N + config.kl.coef * penalty_N
        divergence_N = divergence_N.detach()
    weights_N = token_weights(
        "sequence_mean" if loss.needs_pairs else config.reduction,
        tokens,
        total_tokens=total_tokens,
        total_trajectories=total_trajectories,
        constant=constant,
    )
    return Objective((weights_N * loss_N).sum(), result, weights_N, correction_N, divergence_N)


def token_weights(
    reduction: Literal["token_mean", "sequence_mean", "constant"],
    tokens: Tokens,
    *,
    total_tokens: int,
    total_trajectories: int,
    constant: int,
) -> torch.Tensor:
    """Return the weight of each token of a micro-batch in the batch's loss: [N].

        token_mean      1 / tokens of the batch                        (DAPO, 2503.14476, eq. 8)
        sequence_mean   1 / (tokens of the trajectory * trajectories)  (GRPO, 2402.03300, eq. 3)
        constant        1 / (trajectories * constant)                  (Dr. GRPO, 2503.20783)

    Numbers are arXiv's. An output in the papers is a whole trajectory here: its branches share one
    weight, regardless of their number. The totals are over the whole batch and include trajectories
    with advantage 0, but not trajectories without trained tokens.
    """
    ones_N = torch.ones_like(tokens.logprobs_N, requires_grad=False)
    match reduction:
        case "token_mean":
            return ones_N / total_tokens
        case "sequence_mean":
            return ones_N / (tokens.trajectory_tokens_N * total_trajectories)
        case "constant":
            return ones_N / (total_trajectories * constant)


def correction_weights(tokens: Tokens, config: CorrectionConfig) -> torch.Tensor:
    """Return importance weights for the mismatch between the engine's policy and the trainer's.

        w_t = pi_old(t) / pi_engine(t)        old: the trainer's policy before the step
        token_tis:     min(w_t, high)
        sequence_tis:  min(product of w over the sequence, high), for all its tokens
        mask:          1 where low <= w_t <= high, else 0

    The factors of the tokens' losses: [N], without gradient. Truncated importance sampling: Yao et
    al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025), after
    Ionides (2008). Differences:

    - With `stale_only`, tokens of the weight version at the start of the step have weight 1 in all
      of its updates and are excluded from their sequence's product.
    - A sequence is the trained tokens of one branch. Tokens shared with an earlier branch, and
      tokens that are too old to train, are context and excluded from the product.
    - `mask` drops each token whose own weight is outside the band, and gives those inside weight 1.
      IcePop (Ling team, "Every Step Evolves", arXiv 2510.18855) and TRL's mask modes keep the
      weight of those inside. Masked tokens still count in the totals that a reduction divides by.
    - The KL penalty is not multiplied by the weight.
    """
    log_weight_N = (tokens.old_logprobs_N - tokens.engine_logprobs_N).detach()
    if config.name == "none":
        return torch.ones_like(log_weight_N)
    exempt_N = (tokens.staleness_N == 0) & config.stale_only
    log_weight_N = log_weight_N.masked_fill(exempt_N, 0.0)
    if config.name == "sequence_tis":
        log_weight_N = tokens.sums_S(log_weight_N)[tokens.sequence_N]
    weight_N = log_weight_N.exp()
    if config.name == "mask":
        weight_N = ((config.low <= weight_N) & (weight_N <= config.high)).to(weight_N.dtype)
    else:
        weight_N = weight_N.clamp(max=config.high)
    return weight_N.masked_fill(exempt_N, 1.0)


def kl_N(
    logprobs_N: torch.Tensor,
    reference_logprobs_N: torch.Tensor,
    estimator: Literal["k1", "k2", "k3"],
) -> torch.Tensor:
    """Return an estimate, at each token, of the KL divergence from the reference model: [N].

        d = log pi_ref(t) - log pi(t)
        k1 = -d      k2 = d^2 / 2      k3 = exp(d) - d - 1

    It has the gradient of `logprobs_N`. Schulman, "Approximating KL divergence"
    (joschu.net/blog/kl-approx.html, 2020). k1 and k3 are unbiased estimates of the divergence, and
    k3 is never negative. As a loss, k2 has the divergence's gradient on average, and k1 a zero
    gradient on average. Differences: k3 bounds d to at most 20 and has no gradient beyond.

    The averages are over tokens that the policy itself sampled. By default, a penalty in the loss
    is not reweighted for tokens of an older policy; `kl.importance_weight` multiplies it by pi(t) /
    pi_old(t) (DeepSeek-AI, "DeepSeek-V3.2", arXiv 2512.02556, section 3.1, and TRL's default),
    which with k3 has the divergence's gradient on average too.
    """
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
    """Return the penalty on the advantage of each trained token of a sequence, in order: [T].

        A_t = A - coef * sum_{i >= t} kl_i        (REINFORCE++, Hu et al., arXiv 2501.03262)

    Without gradient, and for trajectory-level advantages; GAE subtracts `coef * kl` from each
    token's reward. It is subtracted after the advantages are computed, so it is never part of a
    baseline; TRL's RLOO subtracts it from the rewards first.
    """
    later_T = torch.as_tensor(kl_T).detach().flip(0).cumsum(0).flip(0)
    return coef * later_T
