"""The gradient of a rank's micro-batches: inputs of the losses, the losses, and backward passes."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from turnwise.config import AlgorithmConfig, SamplingConfig, TrainingConfig
from turnwise.core.process import trim_memory
from turnwise.training.algorithms import Advantage, Loss
from turnwise.training.algorithms.advantages import moments, normalised, of_time_steps
from turnwise.training.algorithms.entropy import EntropyControl, entropy_floor, mean_part
from turnwise.training.algorithms.losses import kl_N, objective, reward_penalty, teach
from turnwise.training.batching import MicroBatch, RankBatches
from turnwise.training.model import Models
from turnwise.training.reports import UpdateReport

_T = TypeVar("_T")
_GIVE_BACK_SECONDS = 10.0
"""Minimum seconds between two times that a rank on a CPU returns freed memory to the system, which
it does because holes between the blocks of different micro-batches add up. Doing it more often
would cost time, because the rank then needs new pages."""


class How(NamedTuple):
    """The algorithm, loss and model with which a gradient is computed."""

    algorithm: AlgorithmConfig
    loss: Loss
    model: str = "policy"
    """Name of a policy, or PEFT's name of an added adapter."""
    sampling: SamplingConfig | None = None
    """Distribution to score all tokens under; None: the distribution that each token was drawn
    from."""
    learns: bool = True


