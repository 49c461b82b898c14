"""The base classes of advantages and losses, and a loss's per-token inputs and results.

Independent of models and ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import torch

from turnwise.config import OtherModel

if TYPE_CHECKING:
    from turnwise.trajectory import Trajectory

MAX_LOG_RATIO = 20.0


def importance_ratio(log_ratio_N: torch.Tensor) -> torch.Tensor:
    """Return exp(log ratio): [N], with the log ratio clamped to +-20.

    So neither a ratio (at most 5e8) nor a product with a ratio overflows; otherwise inf * 0 would
    make the whole batch's gradient NaN. A ratio beyond the bound has no gradient, because it
    indicates a fault rather than a change of the policy.
    """
    return log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


@dataclass(frozen=True, slots=True)
class Tokens:
    """The `N` trained tokens of a micro-batch, of `S` sequences, in order."""

    logprobs_N: torch.Tensor
    """The policy's log-probs, with gradient."""
    old_logprobs_N: torch.Tensor
    """Log-probs that ratios are relative to: the engine's log-probs or, with a correction, the
    trainer's own log-probs from before the step."""
    engine_logprobs_N: torch.Tensor
    """The engine's log-probs, recorded when the token was sampled."""
    advantages_N: torch.Tensor
    sequence_N: torch.Tensor
    """Index of the token's sequence among the `S`; long, non-decreasing."""
    sequences: int
    """Number of sequences, S."""
    trajectory_tokens_N: torch.Tensor
    """Number of trained tokens in each token's trajectory, including tokens in other sequences and
    micro-batches."""
    staleness_N: torch.Tensor
    """The weight version at the step's start minus the version that sampled the token; long."""
    reference_logprobs_N: torch.Tensor | None = None
    """The reference model's log-probs; None if neither a KL penalty nor the loss needs them."""
    teacher_logprobs_N: torch.Tensor | None = None
    """The teacher's log-probs, NaN where both weights are 0; None without a teacher."""
    teacher_weights_2N: torch.Tensor | None = None
    """Factors of the divergence from the teacher: in the advantages, and in the loss."""
    streams: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Additional values of each token, by name, from `Sample.streams`."""

    def sums_S(self, values_N: torch.Tensor) -> torch.Tensor:
        """Return the sum over each sequence's tokens: [S]."""
        return values_N.new_zeros(self.sequences).index_add(0, self.sequence_N, values_N)

    def means_S(self, values_N: torch.Tensor) -> torch.Tensor:
        """Return the mean over each sequence's tokens; 0 for a sequence without tokens: [S]."""
        counts_S = self.sums_S(torch.ones_like(values_N))
        return self.sums_S(values_N) / counts_S.clamp(min=1)


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A loss's result: values of the `N` trained tokens; only `loss_N` has a gradient."""

    loss_N: torch.Tensor
    """Loss of each token before any reduction; the batch's loss is a weighted sum of these."""
    ratio_N: torch.Tensor
    """The importance ratio that the loss used."""
    clipped_N: torch.Tensor
    """1 where the clip removed the gradient (or, in CISPO, bounded the weight)."""
    metrics_N: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Additional values, by name; metrics.jsonl has their means under `loss_metrics`."""


class Loss:
    """Base class of losses.

    Your own class defines `__call__`. Select it in the configuration with
    `algorithm.loss.name: package.module:Class`; all keys except `name` are passed to its
    constructor.

    Example:
        class Reinforce(Loss):
            def __init__(self, scale: float = 1.0) -> None:
                self.scale = scale

            def __call__(self, tokens: Tokens) -> TokenLoss:
                loss_N = -self.scale * tokens.advantages_N * tokens.logprobs_N
                return self.unclipped(tokens, loss_N, surprise=-tokens.logprobs_N)
    """

    needs_reference: ClassVar[bool] = False
    """Whether the loss needs `Tokens.reference_logprobs_N`, regardless of `algorithm.kl`."""
    scaled: bool = False
    """Whether tokens with advantage 0 have no gradient, so that it need not be computed."""
    on_policy: ClassVar[bool] = False
    """Whether the loss is right only for samples of the current weights, because it has no
    importance ratio."""
    needs_pairs: ClassVar[bool] = False
    """Whether the loss compares the best trajectory of each group with the worst. If so, sequence
    2i is the chosen trajectory and sequence 2i + 1 is the rejected one, advantages are not used,
    and the batch's loss is the mean over pairs (`sequence_mean`)."""

    def __call__(self, tokens: Tokens) -> TokenLoss:
        """Return the losses of the `N` trained tokens of a micro-batch, before any reduction."""
        raise NotImplementedError(f"{type(self).__name__} defines no __call__")

    def corrected(self, tokens: Tokens, correction_N: torch.Tensor) -> TokenLoss:
        """Return the losses multiplied by the weights of `algorithm.correction`, [N]. Override this
        method if your loss uses the weights in a different way."""
        result = self(tokens)
        return replace(result, loss_N=result.loss_N * correction_N)

    @staticmethod
    def unclipped(tokens: Tokens, loss_N: torch.Tensor, **metrics_N: torch.Tensor) -> TokenLoss:
        """Return the result of a loss without clipping; its ratio is pi(t) / pi_old(t).

        Args:
            metrics_N: Additional values by name; see `TokenLoss.metrics_N`.
        """
        return TokenLoss(
            loss_N,
            importance_ratio((tokens.logprobs_N - tokens.old_logprobs_N).detach()),
            torch.zeros_like(tokens.sequence_N, dtype=torch.bool),
            {name: value_N.detach() for name, value_N in metrics_N.items()},
        )


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

    Your own class overrides `of_group`, or `of_groups` if advantages depend on the whole step. A
    class with `per_turn` overrides `of_turns` instead, and a class with `multi_objective` overrides
    `of_objectives`. With a value model, also override `of_tokens` and `value_loss`. Override
    `annotate` to give each token its own advantage. Select the class in the configuration with
    `algorithm.advantage.name: package.module:Class`; all keys except `name` are passed to its
    constructor.

    Example:
        class Best(Advantage):
            def __init__(self, bonus: float = 1.0) -> None:
                self.bonus = bonus

            def of_group(self, rewards: Sequence[float]) -> list[float] | None:
                return [self.bonus * (r == max(rewards)) for r in rewards]
    """

    value_model: ValueModel | None = None
    """Value model that `of_tokens` needs; None: advantages come only from rewards."""
    per_turn: ClassVar[bool] = False
    """Whether each turn, instead of each trajectory, has its own advantage, from `of_turns`."""
    multi_objective: ClassVar[bool] = False
    """Whether `of_objectives` is called instead of `of_groups`, with the parts of rewards."""
    level: Literal["token", "turn"] = "token"
    """Whether the time steps of `of_tokens` are trained tokens or turns."""
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

    def of_objectives(
        self, rewards: Sequence[Sequence[Mapping[str, float]]], weights: Mapping[str, float]
    ) -> list[list[float] | None]:
        """Return the same as `of_groups`, given the named parts of each trajectory's reward.

        The parts are the rewards of the entries of `rollout.rewards`, before they are weighted; if
        there is only one entry, they are the named parts of its reward and the rest of its reward.
        A part that does not apply to a trajectory is missing. A missing weight counts as 1.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no of_objectives")

    def of_turns(self, rewards: Sequence[Sequence[float]]) -> list[list[float]] | None:
        """Return the advantage of each turn of each trajectory of one group, or None to train none.

        Called instead of `of_groups` if `per_turn` is set.

        Args:
            rewards: Reward of each turn of each trajectory; the last turn's reward includes the
                reward of the whole trajectory.
        """
        raise NotImplementedError(f"{type(self).__name__} sets per_turn and defines no of_turns")

    def annotate(self, trajectory: "Trajectory", advantages: Sequence[float]) -> None:
        """Write each turn's stream `advantage`: a value for each of its `N` completion tokens, [N],
        by default the turn's advantage. The loss gets all other streams that you write
        (`Tokens.streams`). Not called with a value model.

        Args:
            advantages: An advantage for each turn: the turn's own from `of_turns`, or the
                trajectory's without `per_turn`.
        """
        for turn, advantage in zip(trajectory.turns, advantages, strict=True):
            size = len(turn.completion_token_ids)
            turn.streams["advantage"] = np.full(size, advantage, np.float32)

    def of_tokens(
        self, rewards_T: torch.Tensor, values_T: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the advantages and returns, [T] each, of one sequence's time steps.

        Called only with a value model. A time step is a trained token or, with `level` turn, a
        turn; in this case all tokens of the turn get its advantage and its return.

        Args:
            rewards_T: Reward of each time step: minus the KL penalty if the penalty is part of the
                reward, plus the turn's reward at the turn's last token, plus, at the end, the rest
                of the value that `of_groups` returned for the trajectory.
            values_T: The value model's estimates from before the step; for a turn, the estimate at
                its first token.
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
