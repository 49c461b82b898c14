"""Input and output of a loss: per-token tensors over the trained tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class Tokens:
    """The `N` trained tokens of a micro-batch, of `S` sequences, in order."""

    logprobs_N: torch.Tensor
    """The policy's log-probs, with gradient."""
    old_logprobs_N: torch.Tensor
    """Log-probs that the ratio is taken against: the engine's or, with a correction, the trainer's
    own from before the step."""
    engine_logprobs_N: torch.Tensor
    """The engine's log-probs, recorded when the token was sampled."""
    advantages_N: torch.Tensor
    """Advantage of each token."""
    sequence_N: torch.Tensor
    """Index of the token's sequence among the `S`; long, non-decreasing."""
    sequences: int
    """Number of sequences, S."""
    trajectory_tokens_N: torch.Tensor
    """Trained tokens of the trajectory that a token belongs to: of all its sequences, in whatever
    micro-batch they are."""
    staleness_N: torch.Tensor
    """The trainer's version at the step's start minus the token's; long."""
    reference_logprobs_N: torch.Tensor | None = None
    """The reference model's log-probs; None where neither a KL penalty nor the loss needs them."""

    def sums_S(self, values_N: torch.Tensor) -> torch.Tensor:
        """Return the sum over each sequence's tokens: [S]."""
        return values_N.new_zeros(self.sequences).index_add(0, self.sequence_N, values_N)

    def means_S(self, values_N: torch.Tensor) -> torch.Tensor:
        """Return the mean over each sequence's tokens; 0 for a sequence without any: [S]."""
        counts_S = self.sums_S(torch.ones_like(values_N))
        return self.sums_S(values_N) / counts_S.clamp(min=1)


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A loss's result: per-token values over the `N` trained tokens; all but the loss without
    gradient."""

    loss_N: torch.Tensor
    """Before any reduction: the batch's loss is a weighted sum of these."""
    ratio_N: torch.Tensor
    """The importance ratio that the loss used."""
    clipped_N: torch.Tensor
    """1 where the clip removed the gradient (or, in CISPO, bounded the weight)."""
    metrics_N: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Further values, by name; metrics.jsonl has their means under `loss_metrics`."""
