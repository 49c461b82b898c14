"""Methods of TRL's `GRPOTrainer` that compute masks over tables of padded completions.

The trainer of a run needs no tables: `algorithm.entropy.top_quantile` and
`algorithm.off_policy_mask_threshold` are these masks over the trained tokens of an update.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class TokenMasks:
    """Masks of tokens, for scripts that call them."""

    def get_high_entropy_mask(
        self, entropies: "Tensor", mask: "Tensor", threshold: float
    ) -> "Tensor":
        """Return where tokens, 1 in the mask, have an entropy of at least the quantile: [B, T]."""
        from turnwise.training.algorithms.entropy import entropy_floor  # imports torch

        real_BT = mask.bool()
        return (entropies >= entropy_floor(entropies[real_BT], 1 - threshold)) & real_BT

    @staticmethod
    def get_off_policy_mask(
        advantages: "Tensor",
        per_token_logps: "Tensor",
        sampling_per_token_logps: "Tensor",
        mask: "Tensor",
        off_policy_threshold: float,
    ) -> "Tensor":
        """Return 1 for sequences that are trained and 0 for others: [B, 1]."""
        drift_BT = (sampling_per_token_logps - per_token_logps.detach()).nan_to_num(nan=0.0)
        drift_B1 = (drift_BT * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1.0)
        return ((advantages >= 0) | (drift_B1 <= off_policy_threshold)).to(mask.dtype)
