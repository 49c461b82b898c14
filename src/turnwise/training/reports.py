"""Settings of an optimizer step, and the ranks' reports, which are merged into a step's metrics."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from turnwise.core.json_types import JsonObject
from turnwise.training.sample import Sample

if TYPE_CHECKING:
    import torch

    from turnwise.training.algorithms.losses import Objective
    from turnwise.training.batching import RankBatches

OF_STEPS = ("grad_norm", "learning_rate", "skipped_updates", "entropy_coef")
"""Metrics that only optimizer steps have; passes that only compute gradients do not have them."""
RECORDED = ("trainer_logprob", "entropy", "advantage", "weight", "ratio", "clipped", "loss")
"""Values of each trained token that a rank reports, in the order of the rows of `tokens_KN`. The
values are from the update that trained the token, before its optimizer step."""
_Always = Literal["ratio", "clip_fraction", "entropy", "correction", "logprob_diff_mean"]
_Masked = Literal["off_policy_masked", "low_entropy_masked", "correction_below", "correction_above"]
SumName = Literal[_Always, _Masked, "kl", "teacher_kl", "value_loss"]
"""Metrics that are means over trained tokens; ranks report sums."""


class OptimSettings(NamedTuple):
    """Settings of one optimizer step in place of the configured settings; None keeps the configured
    setting."""

    learning_rate: float | None = None
    betas: tuple[float, float] | None = None
    """Coefficients of AdamW's moments; optimizers other than AdamW have neither `betas` nor
    `eps`."""
    eps: float | None = None
    weight_decay: float | None = None
    """Decay of all parameters except norms and biases; if `training.weight_decay` is 0, norms and
    biases decay too."""
    max_grad_norm: float | None = None


CONFIGURED = OptimSettings()


@dataclass(slots=True)
class UpdateReport:
    """One rank's report of one optimizer step; sums are over its trained tokens."""

    tokens: int = 0  # trained tokens of this rank
    sums: dict[SumName, float] = field(default_factory=lambda: defaultdict(float))
    """Sums over trained tokens, by the name of the metric, which is their mean."""
    loss_metrics: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Sums of the loss's own metrics (`TokenLoss.metrics_N`)."""
    logprob_diff_max: float = 0.0
    """Largest difference between the engine's log-prob of a token and the trainer's."""
    loss: float = 0.0  # this rank's part of the batch's loss, which is the sum over all ranks
    bonus: float = 0.0  # this rank's part of the entropy bonus in the loss
    mean_entropy: float = 0.0  # this rank's part of the mean that an adaptive bonus follows
    entropy_coef: float | None = None  # weight of the bonus after the update; None without a bonus
    grad_norm: float = 0.0  # norm of the gradient over all ranks
    learning_rate: float = 0.0  # the policy's learning rate; 0 if only the value model was trained
    skipped: bool = False  # whether a gradient was not finite and its update was skipped

    def add(self, made: "Objective", diff_N: "torch.Tensor", entropy_N: "torch.Tensor") -> None:
        """Add one micro-batch's values to the sums and the maximum."""
        diff_N = diff_N.abs()
        self.loss += float(made.loss.detach())
        for reason, left_out_N in made.left_out_N.items():
            self.sums[reason] += float(left_out_N.sum())
        for side, outside_N in made.correction.outside_N.items():
            self.sums[side] += float(outside_N.sum())
        self.sums["ratio"] += float(made.result.ratio_N.sum())
        self.sums["clip_fraction"] += float(made.result.clipped_N.sum())
        self.sums["entropy"] += float(entropy_N.detach().sum())
        self.sums["correction"] += float(made.correction.weights_N.sum())
        if made.divergence_N is not None:
            self.sums["kl"] += float(made.divergence_N.sum())
        self.sums["logprob_diff_mean"] += float(diff_N.sum())
        if len(diff_N):
            self.logprob_diff_max = max(self.logprob_diff_max, float(diff_N.max()))
        for name, value_N in made.result.metrics_N.items():
            self.loss_metrics[name] += float(value_N.sum())


@dataclass(slots=True)
class StepReport:
    """One rank's report of one training step."""

    version: int  # weight version after the step
    updates: list[UpdateReport]  # one for each optimizer step
    tokens_KN: npt.NDArray[np.float32]
    """`RECORDED` values of all trained tokens, in the order of the updates' micro-batches."""
    staleness: Counter[int]  # number of trained tokens by staleness, before the first update
    layouts: Counter[str]  # number of updates by the layout of their micro-batches
    tokens: int  # number of computed tokens, without padding
    seconds: float  # duration of the step
    memory_gib: float  # peak memory of the rank so far


