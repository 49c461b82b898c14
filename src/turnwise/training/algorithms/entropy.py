"""The policy's entropy in the loss: a bonus, whose weight may adapt, and a filter of tokens.

Independent of models and ranks.
"""

import math

import numpy as np
import torch

from turnwise.config.algorithm import EntropyConfig


def mean_part(
    entropy_N: torch.Tensor, low_N: torch.Tensor | None, total_tokens: int
) -> torch.Tensor:
    """Return a micro-batch's part of an update's mean entropy in nats; the parts of all
    micro-batches and ranks add up to the mean. Tokens where `low_N` is True are left out;
    `total_tokens` is the number of all other tokens in the update."""
    if low_N is not None:
        entropy_N = entropy_N.masked_fill(low_N, 0.0)
    return entropy_N.sum() / max(1, total_tokens)


class EntropyControl:
    """The weight of the entropy bonus, which may adapt after each update.

        loss = policy loss - coef * H           H: mean entropy of the update's trained tokens

        adaptive, after update k:  coef = min(coef + coef_delta, coef_max)   if H_k <= target
                                   coef = max(coef - coef_delta, coef_min)   otherwise
        update k has the bonus only if H_{k-1} <= target, and the first one has none

    The bonus: Williams and Peng, "Function Optimization Using Connectionist Reinforcement Learning
    Algorithms" (1991), and PPO (arXiv 1707.06347), eq. 9. Adaptive: He et al., "Skywork Open
    Reasoner 1" (arXiv 2505.22312). The entropy is exact, over the whole vocabulary as it is sampled
    from, and its mean is over the tokens of the update that `top_quantile` keeps, regardless of
    `algorithm.reduction`. Difference: an update that is skipped does not adapt the weight.
    """

    def __init__(self, entropy: EntropyConfig) -> None:
        self._entropy = entropy
        self.coef = entropy.coef
        """Weight of the bonus, as it was set after the last update."""
        self._last = math.inf

    @property
    def applied(self) -> float:
        """The weight of the bonus in the next update; 0 if the update has no bonus."""
        waits = self._entropy.adaptive and self._last > self._entropy.target
        return 0.0 if waits else self.coef

    def adapt(self, mean: float) -> None:
        """Change the weight, if it is adaptive, after an update with this mean entropy in nats."""
        entropy, self._last = self._entropy, mean
        if entropy.adaptive and mean <= entropy.target:
            self.coef = min(self.coef + entropy.coef_delta, entropy.coef_max)
        elif entropy.adaptive:
            self.coef = max(self.coef - entropy.coef_delta, entropy.coef_min)

    @property
    def state(self) -> dict[str, float]:
        return {"coef": self.coef, "last": self._last}

    def resume(self, state: dict[str, float]) -> None:
        """Go on from a checkpoint's `state`, if the weight is adaptive."""
        if self._entropy.adaptive and state:
            self.coef, self._last = state["coef"], state["last"]


def entropy_floor(entropies: torch.Tensor, top_quantile: float) -> float:
    """Return the minimum entropy of tokens to train: the 1 - top_quantile quantile of an update's.

    Tokens of high entropy are the forks of an argument, and suffice to learn from: Wang et al.,
    "Beyond the 80/20 Rule" (arXiv 2506.01939), with the value 0.2. The quantile interpolates
    linearly between two entropies, as in TRL. Difference: the quantile is over all trained tokens
    of an optimizer step, under the weights before the step; TRL's quantile is over one micro-batch.
    Tokens below the minimum count in the totals that a reduction divides by, and have the KL
    penalty.
    """
    if not len(entropies):
        return math.inf
    return float(np.quantile(entropies.float().cpu().numpy(), 1 - top_quantile))
