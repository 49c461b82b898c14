"""Masks of tokens over tables of padded completions, as methods of TRL's trainer compute them.

The trainer of a run needs no tables: `algorithm.entropy.top_quantile` and
`algorithm.off_policy_mask_threshold` are these masks over the trained tokens of an update.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class TokenMasks:
    """Methods of TRL's `GRPOTrainer`, for scripts that call them."""

    def get_high_entropy_mask(
        self, entropies: "torch.Tensor", mask: "torch.Tensor", threshold: float
    ) -> "torch.Tensor":
        """Return where tokens, 1 in the mask, have an entropy of at least the quantile: [B, T]."""
        from turnwise.training.algorithms.entropy import entropy_floor  # imports torch

        real_BT = mask.bool()
        return (entropies >= entropy_floor(entropies[real_BT], 1 - threshold)) & real_BT

    @staticmethod
    def get_off_policy_mask(
        advantages: "torch.Tensor",
        per_token_logps: "torch.Tensor",
        sampling_per_token_logps: "torch.Tensor",
        mask: "torch.Tensor",
        off_policy_threshold: float,
    ) -> "torch.Tensor":
        """Return 1 for sequences that are trained and 0 for others: [B, 1], by the formula of
        `training.algorithms.losses.far_off_policy`."""
        drift_BT = (sampling_per_token_logps - per_token_logps.detach()).nan_to_num(nan=0.0)
        counts_B1 = mask.sum(dim=1, keepdim=True).clamp(min=1.0)
        drift_B1 = (drift_BT * mask).sum(dim=1, keepdim=True) / counts_B1
        kept = (advantages >= 0) | (drift_B1 <= off_policy_threshold)
        return kept.to(mask.dtype)
