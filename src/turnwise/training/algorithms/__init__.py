"""Training algorithms: pure functions and small classes on numbers and tensors, a formula each.

    interface    `Advantage` and `Loss`, which a user's own class extends, and a loss's input
    advantages   from rewards to advantages
    losses       from log-probs and advantages to the loss of each token; with KL penalty,
                 correction and reduction to the batch's
    registry     the names in the configuration

In the configuration, `algorithm.advantage` selects an `Advantage` and `algorithm.loss` a `Loss`,
each by a short name or as `package.module:Class`; everything else works with any of them.
Independent of models, engines and ranks.
"""

from turnwise.training.algorithms.interface import Advantage, Loss, TokenLoss, Tokens, ValueModel
from turnwise.training.algorithms.registry import (
    Algorithm,
    make_advantage,
    make_algorithm,
    make_loss,
)

__all__ = [
    "Advantage",
    "Algorithm",
    "Loss",
    "TokenLoss",
    "Tokens",
    "ValueModel",
    "make_advantage",
    "make_algorithm",
    "make_loss",
]
