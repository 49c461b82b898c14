"""What a micro-batch adds to the batch's loss: the configured parts put together.

    sum_N weight_N * (correction_N * loss_N + coef * kl_N)

with the weights of `reduction`. With `kl.importance_weight` a token's kl is multiplied by its own
ratio pi(t) / pi_old(t), gradient included, whatever ratio the loss has.
"""

from dataclasses import dataclass

import torch

from turnwise.config import AlgorithmConfig, Dpo
from turnwise.training.algorithms.correction import correction_weights
from turnwise.training.algorithms.kl import kl_N
from turnwise.training.algorithms.loss import token_loss
from turnwise.training.algorithms.ratio import importance_ratio
from turnwise.training.algorithms.reduction import token_weights
from turnwise.training.tokens import TokenLoss, Tokens


@dataclass(frozen=True, slots=True)
class Objective:
    """A micro-batch's part of the loss, and what it is made of."""

    loss: torch.Tensor
    """One number, with gradient: those of all micro-batches and ranks add up to the batch's."""
    result: TokenLoss
    correction_N: torch.Tensor
    divergence_N: torch.Tensor | None
    """From the reference model, without gradient; None without a KL penalty."""


def objective(
    config: AlgorithmConfig,
    tokens: Tokens,
    *,
    total_tokens: int,
    total_trajectories: int,
    constant: int,
) -> Objective:
    """The loss of a micro-batch; the totals are the whole batch's."""
    result = token_loss(config.loss, tokens)
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
        config.reduction if not isinstance(config.loss, Dpo) else "sequence_mean",
        tokens,
        total_tokens=total_tokens,
        total_trajectories=total_trajectories,
        constant=constant,
    )
    return Objective((weights_N * loss_N).sum(), result, correction_N, divergence_N)
