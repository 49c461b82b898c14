"""Training algorithms, one short file each: pure functions on numbers and tensors.

In the configuration, `algorithm.advantage` selects an `Advantage` and `algorithm.loss` a `Loss`,
each by a short name from `registry` or as `package.module:Class`; everything else works with any of
them. `objective` computes a micro-batch's loss. Independent of models, engines and ranks.
"""

from turnwise.training.algorithms.advantage import Advantage, ValueModel
from turnwise.training.algorithms.correction import correction_weights
from turnwise.training.algorithms.dapo import has_signal, overlong_penalty
from turnwise.training.algorithms.dpo import choose_pairs
from turnwise.training.algorithms.gae import gae, moments, normalised, value_loss
from turnwise.training.algorithms.kl import kl_N, reward_penalty
from turnwise.training.algorithms.loss import Loss
from turnwise.training.algorithms.reduction import token_weights
from turnwise.training.algorithms.registry import (
    ADVANTAGES,
    LOSSES,
    Algorithm,
    group_advantages,
    make_advantage,
    make_algorithm,
    make_loss,
    token_loss,
)
from turnwise.training.algorithms.total_loss import Objective, objective
from turnwise.training.tokens import TokenLoss, Tokens

__all__ = [
    "ADVANTAGES",
    "LOSSES",
    "Advantage",
    "Algorithm",
    "Loss",
    "Objective",
    "TokenLoss",
    "Tokens",
    "ValueModel",
    "choose_pairs",
    "correction_weights",
    "gae",
    "group_advantages",
    "has_signal",
    "kl_N",
    "make_advantage",
    "make_algorithm",
    "make_loss",
    "moments",
    "normalised",
    "objective",
    "overlong_penalty",
    "reward_penalty",
    "token_loss",
    "token_weights",
    "value_loss",
]
