"""Importance weights for the mismatch between the engine's policy and the trainer's.

    w_t = pi_old(t) / pi_engine(t)        old: the trainer's policy before the step
    token_tis:     min(w_t, high)
    sequence_tis:  min(product of w over the sequence, high), for all its tokens
    mask:          1 where low <= w_t <= high, else 0

Truncated importance sampling: Yao et al., "Your Efficient RL Framework Secretly Brings You
Off-Policy RL Training" (2025), after Ionides (2008). Differences:

- With `stale_only`, tokens of the weight version at the start of the step have weight 1 in all of
  its updates and are excluded from their sequence's product.
- A sequence is the trained tokens of one branch. Tokens shared with an earlier branch, and tokens
  that are too old to train, are context and excluded from the product.
- `mask` drops each token whose own weight is outside the band, and gives those inside weight 1.
  IcePop (Ling team, "Every Step Evolves", arXiv 2510.18855) and TRL's mask modes keep the weight of
  those inside. Masked tokens still count in the totals that a reduction divides by.
- The KL penalty is not multiplied by the weight.
"""

import torch

from turnwise.config import CorrectionConfig
from turnwise.training.tokens import Tokens


def correction_weights(tokens: Tokens, config: CorrectionConfig) -> torch.Tensor:
    """Return the factor of each token's loss: [N], without gradient."""
    log_weight_N = (tokens.old_logprobs_N - tokens.engine_logprobs_N).detach()
    if config.name == "none":
        return torch.ones_like(log_weight_N)
    exempt_N = (tokens.staleness_N == 0) & config.stale_only
    log_weight_N = log_weight_N.masked_fill(exempt_N, 0.0)
    if config.name == "sequence_tis":
        log_weight_N = tokens.sums_S(log_weight_N)[tokens.sequence_N]
    weight_N = log_weight_N.exp()
    if config.name == "mask":
        weight_N = ((config.low <= weight_N) & (weight_N <= config.high)).to(weight_N.dtype)
    else:
        weight_N = weight_N.clamp(max=config.high)
    return weight_N.masked_fill(exempt_N, 1.0)