def merge(reports: Sequence[StepReport], same: int = 1) -> JsonObject:
    """Return the trainer's part of a step's metrics, as `turnwise.observe.metrics` names them.

    Means are over trained tokens, then over the step's updates. `logprob_diff_*` are from before
    the first update, and `learning_rate` is from the last update. Each group of `same` consecutive
    ranks reports the same tokens.
    """
    seconds = max(report.seconds for report in reports)
    memory_gib = max(report.memory_gib for report in reports)
    reports = reports[::same]
    updates = [*zip(*(report.updates for report in reports), strict=True)]
    first = updates[0]
    staleness = sum((report.staleness for report in reports), Counter[int]())
    metrics: JsonObject = {
        "loss": _mean(sum(rank.loss for rank in ranks) for ranks in updates),
        "grad_norm": _mean(ranks[0].grad_norm for ranks in updates),
        "learning_rate": updates[-1][0].learning_rate,
        "skipped_updates": float(sum(ranks[0].skipped for ranks in updates)),
    }

    if updates[-1][0].entropy_coef is not None:
        metrics["entropy_coef"] = updates[-1][0].entropy_coef
        metrics["policy_loss"] = _mean(sum(r.loss + r.bonus for r in ranks) for ranks in updates)

    def means(kind: str) -> dict[str, float]:
        """Return the means of the sums in a field of the updates, by name."""
        names = {name: None for ranks in updates for r in ranks for name in getattr(r, kind)}
        return {
            name: _mean(
                _token_mean(ranks, (getattr(r, kind)[name] for r in ranks)) for ranks in updates
            )
            for name in names
        }

    metrics |= means("sums")
    if own := means("loss_metrics"):
        metrics["loss_metrics"] = own
    metrics["logprob_diff_mean"] = _token_mean(first, (r.sums["logprob_diff_mean"] for r in first))
    metrics["logprob_diff_max"] = max(rank.logprob_diff_max for rank in first)
    ratios = np.concatenate([report.tokens_KN[RECORDED.index("ratio")] for report in reports])
    if len(ratios):
        for percent, ratio in zip((1, 50, 99), np.percentile(ratios, (1, 50, 99)), strict=True):
            metrics[f"ratio_p{percent}"] = float(ratio)
    return metrics | {
        "staleness": {str(age): staleness[age] for age in sorted(staleness)},
        "staleness_max": max(staleness, default=0),
        "layouts": dict(reports[0].layouts),
        "trained_tokens": staleness.total(),
        "train_seconds": seconds,
        "train_tokens_per_s": sum(report.tokens for report in reports) / seconds,
        "train_memory_gib": memory_gib,
    }


def of_step(report: UpdateReport) -> JsonObject:
    """Return the metrics of an optimizer step, which are the same on all ranks."""
    metrics: JsonObject = {
        "grad_norm": report.grad_norm,
        "learning_rate": report.learning_rate,
        "skipped_updates": float(report.skipped),
    }
    return metrics | ({} if report.entropy_coef is None else {"entropy_coef": report.entropy_coef})


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)  # fmean raises if inf and -inf are among them


def _token_mean(ranks: Sequence[UpdateReport], sums: Iterable[float]) -> float:
    return sum(sums) / max(1, sum(rank.tokens for rank in ranks))


def joined(parts: Sequence[JsonObject]) -> JsonObject:
    """Join the metrics of several gradients or policies of one step: counts are added, maxima are
    the largest, and all other metrics are means over trained tokens."""
    if len(parts) < 2:
        return dict(parts[0]) if parts else {}
    made: JsonObject = {}
    for name in dict.fromkeys(name for each in parts for name in each):
        having = [each for each in parts if name in each]
        values, tokens = [e[name] for e in having], [e.get("trained_tokens", 1) for e in having]
        if name == "policies":
            own = dict.fromkeys(policy for each in values for policy in each)
            made[name] = {p: joined([each[p] for each in values if p in each]) for p in own}
        elif isinstance(values[0], dict) and name != "loss_metrics":
            made[name] = dict(sum(map(Counter, values), Counter[str]()))
        elif isinstance(values[0], dict):
            made[name] = {key: _weighted([v[key] for v in values], tokens) for key in values[0]}
        elif name in ("trained_tokens", "train_seconds", "skipped_updates"):
            made[name] = sum(values)
        elif name.endswith("_max") or name == "train_memory_gib":
            made[name] = max(values)
        else:
            made[name] = _weighted(values, tokens)
    return made


def of_policies(own: Mapping[str, JsonObject]) -> JsonObject:
    """Return the metrics of a step of several policies: the joined metrics, and in `policies` the
    metrics of each policy that are numbers."""
    numbers = {
        policy: {name: value for name, value in each.items() if isinstance(value, int | float)}
        for policy, each in own.items()
    }
    return joined([*own.values()]) | {"policies": numbers}


def _weighted(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(v * w for v, w in zip(values, weights, strict=True)) / max(1, sum(weights))


TrainedSample = tuple[Sample, npt.NDArray[np.float32]]
"""A sample that was trained, and the `RECORDED` values of its trained tokens: [K, N]."""


def own_columns(
    values_KN: npt.NDArray[np.float32], wide: int, width: int
) -> npt.NDArray[np.float32]:
    """Return the values of a sample's own targets: of the `wide` targets that its micro-batch has
    for each token, the sample has only `width`."""
    if width == wide:
        return values_KN
    return values_KN.reshape(len(values_KN), -1, wide)[:, :, :width].reshape(len(values_KN), -1)


def by_sample(
    shares: Sequence[Sequence["RankBatches"]], reports: Sequence[StepReport]
) -> list[TrainedSample]:
    """Return the token values of each sample, from the ranks' first pass over the sample."""
    found: list[TrainedSample] = []
    for share, report in zip(shares, reports, strict=True):
        start = 0
        for batch in (batch for update in share for batch in update.micro_batches):
            wide = max((sample.width for sample in batch), default=1)
            for sample in batch:
                end = start + sample.trained * wide
                if end <= report.tokens_KN.shape[1]:
                    values_KN = report.tokens_KN[:, start:end]
                    found.append((sample, own_columns(values_KN, wide, sample.width)))
                start = end
    return found
