"""The objective of a training step: from micro-batches to gradients, on one rank.

    prepare   before the first update: log-probs of the policy and of the reference model,
              values, and from them each token's advantage
    policy    gradient of algorithm.loss, with correction, KL penalty and reduction
    value     gradient of the value model's loss, where the advantages need one

Applies the `Advantage` and `Loss` that the configuration names. A loss is a sum over all trained
tokens of all ranks; the factor `ranks` compensates for FSDP, which averages gradients over them.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from turnwise.config import Config
from turnwise.training.algorithms import Algorithm
from turnwise.training.algorithms.advantages import moments, normalised
from turnwise.training.algorithms.losses import kl_N, objective, reward_penalty
from turnwise.training.batching import MicroBatch, RankBatches
from turnwise.training.model import Models
from turnwise.training.reports import UpdateReport


class TrainingObjective:
    """Computes the contribution of a rank's micro-batches to the gradients of its models."""

    def __init__(self, config: Config, algorithm: Algorithm, models: Models, ranks: int) -> None:
        self._config = config.algorithm
        self._advantage, self._loss = algorithm.advantage, algorithm.loss
        self._models = models
        self._ranks = ranks
        turns = 1 if config.loops == {"single_turn"} else config.rollout.max_turns
        self._longest = config.sampling.max_tokens * turns
        self._penalised = bool(self._config.kl.coef) and self._config.kl.where == "reward"
        self._corrected = self._config.correction.name != "none"

    def prepare(self, batches: Sequence[MicroBatch], updates: int) -> None:
        """Compute the values that the losses need, before the first update of a step."""
        with torch.no_grad():
            for batch in batches:
                if self._penalised or (self._corrected and updates > 1):
                    batch.old_logprobs_N, _ = self._models.score("policy", batch.columns)
                if self._loss.needs_reference or self._config.kl.coef:
                    reference_N, _ = self._models.score("reference", batch.columns)
                    batch.tokens = replace(batch.tokens, reference_logprobs_N=reference_N)
                if self._advantage.needs_values:
                    batch.values_N = self._models.estimate(batch.columns)
                self._make_advantages(batch)
        if self._advantage.normalise and self._advantage.needs_values:
            sums_3 = moments(torch.cat([batch.tokens.advantages_N for batch in batches]))
            if self._ranks > 1:
                dist.all_reduce(sums_3)
            for batch in batches:
                advantages_N = normalised(batch.tokens.advantages_N, sums_3)
                batch.tokens = replace(batch.tokens, advantages_N=advantages_N)

    def _make_advantages(self, batch: MicroBatch) -> None:
        """Turn each trajectory's advantage or reward into advantages of its tokens."""
        kl, tokens = self._config.kl, batch.tokens
        penalties_N: torch.Tensor | None = None
        if self._penalised:  # the KL penalty is part of the reward
            assert batch.old_logprobs_N is not None
            assert tokens.reference_logprobs_N is not None
            penalties_N = kl_N(batch.old_logprobs_N, tokens.reference_logprobs_N, kl.estimator)
        if self._advantage.needs_values:
            assert batch.values_N is not None
            rewards_N = tokens.advantages_N
            if penalties_N is not None:
                rewards_N = rewards_N - kl.coef * penalties_N
            advantages_N, returns_N = (torch.zeros_like(rewards_N) for _ in range(2))
            for span in batch.spans():
                advantages_N[span], returns_N[span] = self._of_time_steps(
                    rewards_N[span], batch.values_N[span], batch.turn_N[span]
                )
            batch.tokens, batch.returns_N = replace(tokens, advantages_N=advantages_N), returns_N
        elif penalties_N is not None and penalties_N.any():
            for span in batch.spans():
                tokens.advantages_N[span] -= reward_penalty(penalties_N[span], kl.coef)

    def _of_time_steps(
        self, rewards_T: torch.Tensor, values_T: torch.Tensor, turn_T: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the advantages and returns of one sequence's tokens."""
        if self._advantage.level == "token":
            return self._advantage.of_tokens(rewards_T, values_T)
        _, step_T, lengths_K = torch.unique_consecutive(
            turn_T, return_inverse=True, return_counts=True
        )
        rewards_K = rewards_T.new_zeros(len(lengths_K)).index_add(0, step_T, rewards_T)
        values_K = values_T[lengths_K.cumsum(0) - lengths_K]
        advantages_K, returns_K = self._advantage.of_tokens(rewards_K, values_K)
        return advantages_K[step_T], returns_K[step_T]

    def policy(
        self,
        batch: MicroBatch,
        share: RankBatches,
        report: UpdateReport,
        recorded: list[torch.Tensor],
    ) -> None:
        """Add a micro-batch's part of the policy's gradient, and its tokens' `RECORDED` values."""
        logprobs_N, entropy_N = self._models.score("policy", batch.columns)
        engine_N = batch.tokens.engine_logprobs_N
        if not self._corrected:
            old_N = engine_N
        elif batch.old_logprobs_N is not None:
            old_N = batch.old_logprobs_N
        else:
            old_N = logprobs_N.detach()  # the only update of its step
        tokens = replace(batch.tokens, logprobs_N=logprobs_N, old_logprobs_N=old_N)
        made = objective(
            self._config,
            self._loss,
            tokens,
            total_tokens=share.total_tokens,
            total_trajectories=share.total_trajectories,
            constant=self._longest,
        )
        (made.loss * self._ranks).backward()  # type: ignore[no-untyped-call]
        report.add(made, logprobs_N.detach() - engine_N, entropy_N)
        values = (
            logprobs_N,
            entropy_N,
            tokens.advantages_N,
            made.weights_N * made.correction_N,
            made.result.ratio_N,
            made.result.clipped_N,
        )
        recorded.append(torch.stack([value_N.detach().float() for value_N in values]))

    def value(self, batch: MicroBatch, share: RankBatches, report: UpdateReport) -> None:
        assert batch.values_N is not None
        assert batch.returns_N is not None
        values_N = self._models.estimate(batch.columns)
        loss_N = self._advantage.value_loss(values_N, batch.values_N, batch.returns_N)
        total = loss_N.sum() / share.total_tokens
        (total * self._ranks).backward()  # type: ignore[no-untyped-call]
        report.sums["value_loss"] += float(loss_N.detach().sum())
