"""The algorithms by name: one dictionary of advantage estimators, one of losses.

A new algorithm takes a short file next to this one, a line here, and a section in the
configuration. A user-defined one, given as `package.module:Class`, needs none of these.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from turnwise.config import (
    AlgorithmConfig,
    Cispo,
    Dpo,
    DrGrpo,
    Gae,
    Grpo,
    Gspo,
    MtGrpo,
    OwnAdvantage,
    OwnLoss,
    PpoClip,
    ReinforcePP,
    Rloo,
    TurnReturns,
)
from turnwise.errors import InputError, describe_error
from turnwise.training.algorithms.advantage import Advantage
from turnwise.training.algorithms.cispo import CispoLoss
from turnwise.training.algorithms.dpo import DpoLoss
from turnwise.training.algorithms.dr_grpo import DrGrpoAdvantage
from turnwise.training.algorithms.gae import GaeAdvantage
from turnwise.training.algorithms.grpo import GrpoAdvantage
from turnwise.training.algorithms.gspo import GspoLoss
from turnwise.training.algorithms.loss import Loss
from turnwise.training.algorithms.mt_grpo import MtGrpoAdvantage
from turnwise.training.algorithms.ppo_clip import PpoClipLoss
from turnwise.training.algorithms.reinforce_pp import ReinforcePPAdvantage
from turnwise.training.algorithms.rloo import RlooAdvantage
from turnwise.training.algorithms.turn_returns import TurnReturnsAdvantage
from turnwise.training.tokens import TokenLoss, Tokens

ADVANTAGES: dict[str, Callable[..., Advantage]] = {
    "grpo": GrpoAdvantage,
    "dr_grpo": DrGrpoAdvantage,
    "rloo": RlooAdvantage,
    "reinforce_pp": ReinforcePPAdvantage,
    "turn_returns": TurnReturnsAdvantage,
    "mt_grpo": MtGrpoAdvantage,
    "gae": GaeAdvantage,
}
"""Classes behind the short names of `algorithm.advantage.name`; each takes its section."""
LOSSES: dict[str, Callable[..., Loss]] = {
    "ppo_clip": PpoClipLoss,
    "gspo": GspoLoss,
    "cispo": CispoLoss,
    "dpo": DpoLoss,
}
"""Classes behind the short names of `algorithm.loss.name`; each takes its section."""

AdvantageConfig = Grpo | DrGrpo | Rloo | ReinforcePP | TurnReturns | MtGrpo | Gae | OwnAdvantage
LossConfig = PpoClip | Gspo | Cispo | Dpo | OwnLoss
_Kind = TypeVar("_Kind", Advantage, Loss)


@dataclass(frozen=True, slots=True)
class Algorithm:
    """The two parts of an algorithm that are selected by name."""

    advantage: Advantage
    loss: Loss


def make_algorithm(config: AlgorithmConfig) -> Algorithm:
    """Build the advantage estimator and the loss selected in the configuration.

    Raises:
        InputError: when a user-defined class cannot be imported or built, or the two parts and
            `algorithm.correction` are incompatible.
    """
    advantage, loss = make_advantage(config.advantage), make_loss(config.loss)
    if loss.needs_pairs and advantage.needs_values:
        raise InputError(
            f"algorithm.loss {config.loss.name} compares trajectories and cannot use the "
            f"value model of algorithm.advantage {config.advantage.name}"
        )
    if loss.needs_pairs and advantage.per_turn:
        raise InputError(
            f"algorithm.loss {config.loss.name} compares trajectories and cannot use the turns' "
            f"advantages of algorithm.advantage {config.advantage.name}"
        )
    if loss.needs_pairs and config.correction.name != "none":
        raise InputError(
            f"algorithm.loss {config.loss.name} compares trajectories and has no importance ratio "
            "that algorithm.correction could correct: set its name to none"
        )
    return Algorithm(advantage, loss)


def make_advantage(config: AdvantageConfig) -> Advantage:
    """Build the advantage estimator of a section; raises `InputError` as `make_algorithm` does."""
    if isinstance(config, OwnAdvantage):
        options = config.model_extra or {}
        return _own(config.name, options, "algorithm.advantage", Advantage)
    return ADVANTAGES[config.name](config)


def make_loss(config: LossConfig) -> Loss:
    """Build the loss of a section; raises `InputError` as `make_algorithm` does."""
    if isinstance(config, OwnLoss):
        return _own(config.name, config.model_extra or {}, "algorithm.loss", Loss)
    return LOSSES[config.name](config)


def _own(name: str, options: dict[str, object], key: str, kind: type[_Kind]) -> _Kind:
    """Build an instance of a user-defined class."""
    from turnwise.rollouts.environment import load_object

    made = load_object(name, f"{key}.name")
    if not (isinstance(made, type) and issubclass(made, kind)):
        raise InputError(
            f"{key}.name: {name} is not a subclass of turnwise.training.algorithms.{kind.__name__}"
        )
    try:
        return made(**options)
    except Exception as error:  # the user's code may raise anything
        given = ", ".join(f"{option}={value!r}" for option, value in options.items())
        raise InputError(
            f"{key}: {name}({given}) cannot be built: {describe_error(error)}"
        ) from error


def group_advantages(
    config: AdvantageConfig, rewards: Sequence[Sequence[float]]
) -> list[list[float] | None]:
    """Return the advantages of one step's groups; see `Advantage.of_groups`."""
    return make_advantage(config).of_groups(rewards)


def token_loss(config: LossConfig, tokens: Tokens) -> TokenLoss:
    """Return the losses of a micro-batch's tokens; see `Loss`."""
    return make_loss(config)(tokens)
