"""The base class of losses, which map per-token tensors to per-token losses.

`registry.LOSSES` lists those with a short name. Independent of models and ranks.
"""

from typing import ClassVar

import torch

from turnwise.training.algorithms.ratio import importance_ratio
from turnwise.training.tokens import TokenLoss, Tokens


class Loss:
    """Base class of losses.

    Your own class defines `__call__`. Select it in the configuration with
    `algorithm.loss.name: package.module:Class`; all keys except `name` are passed to its
    constructor.

    Example:
        class Reinforce(Loss):
            def __init__(self, scale: float = 1.0) -> None:
                self.scale = scale

            def __call__(self, tokens: Tokens) -> TokenLoss:
                loss_N = -self.scale * tokens.advantages_N * tokens.logprobs_N
                return self.unclipped(tokens, loss_N, surprise=-tokens.logprobs_N)
    """

    needs_reference: ClassVar[bool] = False
    """Whether it needs `Tokens.reference_logprobs_N`, regardless of `algorithm.kl`."""
    needs_pairs: ClassVar[bool] = False
    """Whether it compares the best trajectory of each group with the worst. Sequence 2i of its
    tokens is then chosen and 2i + 1 rejected, advantages are not used, and the batch's loss is the
    mean over pairs (`sequence_mean`)."""

    def __call__(self, tokens: Tokens) -> TokenLoss:
        """Return the losses of the `N` trained tokens of a micro-batch, before any reduction."""
        raise NotImplementedError(f"{type(self).__name__} defines no __call__")

    @staticmethod
    def unclipped(tokens: Tokens, loss_N: torch.Tensor, **metrics_N: torch.Tensor) -> TokenLoss:
        """Return the result of a loss without clipping; its ratio is pi(t) / pi_old(t).

        Args:
            metrics_N: Further values by name; see `TokenLoss.metrics_N`.
        """
        return TokenLoss(
            loss_N,
            importance_ratio((tokens.logprobs_N - tokens.old_logprobs_N).detach()),
            torch.zeros_like(tokens.sequence_N, dtype=torch.bool),
            {name: value_N.detach() for name, value_N in metrics_N.items()},
        )
