"""From per-token losses to the batch's: how much each token counts.

    loss of the batch = sum over micro-batches and ranks of sum_N(weight_N * loss_N)

    token_mean:     1 / tokens of the batch                         (DAPO, arXiv 2503.14476, eq. 8)
    sequence_mean:  1 / (tokens of the sequence * sequences)        (GRPO, arXiv 2402.03300, eq. 3)
    constant:       1 / (sequences * constant)                      (Dr. GRPO, arXiv 2503.20783)

The totals are the whole batch's; a sequence without trained tokens is none of its sequences.
"""

from typing import Literal

import torch

from turnwise.training.tokens import Tokens


def token_weights(
    reduction: Literal["token_mean", "sequence_mean", "constant"],
    tokens: Tokens,
    *,
    total_tokens: int,
    total_sequences: int,
    constant: int,
) -> torch.Tensor:
    """The weight of each token of a micro-batch that holds its sequences whole: [N]."""
    ones_N = torch.ones_like(tokens.logprobs_N, requires_grad=False)
    match reduction:
        case "token_mean":
            return ones_N / total_tokens
        case "sequence_mean":
            return ones_N / (tokens.sums_S(ones_N)[tokens.sequence_N] * total_sequences)
        case "constant":
            return ones_N / (total_sequences * constant)
