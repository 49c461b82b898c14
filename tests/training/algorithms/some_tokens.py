"""Micro-batches for tests: random tokens in float64, or exactly those that a test names."""

from collections.abc import Sequence
from typing import Any

import torch

from turnwise.training.algorithms import TokenLoss, Tokens, make_advantage, make_loss


def some_tokens(lengths: Sequence[int], *, seed: int = 0, spread: float = 0.3) -> Tokens:
    """Sequences of these lengths, each a trajectory; log ratios and advantages are normal,
    staleness is 0 or 1."""
    count = sum(lengths)
    random = torch.Generator().manual_seed(seed)

    def normal() -> torch.Tensor:
        return torch.randn(count, generator=random, dtype=torch.float64)

    logprobs_N = -normal().abs()
    return Tokens(
        logprobs_N=logprobs_N.clone().requires_grad_(),
        old_logprobs_N=logprobs_N - spread * normal(),
        engine_logprobs_N=logprobs_N - spread * normal(),
        advantages_N=normal(),
        sequence_N=torch.tensor([i for i, n in enumerate(lengths) for _ in range(n)]).long(),
        sequences=len(lengths),
        trajectory_tokens_N=torch.tensor([n for n in lengths for _ in range(n)]).double(),
        staleness_N=torch.randint(2, (count,), generator=random),
        reference_logprobs_N=logprobs_N - normal(),
    )


def tokens_of(
    log_ratios: Sequence[Sequence[float]], advantages: Sequence[Sequence[float]]
) -> Tokens:
    """One inner list for each sequence; old, engine's and reference log-probs are -1."""
    log_ratio_N = torch.tensor([r for rows in log_ratios for r in rows], dtype=torch.float64)
    sequence = [i for i, rows in enumerate(log_ratios) for _ in rows]
    minus_one_N = torch.full_like(log_ratio_N, -1.0)
    return Tokens(
        logprobs_N=(log_ratio_N - 1).requires_grad_(),
        old_logprobs_N=minus_one_N,
        engine_logprobs_N=minus_one_N,
        advantages_N=torch.tensor([a for rows in advantages for a in rows], dtype=torch.float64),
        sequence_N=torch.tensor(sequence, dtype=torch.long),
        sequences=len(log_ratios),
        trajectory_tokens_N=torch.tensor(
            [len(rows) for rows in log_ratios for _ in rows], dtype=torch.float64
        ),
        staleness_N=torch.zeros(len(sequence), dtype=torch.long),
        reference_logprobs_N=minus_one_N,
    )


def gradient_N(loss: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """d loss / d logprob of each token."""
    (gradient,) = torch.autograd.grad(loss, tokens.logprobs_N)
    return gradient


def group_advantages(config: Any, rewards: Sequence[Sequence[float]]) -> list[list[float] | None]:
    """The advantages of one step's groups."""
    return make_advantage(config).of_groups(rewards)


def token_loss(config: Any, tokens: Tokens) -> TokenLoss:
    """The losses of a micro-batch's tokens."""
    return make_loss(config)(tokens)
