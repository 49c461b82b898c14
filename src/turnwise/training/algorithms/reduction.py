"""Weights that reduce per-token losses to the batch's loss.

    loss of the batch = sum over micro-batches and ranks of sum_N(weight_N * loss_N)

    token_mean:     1 / tokens of the batch                         (DAPO, arXiv 2503.14476, eq. 8)
    sequence_mean:  1 / (tokens of the trajectory * trajectories)   (GRPO, arXiv 2402.03300, eq. 3)
    constant:       1 / (trajectories * constant)                   (Dr. GRPO, arXiv 2503.20783)

An output in the papers is a whole trajectory here: its branches share one weight, regardless of
their number. The totals are over the whole batch and include trajectories with advantage 0, but not
trajectories without trained tokens.
"""

from typing import Literal

import torch

from turnwise.training.tokens import Tokens


def token_weights(
    reduction: Literal["token_mean", "sequence_mean", "constant"],
    tokens: Tokens,
    *,
    total_tokens: int,
    total_trajectories: int,
    constant: int,
) -> torch.Tensor:
    """Return the weight of each token of a micro-batch: [N]."""
    ones_N = torch.ones_like(tokens.logprobs_N, requires_grad=False)
    match reduction:
        case "token_mean":
            return ones_N / total_tokens
        case "sequence_mean":
            return ones_N / (tokens.trajectory_tokens_N * total_trajectories)
        case "constant":
            return ones_N / (total_trajectories * constant)
