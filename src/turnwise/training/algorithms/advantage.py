"""The base class of advantage estimators, which turn rewards into advantages of tokens.

`registry.ADVANTAGES` lists those with a short name. Independent of trajectories, models and ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from turnwise.config import OtherModel


@dataclass(frozen=True, slots=True)
class ValueModel:
    """The value model that an estimator requires the trainer to hold and train."""

    model: OtherModel
    """Model to start from."""
    learning_rate: float
    """AdamW's learning rate after warm-up."""
    warmup_steps: int = 0
    """Number of initial training steps that train only the value model."""


class Advantage:
    """Base class of advantage estimators.

    Your own class overrides `of_group`, or `of_groups` if advantages depend on the whole step; or,
    with `per_turn`, `of_turns`; with a value model, also `of_tokens` and `value_loss`. Select it in
    the configuration with `algorithm.advantage.name: package.module:Class`; all keys except `name`
    are passed to its constructor.

    Example:
        class Best(Advantage):
            def __init__(self, bonus: float = 1.0) -> None:
                self.bonus = bonus

            def of_group(self, rewards: Sequence[float]) -> list[float] | None:
                return [self.bonus * (r == max(rewards)) for r in rewards]
    """

    value_model: ValueModel | None = None
    """Value model that `of_tokens` needs; None: advantages come from rewards alone."""
    per_turn: ClassVar[bool] = False
    """Whether turns have advantages of their own, from `of_turns`, instead of trajectories."""
    level: Literal["token", "turn"] = "token"
    """Time steps of `of_tokens`: trained tokens, or turns."""
    normalise: ClassVar[bool] = False
    """Whether to normalise token advantages to mean 0 and standard deviation 1 over the batch;
    applies only with a value model. Without one, `of_groups` sees the whole batch."""

    @property
    def needs_values(self) -> bool:
        """Whether `of_groups` returns rewards, from which `of_tokens` computes advantages."""
        return self.value_model is not None

    def of_group(self, rewards: Sequence[float]) -> list[float] | None:
        """Return the advantage of each trajectory of one group, or None to train none of them."""
        raise NotImplementedError(f"{type(self).__name__} defines neither of_group nor of_groups")

    def of_groups(self, rewards: Sequence[Sequence[float]]) -> list[list[float] | None]:
        """Return the advantages of each group of one step, in order.

        A group whose advantages are all 0 has no signal, but still counts in the batch's mean. None
        marks a group that is not trained, such as one with a single trajectory.
        """
        return [self.of_group(group) for group in rewards]

    def of_turns(self, rewards: Sequence[Sequence[float]]) -> list[list[float]] | None:
        """Return the advantage of each turn of each trajectory of one group, or None to train none.

        Called instead of `of_groups` if `per_turn` is set.

        Args:
            rewards: Reward of each turn of each trajectory; the last turn's includes the reward
                of the whole trajectory.
        """
        raise NotImplementedError(f"{type(self).__name__} sets per_turn and defines no of_turns")

    def of_tokens(
        self, rewards_T: torch.Tensor, values_T: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the advantages and returns, [T] each, of one sequence's time steps.

        Called with a value model only. A time step is a trained token or, with `level` turn, a
        turn, whose advantage and return all of its tokens get.

        Args:
            rewards_T: Reward of each time step: the KL penalty if it is part of the reward, the
                turn's reward at its last token, and at the end the rest of the value that
                `of_groups` returned for the trajectory.
            values_T: The value model's estimates from before the step, at a turn's first token.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no of_tokens")

    def value_loss(
        self, values_N: torch.Tensor, old_values_N: torch.Tensor, returns_N: torch.Tensor
    ) -> torch.Tensor:
        """Return the value model's loss for each token: [N]; by default half the squared error.

        Args:
            values_N: Estimates, with gradient.
            old_values_N: Estimates from before the step.
            returns_N: Returns from `of_tokens`.
        """
        return (values_N - returns_N).square() / 2
