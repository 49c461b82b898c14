"""What algorithms see: per-token tensors over the trained tokens, and what they give back."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Tokens:
    """The `N` trained tokens of a micro-batch, of `S` sequences, in order."""

    logprobs_N: torch.Tensor
    """The policy's, with gradient."""
    old_logprobs_N: torch.Tensor
    """What the ratio is taken against: the engine's or, where a correction is asked for, the
    trainer's own from before the step."""
    engine_logprobs_N: torch.Tensor
    """Recorded when the token was sampled."""
    advantages_N: torch.Tensor
    sequence_N: torch.Tensor
    """Which of the `S` sequences a token belongs to; long, never falling."""
    sequences: int
    """S."""
    trajectory_tokens_N: torch.Tensor
    """Trained tokens of the trajectory that a token belongs to: of all its sequences, in whatever
    micro-batch they are."""
    staleness_N: torch.Tensor
    """The trainer's version at the step's start minus the token's; long."""
    reference_logprobs_N: torch.Tensor | None = None
    """The starting model's, where a KL penalty or DPO needs them."""

    def sums_S(self, values_N: torch.Tensor) -> torch.Tensor:
        """The sum over each sequence's tokens: [S]."""
        return values_N.new_zeros(self.sequences).index_add(0, self.sequence_N, values_N)

    def means_S(self, values_N: torch.Tensor) -> torch.Tensor:
        """The mean over each sequence's tokens; 0 of a sequence without any: [S]."""
        counts_S = self.sums_S(torch.ones_like(values_N))
        return self.sums_S(values_N) / counts_S.clamp(min=1)


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Per-token values over the `N` trained tokens; all but the loss without gradient."""

    loss_N: torch.Tensor
    """Before any reduction: the batch's loss is a weighted sum of these."""
    ratio_N: torch.Tensor
    """The importance ratio that the loss used."""
    clipped_N: torch.Tensor
    """1 where the clip took the gradient away (or, in CISPO, bounded the weight)."""
