"""What the ranks saw of a step, added up."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from turnwise.training.policy import StepReport, UpdateReport

_PERCENTILES = (1, 50, 99)


def merge(reports: Sequence["StepReport"]) -> dict[str, Any]:
    """Metrics of a training step.

    Means are over trained tokens, then over the step's updates; tokens that are only counted have
    no part in them. `logprob_diff_*` compare the engine's log-probs with the trainer's before the
    first update; `staleness` counts tokens by the optimizer steps between the weights that sampled
    them and those that began to train; `learning_rate` is that of the last update.
    """
    first = reports[0]
    updates = [_update([r.updates[i] for r in reports]) for i in range(len(first.updates))]
    keys = dict.fromkeys(key for update in updates for key in update)
    metrics = {key: sum(u.get(key, 0.0) for u in updates) / len(updates) for key in keys}
    for key in ("logprob_diff_mean", "logprob_diff_max"):
        metrics[key] = updates[0][key]
    metrics["skipped_updates"] = sum(update["skipped_updates"] for update in updates)
    staleness = sum((report.staleness for report in reports), Counter[int]())
    seconds = max(report.seconds for report in reports)
    ratios = np.concatenate([report.ratios_N for report in reports])
    if len(ratios):
        values = np.percentile(ratios, _PERCENTILES).tolist()
        metrics |= {f"ratio_p{p}": v for p, v in zip(_PERCENTILES, values, strict=True)}
    return metrics | {
        "staleness": {str(age): staleness[age] for age in sorted(staleness)},
        "staleness_max": max(staleness, default=0),
        "trained_tokens": staleness.total(),
        "train_seconds": seconds,
        "train_tokens_per_s": sum(report.tokens for report in reports) / seconds,
        "train_memory_gib": max(report.memory_gib for report in reports),
        "learning_rate": first.updates[-1].learning_rate,
    }


def _update(ranks: Sequence["UpdateReport"]) -> dict[str, float]:
    tokens = sum(rank.tokens for rank in ranks)
    names = dict.fromkeys(key for rank in ranks for key in rank.sums)
    means = {key: sum(rank.sums[key] for rank in ranks) / max(1, tokens) for key in names}
    return {
        "logprob_diff_mean": 0.0,
        **means,
        "loss": sum(rank.loss for rank in ranks),
        "grad_norm": ranks[0].grad_norm,
        "skipped_updates": float(ranks[0].skipped),
        "logprob_diff_max": max(rank.logprob_diff_max for rank in ranks),
    }
