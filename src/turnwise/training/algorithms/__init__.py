"""Training algorithms as pure functions and small classes on numbers and tensors, with formulas.

`algorithm.advantage` selects an `Advantage` and `algorithm.loss` selects a `Loss`, each by a short
name or as `package.module:Class`; everything else works with any combination. To add a short name,
write a class or a formula in `advantages` or `losses`, a line here, and a section in the
configuration. A user-defined class needs no such change. Independent of models, engines and ranks.

To add an advantage or a loss: write a class in this folder and its section in
`config/algorithm.py`, and register it here; or name it as `package.module:Class`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from pydantic import ValidationError

from turnwise.config import AlgorithmConfig, OwnAdvantage, OwnLoss
from turnwise.config.algorithm import CrossEntropy, NoAdvantage
from turnwise.core.optional import load_object
from turnwise.errors import InputError, describe_error
from turnwise.training.algorithms import advantages, losses
from turnwise.training.algorithms.interface import Advantage, Loss, TokenLoss, Tokens, ValueModel

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
    "weighted_logprobs",
    "with_loss",
]

_ADVANTAGES: dict[str, Callable[..., Advantage]] = {
    "grpo": lambda config: (
        advantages.BatchScaled()
        if config.scale == "batch"
        else advantages.WithinGroup(advantages.grpo)
    ),
    "dr_grpo": lambda _: advantages.WithinGroup(advantages.dr_grpo),
    "rloo": lambda _: advantages.WithinGroup(advantages.rloo),
    "reinforce_pp": advantages.ReinforcePPAdvantage,
    "gdpo": lambda _: advantages.GdpoAdvantage(),
    "turn_returns": lambda config: advantages.PerTurn(partial(advantages.returns_of_turns, config)),
    "mt_grpo": lambda config: advantages.PerTurn(partial(advantages.mt_grpo, config)),
    "gae": advantages.GaeAdvantage,
    "none": lambda _: advantages.ZeroAdvantage(),
}
"""Functions that make an advantage estimator from its section, by the estimator's short name."""
_LOSSES: dict[str, Callable[..., Loss]] = {
    "ppo_clip": lambda config: losses.Formula(partial(losses.ppo_clip, config)),
    "gspo": lambda config: losses.Formula(partial(losses.gspo, config)),
    "cispo": lambda config: losses.Formula(partial(losses.cispo, config)),
    "sapo": lambda config: losses.Formula(partial(losses.sapo, config)),
    "vespo": losses.VespoLoss,
    "dppo": lambda config: losses.Formula(partial(losses.dppo, config)),
    "dpo": losses.DpoLoss,
    "cross_entropy": lambda _: losses.CrossEntropyLoss(),
}
"""Functions that make a loss from its section, by the loss's short name."""
_Kind = TypeVar("_Kind", Advantage, Loss)


class _Section(Protocol):
    """A section of the configuration."""

    @property
    def name(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Algorithm:
    """The two parts of an algorithm that are selected by name."""

    advantage: Advantage
    loss: Loss


def make_algorithm(config: AlgorithmConfig) -> Algorithm:
    """Build the advantage estimator and the loss selected in the configuration.

    Raises:
        InputError: when a user-defined class cannot be imported or built, or the parts of the
            algorithm are incompatible.
    """
    advantage, loss = make_advantage(config.advantage), make_loss(config.loss)
    if config.kl.sync_steps and not (config.kl.coef or loss.needs_reference):
        raise InputError(
            "algorithm.kl.sync_steps moves a reference model that nothing uses: set "
            "algorithm.kl.coef above 0"
        )
    estimator = f"algorithm.advantage {config.advantage.name}"
    leaves_out = {
        "mask_truncated": config.mask_truncated,
        "off_policy_mask_threshold": config.off_policy_mask_threshold is not None,
        "entropy.top_quantile": config.entropy.top_quantile < 1,
    }
    conflicts = {
        f"cannot use the value model of {estimator}": advantage.needs_values,
        f"cannot use the turns' advantages of {estimator}": advantage.per_turn,
        "has no importance ratio that algorithm.correction could correct: set its name to none": (
            config.correction.name != "none"
        ),
        **{f"needs all of their tokens: remove algorithm.{k}": v for k, v in leaves_out.items()},
    }
    for conflict, found in conflicts.items():
        if found and loss.needs_pairs:
            name = config.loss.name
            raise InputError(f"algorithm.loss {name} compares trajectories and {conflict}")
    return Algorithm(advantage, loss)


def make_advantage(config: _Section) -> Advantage:
    """Build the advantage estimator of a section; raise `InputError` as `make_algorithm` does."""
    return _made(config, "algorithm.advantage", Advantage, _ADVANTAGES)


def make_loss(config: _Section) -> Loss:
    """Build the loss of a section; raise `InputError` as `make_algorithm` does."""
    return _made(config, "algorithm.loss", Loss, _LOSSES)


def with_loss(
    config: AlgorithmConfig, given: object, reduction: str | None = None
) -> tuple[AlgorithmConfig, Loss | None]:
    """Return the algorithm with its loss replaced, and the new loss, or None if nothing changes.

    Args:
        given: Name of a loss, or a mapping of its name and settings; a path, package.module:name;
            a `Loss`, its class, or a function of `Tokens`; None keeps the configured loss.
        reduction: A value of `algorithm.reduction`; None keeps the configured reduction.

    Raises:
        InputError: when `given` is not a loss, or does not fit the rest of the algorithm.
    """
    made: Loss | None = None
    changes: dict[str, object] = {} if reduction is None else {"reduction": reduction}
    if isinstance(given, str) and ":" in given:
        given = load_object(given, "loss")
    if isinstance(given, str):
        given = {"name": given}
    if isinstance(given, Mapping):
        changes["loss"] = dict(given)
    elif isinstance(given, type) and issubclass(given, Loss):
        made = given()
    elif isinstance(given, Loss):
        made = given
    elif callable(given):
        made = losses.FunctionLoss(given)
    elif given is not None:
        raise InputError(f"loss: {given!r} is neither the name of a loss nor a function of tokens")
    try:
        config = AlgorithmConfig.model_validate(config.model_dump() | changes)
    except ValidationError as error:
        first = error.errors()[0]
        names = f", but one of {', '.join(_LOSSES)}" if first["loc"] == ("loss",) else ""
        place = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{place} is not {given or reduction!r}{names}: {first['msg']}") from error
    return config, made or (make_algorithm(config).loss if changes else None)


def weighted_logprobs(config: AlgorithmConfig) -> AlgorithmConfig:
    """Return an algorithm whose loss is the sum of -advantage * log-prob over all tokens."""
    plain = AlgorithmConfig(advantage=NoAdvantage(), loss=CrossEntropy(), reduction="sum")
    return plain.model_copy(update={"kl": config.kl.model_copy(update={"coef": 0.0})})


def _made(
    config: _Section, key: str, kind: type[_Kind], known: Mapping[str, Callable[..., _Kind]]
) -> _Kind:
    name = config.name
    if not isinstance(config, OwnAdvantage | OwnLoss):
        return known[name](config)
    options = config.model_extra or {}
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
