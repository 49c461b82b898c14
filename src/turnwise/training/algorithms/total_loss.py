"""One micro-batch's part of the batch's loss, combined from the configured parts.

    sum_N weight_N * (correction_N * loss_N + coef * kl_N)

with the weights of `reduction`. With `kl.importance_weight` a token's kl is multiplied by its own
ratio pi(t) / pi_old(t), gradient included, regardless of the ratio in the loss.
"""

from dataclasses import dataclass

import torch

from turnwise.config import AlgorithmConfig
from turnwise.training.algorithms.correction import correction_weights
from turnwise.training.algorithms.kl import kl_N
from turnwise.training.algorithms.loss import Loss
from turnwise.training.algorithms.ratio import importance_ratio
from turnwise.training.algorithms.reduction import token_weights
from turnwise.training.algorithms.registry import make_loss
from turnwise.training.tokens import TokenLoss, Tokens


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
    tokens: Tokens,
    *,
    total_tokens: int,
    total_trajectories: int,
    constant: int,
    loss: Loss | None = None,
) -> Objective:
    """Return the loss of a micro-batch.

    Args:
        total_tokens: Trained tokens of the whole batch.
        total_trajectories: Trajectories of the whole batch.
        constant: Length that `reduction: constant` divides by.
        loss: The loss built from `config.loss`; None builds it here.
    """
    loss = loss or make_loss(config.loss)
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