class Gradients:
    """Computes gradients on one rank; all ranks make the same calls in the same order.

    Args:
        longest: Maximum number of tokens in a trajectory's response.
        teaches: Whether the reference model is a teacher.
    """

    def __init__(
        self,
        algorithm: AlgorithmConfig,
        training: TrainingConfig,
        models: Models,
        advantage: Advantage,
        entropy: EntropyControl,
        ranks: int,
        *,
        longest: int,
        teaches: bool,
    ) -> None:
        self._algorithm, self._training = algorithm, training
        self._models, self._ranks = models, ranks
        self._longest, self._teaches = longest, teaches
        self._advantage, self._entropy = advantage, entropy
        self.device = models.device
        self._gave_back = time.monotonic()

    def add(
        self,
        batches: Sequence[MicroBatch],
        share: RankBatches,
        how: How,
        recorded: list[torch.Tensor],
        warming: bool = False,
    ) -> UpdateReport:
        """Add the gradient of the loss (a sum over the trained tokens of all ranks), and append the
        tokens' `RECORDED` values to `recorded`. `warming` trains only the value model."""
        report = UpdateReport()
        counted = share.total_tokens
        if not warming:
            counted = self._find_low_entropies(batches, share, how)
        for batch in batches:
            if not warming:
                self._add_policy_gradient(batch, share, how, counted, report, recorded)
            if batch.returns_N is not None:
                assert batch.values_N is not None
                values_N = self._models.estimate(batch.columns)
                loss_N = self._advantage.value_loss(values_N, batch.values_N, batch.returns_N)
                total = loss_N.sum() / share.total_tokens * self._ranks
                if how.learns:
                    total.backward()  # type: ignore[no-untyped-call]
                report.sums["value_loss"] += float(loss_N.detach().sum())
            report.tokens += len(batch.tokens.advantages_N)
            if (
                self.device.type == "cpu"
                and time.monotonic() > self._gave_back + _GIVE_BACK_SECONDS
            ):
                trim_memory()
                self._gave_back = time.monotonic()
        return report

    def prepare(self, batches: Sequence[MicroBatch], how: How, updates: int) -> None:
        """Compute what the losses need before the first update of a step: log-probs of the policy
        and of the reference model, the value model's estimates, and, given these, advantages."""
        algorithm, loss = how.algorithm, how.loss
        kl, corrected = algorithm.kl, algorithm.correction.name != "none"
        penalised = bool(kl.coef) and kl.where == "reward"  # the KL penalty is part of the reward
        valued = self._advantage.needs_values and algorithm.advantage == self._algorithm.advantage
        with torch.no_grad():
            for batch in batches:
                if penalised or (corrected and updates > 1):
                    old = self._models.score(how.model, batch.columns, how.sampling)
                    batch.old_logprobs_N, _ = old
                taught_N = batch.tokens.teacher_logprobs_N
                if loss.needs_reference or kl.coef or self._teaches:
                    reference_N, _ = self._models.score("reference", batch.columns)
                    batch.tokens = replace(batch.tokens, reference_logprobs_N=reference_N)
                if self._teaches and taught_N is not None:
                    taught_N = torch.where(taught_N.isnan(), reference_N, taught_N)
                    batch.tokens = replace(batch.tokens, teacher_logprobs_N=taught_N)
                tokens, penalties_N = batch.tokens, None
                if penalised:
                    assert batch.old_logprobs_N is not None
                    penalties_N = kl_N(batch.old_logprobs_N, reference_N, kl.estimator)
                if valued:  # until here, `advantages_N` are rewards
                    batch.values_N = self._models.estimate(batch.columns)
                    rewards_N = tokens.advantages_N
                    if penalties_N is not None:
                        rewards_N = rewards_N - kl.coef * penalties_N
                    advantages_N, returns_N = (torch.zeros_like(rewards_N) for _ in range(2))
                    for span in batch.spans():
                        steps = rewards_N[span], batch.values_N[span], batch.call_N[span]
                        advantages_N[span], returns_N[span] = of_time_steps(self._advantage, *steps)
                    batch.tokens = replace(tokens, advantages_N=advantages_N)
                    batch.returns_N = returns_N
                elif penalties_N is not None and penalties_N.any():
                    for span in batch.spans():
                        tokens.advantages_N[span] -= reward_penalty(penalties_N[span], kl.coef)
        if self._advantage.normalise and valued:
            sums_3 = moments(torch.cat([batch.tokens.advantages_N for batch in batches]))
            if self._ranks > 1:
                dist.all_reduce(sums_3)
            for batch in batches:
                advantages_N = normalised(batch.tokens.advantages_N, sums_3)
                batch.tokens = replace(batch.tokens, advantages_N=advantages_N)

    def _find_low_entropies(
        self, batches: Sequence[MicroBatch], share: RankBatches, how: How
    ) -> int:
        """Find the tokens that `algorithm.entropy.top_quantile` leaves out of an update; return how
        many tokens of all ranks the quantile keeps."""
        quantile = how.algorithm.entropy.top_quantile
        if quantile >= 1:
            return share.total_tokens
        with torch.no_grad():
            columns = [batch.columns for batch in batches]
            found = [self._models.score(how.model, each, how.sampling)[1] for each in columns]
        entropies = torch.cat(self.of_all_ranks(torch.cat(found).cpu()))
        floor = entropy_floor(entropies, quantile)
        for batch, entropy_N in zip(batches, found, strict=True):
            batch.low_entropy_N = entropy_N < floor
        return int((entropies >= floor).sum())

    def of_all_ranks(self, value: _T) -> list[_T]:
        """Return the values of all ranks; ranks that share sequences give one value together."""
        values = [value] * self._ranks
        if self._ranks > 1:
            dist.all_gather_object(values, value)
        return values[:: self._training.context_parallel]

    def _add_policy_gradient(
        self,
        batch: MicroBatch,
        share: RankBatches,
        how: How,
        counted: int,
        report: UpdateReport,
        recorded: list[torch.Tensor],
    ) -> None:
        """Add a micro-batch's part of the policy's gradient, and append the tokens' `RECORDED`
        values to `recorded`. `counted` is the number of tokens in the update's mean entropy."""
        algorithm, loss, columns = how.algorithm, how.loss, batch.columns
        engine_N, advantages_N = batch.tokens.engine_logprobs_N, batch.tokens.advantages_N
        if loss.scaled:
            learns_N = advantages_N.reshape(len(advantages_N), -1).any(dim=1)
            columns = replace(columns, learns_N=learns_N[columns.number_N])
        logprobs_N, entropy_N = self._models.score(how.model, columns, how.sampling)
        # Ratios are relative to the old log-probs: the engine's log-probs or, with a correction,
        # the policy's own log-probs from before the step.
        if algorithm.correction.name == "none":
            old_N = engine_N
        elif batch.old_logprobs_N is not None:
            old_N = batch.old_logprobs_N
        else:
            old_N = logprobs_N.detach()  # the only update of its step
        tokens = replace(batch.tokens, logprobs_N=logprobs_N, old_logprobs_N=old_N)
        taught_N = None
        if (teaching := teach(tokens)) is not None:
            tokens, taught_N, divergence_N = teaching
            report.sums["teacher_kl"] += float(divergence_N.sum())
        bonus = None
        if algorithm.entropy.has_bonus:
            mean = mean_part(entropy_N, batch.low_entropy_N, counted)
            report.mean_entropy += float(mean.detach())
            if self._entropy.applied:
                bonus = self._entropy.applied * mean
                report.bonus += float(bonus.detach())
        made = objective(
            algorithm,
            loss,
            tokens,
            total_tokens=share.total_tokens,
            total_trajectories=share.total_trajectories,
            constant=self._longest,
            low_entropy_N=batch.low_entropy_N,
            bonus=bonus,
            taught_N=taught_N,
        )
        # The factor compensates for FSDP, which averages gradients over ranks.
        if how.learns:
            (made.loss * self._ranks).backward()  # type: ignore[no-untyped-call]
        report.add(made, logprobs_N.detach() - engine_N, entropy_N)
        values = (
            logprobs_N,
            entropy_N,
            tokens.advantages_N,
            made.factors_N,
            made.result.ratio_N,
            made.result.clipped_N,
            made.result.loss_N,
        )
        recorded.append(torch.stack([like(v_N, logprobs_N).reshape(-1) for v_N in values]))


def like(values_N: torch.Tensor, others_N: torch.Tensor) -> torch.Tensor:
    """Return the values of tokens, repeated for each target if `others_N` is [N, K]."""
    values_N = values_N.detach().float()
    if values_N.dim() < others_N.dim():
        values_N = values_N[:, None].expand_as(others_N)
    return values_N
