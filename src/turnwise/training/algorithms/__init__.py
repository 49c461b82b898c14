"""Training algorithms, one short file each: pure functions on numbers and tensors.

`algorithm.advantage` of the configuration chooses among `group_advantages`, `algorithm.loss` among
`token_loss`; everything else applies whatever these two are. `objective` puts a micro-batch's loss
together. Knows no models, engines or ranks.
"""

from turnwise.training.algorithms.advantage import group_advantages
from turnwise.training.algorithms.correction import correction_weights
from turnwise.training.algorithms.dapo import has_signal, overlong_penalty
from turnwise.training.algorithms.dpo import choose_pairs
from turnwise.training.algorithms.gae import gae, moments, normalised, value_loss
from turnwise.training.algorithms.kl import kl_N, reward_penalty
from turnwise.training.algorithms.loss import token_loss
from turnwise.training.algorithms.objective import Objective, objective
from turnwise.training.algorithms.reduction import token_weights

__all__ = [
    "Objective",
    "choose_pairs",
    "correction_weights",
    "gae",
    "group_advantages",
    "has_signal",
    "kl_N",
    "moments",
    "normalised",
    "objective",
    "overlong_penalty",
    "reward_penalty",
    "token_loss",
    "token_weights",
    "value_loss",
]
