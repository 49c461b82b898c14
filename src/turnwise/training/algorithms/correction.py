"""Corrections for the difference between the engine's policy, which sampled, and the trainer's.

The engine's code differs from the trainer's and, in asynchronous training, its weights are older.
`algorithm.correction` multiplies the loss of each token by a weight, which may be 0 where the
difference is too large to learn from. Independent of models and ranks.

To add a correction: write its formula here, and its name in `CorrectionConfig` of
`config/algorithm.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from turnwise.config.algorithm import CorrectionConfig
from turnwise.training.algorithms.interface import MAX_LOG_RATIO, Tokens

Outside = Literal["correction_below", "correction_above"]
"""Metrics: the shares of trained tokens whose ratio is below, and above, a correction's bounds."""
_BOUNDS = {"icepop": (0.5, 5.0), "geometric_mask": (0.99, 1.01)}
"""Default bounds, for the corrections whose bounds are not 0.5 and 2."""


@dataclass(frozen=True, slots=True)
class Correction:
    """A correction's result for the `N` trained tokens of a micro-batch, without gradient."""

    weights_N: torch.Tensor
    """Factor of each token's loss."""
    outside_N: Mapping[Outside, torch.Tensor] = field(default_factory=dict)
    """True at tokens whose ratio is below or above the bounds, so that their weight is truncated or
    0."""


def correct(tokens: Tokens, config: CorrectionConfig) -> Correction:
    """Return the weight of each token's loss, and the tokens that are outside of the bounds.

        w_t = pi_old(t) / pi_engine(t)        old: the trainer's policy before the step
        product of w, geometric mean of w:    over the tokens of the sequence

        token_tis       min(w_t, high)
        sequence_tis    min(product, high), for all tokens of the sequence
        geometric_tis   min(geometric mean, high), for all tokens of the sequence
        mask            1 where low <= w_t <= high, else 0
        token_mask      w_t where low <= w_t <= high, else 0
        icepop          token_mask, with the bounds of its paper
        sequence_mask   the product where it is within the bounds, else 0
        geometric_mask  1 where the geometric mean is within the bounds, else 0

    Sources: truncated importance sampling (TIS), Yao et al., "Your Efficient RL Framework Secretly
    Brings You Off-Policy RL Training" (2025), after Ionides (2008). Products of sequences, masked
    importance sampling (MIS: token_mask, sequence_mask) and the mask by the geometric mean
    (Geo-RS), whose bounds do not depend on a sequence's length: Liu et al., "When Speed Kills
    Stability: Demystifying RL Collapse from the Training-Inference Mismatch" (2025). IcePop: Ling
    team, "Every Step Evolves" (arXiv 2510.18855). Differences:

    - With `stale_only`, tokens of the weight version at the start of the step have weight 1 in all
      of its updates and are excluded from their sequence's product and mean.
    - A sequence consists of the trained tokens of one branch. Tokens shared with an earlier branch,
      and tokens that are too old to train, are context and are excluded from product and mean.
    - Masked tokens still count in the totals that a reduction divides by.
    - w_t is at most exp(20). The KL penalty is multiplied by the weight only with
      `kl.importance_weight`; a teacher's part of the loss is always multiplied by the weight.
    """
    log_weight_N = (tokens.old_logprobs_N - tokens.engine_logprobs_N).detach()
    if config.name == "none":
        return Correction(torch.ones_like(log_weight_N))
    exempt_N = (tokens.staleness_N == 0) & config.stale_only
    log_ratio_N = log_weight_N.masked_fill(exempt_N, 0.0)
    if config.name.startswith(("sequence", "geometric")):
        log_ratio_S = tokens.sums_S(log_ratio_N)
        if config.name.startswith("geometric"):
            log_ratio_S = log_ratio_S / tokens.sums_S((~exempt_N).to(log_ratio_N)).clamp(min=1)
        log_ratio_N = log_ratio_S[tokens.sequence_N]
    low, high = bounds_of(config)
    ratio_N = log_ratio_N.clamp(max=MAX_LOG_RATIO).exp()
    above_N = (ratio_N > high) & ~exempt_N
    if config.name.endswith("_tis"):
        weights_N = ratio_N.clamp(max=high).masked_fill(exempt_N, 1.0)
        return Correction(weights_N, {"correction_above": above_N})
    below_N = (ratio_N < low) & ~exempt_N
    kept_N = torch.ones_like(ratio_N) if config.name in ("mask", "geometric_mask") else ratio_N
    weights_N = kept_N.masked_fill(exempt_N, 1.0).masked_fill(below_N | above_N, 0.0)
    return Correction(weights_N, {"correction_below": below_N, "correction_above": above_N})


def bounds_of(config: CorrectionConfig) -> tuple[float, float]:
    """Return the smallest and the largest ratio of a correction."""
    low, high = _BOUNDS.get(config.name, (0.5, 2.0))
    return config.low or low, config.high or high
