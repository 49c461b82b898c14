"""The importance ratio, exp(logprob - old logprob), kept finite.

Log ratios are clamped to +-20 first, so that neither a ratio (at most 5e8) nor a product with it
overflows: inf * 0 would make the whole batch's gradient NaN. Beyond the bound, where a ratio
indicates a fault rather than a change of the policy, `importance_ratio` has no gradient.
"""

import torch

MAX_LOG_RATIO = 20.0


def importance_ratio(log_ratio_N: torch.Tensor) -> torch.Tensor:
    """Return exp(log ratio), with the log ratio clamped to +-20: [N]."""
    return log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
