"""One micro-batch's part of the batch's loss, combined from the configured parts.

    sum_N weight_N * (correction_N * loss_N + coef * kl_N)

Each part is a function: `correction_weights`, `kl_N`, and `token_weights` for the reduction.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from turnwise.config import AlgorithmConfig, CorrectionConfig
from turnwise.training.algorithms.interface import (
    MAX_LOG_RATIO,
    Loss,
    TokenLoss,
    Tokens,
    importance_ratio,
)


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
