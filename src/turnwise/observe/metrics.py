"""The metrics of a step: one typed record, which `MetricsLog` writes as a line of metrics.jsonl.

Each metric is declared once, in `StepMetrics`. Trackers use its name, Prometheus uses the series
that its field declares, and the documentation uses its docstring.

To add a metric: write a field of `StepMetrics` with its name for Prometheus, and set it in an `add`
method here; for a value that ranks report, in `merge` of `training/reports.py`, under the same
name; for a value of a weight update, in `TrainingStep.update_weights` of `run/runtime.py`.
"""

import ast
import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from statistics import stdev
from typing import TYPE_CHECKING, Annotated, NamedTuple

from turnwise.core.json_types import JsonObject

if TYPE_CHECKING:  # the display imports this module before torch is imported
    from turnwise.rollouts import Batch
    from turnwise.rollouts.evaluation import Evaluation
    from turnwise.training.samples import SampleBatch
    from turnwise.trajectory import Trajectory

Counts = dict[str, int] | None
_TOOL = "tool_"  # beginning of the events that are outcomes of tool calls


def shown_interval(results: Mapping[str, float] | None, name: str = "accuracy") -> str:
    """Return the 95 % interval of an evaluation's result, such as " (0.804–0.935)"; "" if it has
    none, because there were no attempts or an earlier version evaluated."""
    if not results or f"{name}_low" not in results:
        return ""
    return f" ({results[f'{name}_low']:.3f}–{results[f'{name}_high']:.3f})"


class Series(NamedTuple):
    """A series of Prometheus: a gauge of the last step, or a counter that sums steps."""

    name: str  # name of the series; the name of a counter ends in _total
    label: str = ""  # label of the entries, if the metric is a dictionary
    value: Callable[[JsonObject], object] | None = None
    """Returns the value from the line of metrics.jsonl; None takes the metric itself."""

    @property
    def sums(self) -> bool:
        """Whether it is a counter."""
        return self.name.endswith("_total")


def _tool_calls(row: JsonObject) -> dict[str, int]:
    events = row.get("events") or {}
    calls = {k.removeprefix(_TOOL): n for k, n in events.items() if k.startswith(_TOOL)}
    called = calls.pop("call", 0)
    return {**calls, "ok": called - sum(calls.values()) + calls.get("malformed", 0)}


@dataclass(slots=True, kw_only=True)
class StepMetrics:
    """The metrics of one step; fields that are None are omitted from metrics.jsonl unless noted."""

    step: Annotated[int | None, Series("turnwise_step")] = None
    """Training step; 0 is the initial model, None a step of a custom pipeline."""
    reward_mean: Annotated[float | None, Series("turnwise_reward")] = 0.0
    """Mean reward of the step's trajectories; at step 0, of the held-out trajectories. None in
    supervised training."""
    reward_std: float | None = None
    """Standard deviation of the rewards (divided by n - 1); None with fewer than two rewards."""
    reward_parts: dict[str, float] | None = None
    """Mean of each part of the reward, by name, before weighting."""
    reward_parts_std: dict[str, float] | None = None
    """Standard deviation of each part, over the trajectories that have it; 0 with one
    trajectory."""
    env: dict[str, float] | None = None
    """Mean of each number that the environments' `metrics` return, over those that return it."""
    environments: dict[str, JsonObject] | None = None
    """In a run with several environments, by name: reward_mean (missing without trajectories),
    trajectories, dropped (number of dropped trajectories), groups, trajectories_discarded and
    groups_discarded (if any), the environment's own `pools`, and in `heldout` its evaluation."""
    policies: dict[str, JsonObject] | None = None
    """In a run of several policies (rollout.policies), by name: reward_mean, the mean reward of its
    players, and the trainer's metrics of only this policy, such as loss, entropy and grad_norm."""
    pools: Counts = None
    """With data.curriculum, the number of rows by the outcome of their last group: a signal
    (mixed), all trajectories right (mastered), all wrong (hopeless), or no group so far (fresh);
    and the number of mastered and hopeless rows that rest at the moment (resting)."""
    trajectories: Annotated[int, Series("turnwise_trajectories_total")] = 0
    """Number of trajectories."""
    trajectories_discarded: int | None = None
    """Finished trajectories of groups that are not trained on; None without such trajectories."""
    dropped: Annotated[Counts, Series("turnwise_dropped_total", "reason")] = None
    """Trajectories whose last attempt failed, by reason, including those of groups that are not
    trained on; in supervised training, refused rows."""
    retried: Annotated[Counts, Series("turnwise_retried_total", "reason")] = None
    """Failed attempts that were retried, by reason."""
    groups_discarded: Annotated[Counts, Series("turnwise_groups_discarded_total", "reason")] = None
    """Groups that are not trained on, by reason: no_signal, failed, oversampled,
    prompt_too_long."""
    statuses: Annotated[Counts, Series("turnwise_trajectory_statuses_total", "status")] = None
    """Trajectories by final status."""
    events: Annotated[Counts, Series("turnwise_tool_calls_total", "outcome", _tool_calls)] = None
    """Events of the trajectories, such as tool errors, by kind."""
    judges: Annotated[Counts, Series("turnwise_judges_total", "kind")] = None
    """Work of judges, including work for dropped trajectories and the step's evaluation: requests,
    retries, cached (equal requests that were not sent again), prompt_tokens and completion_tokens;
    None without judges."""
    turns_mean: float | None = None
    """Mean number of turns of a trajectory."""
    sampled_tokens: Annotated[int | None, Series("turnwise_sampled_tokens_total")] = None
    """Tokens sampled by the step's trajectories."""
    completion_tokens: dict[str, float] | None = None
    """Sampled tokens of a trajectory: mean, min and max; and the same values over trajectories with
    status completed (ended_mean, ended_min, ended_max; missing without such trajectories)."""
    rollout_seconds: float | None = None
    """Seconds from the first group's start, or the previous batch, to the last group's end."""
    rollout_tokens_per_s: Annotated[float | None, Series("turnwise_rollout_tokens_per_second")] = (
        None
    )
    """Sampled tokens per second of rollout; 0 if all groups were ready before the step, as in a
    resumed run or if rollouts are far ahead."""
    worker_tokens_per_s: dict[str, float] | None = None
    """Sampled tokens per second of turns, by worker. The time in vLLM's queue does not count, if it
    is known."""

    groups_without_signal: Annotated[int | None, Series("turnwise_groups_without_signal")] = None
    """Groups whose advantages are all 0."""
    stale_groups: int | None = None
    """Groups dropped because of tokens older than training.max_staleness."""
    stale_tokens: int | None = None
    """Tokens masked because they are older than training.max_staleness."""
    overlong: int | None = None
    """Trajectories with an overlong penalty."""
    truncated_masked: int | None = None
    """Trajectories that algorithm.mask_truncated leaves out of the loss."""
    exact_percent: Annotated[float | None, Series("turnwise_exact_percent")] = None
    """Percentage of trained tokens that exactly match the sampled ones."""
    forked: Annotated[Counts, Series("turnwise_forks_total", "reason")] = None
    """Branches started because a prompt did not continue the previous tokens, by reason."""

    trained_tokens: Annotated[int | None, Series("turnwise_trained_tokens_total")] = None
    """Tokens trained; 0 if no group had a training signal."""
    loss: Annotated[float | None, Series("turnwise_loss")] = None
    """Loss, averaged over the step's updates. None if nothing was trained; this holds for all
    metrics up to train_memory_gib, unless noted."""
    loss_metrics: dict[str, float] | None = None
    """Means over trained tokens of the metrics that the loss reports, by name: phi_seq_mean, the
    mean weight of vespo; divergence, the mean divergence of dppo; and the metrics of your own
    loss."""
    policy_loss: float | None = None
    """The loss without the entropy bonus; None if the loss has no bonus."""
    entropy_coef: float | None = None
    """Weight of the entropy bonus after the last update; None without a bonus."""
    value_loss: float | None = None
    """Loss of the value model per trained token; None without a value model."""
    grad_norm: Annotated[float | None, Series("turnwise_grad_norm")] = None
    """Norm of the policy's gradient before clipping, averaged over updates."""
    learning_rate: float | None = None
    """Learning rate of the last update; 0 if only the value model was trained."""
    skipped_updates: float | None = None
    """Updates skipped because their gradient was not finite."""
    ratio: float | None = None
    """Mean importance ratio of trained tokens."""
    ratio_p1: float | None = None
    """1st percentile of the importance ratios, in all updates of the step."""
    ratio_p50: float | None = None
    """Median of the importance ratios."""
    ratio_p99: float | None = None
    """99th percentile of the importance ratios."""
    clip_fraction: Annotated[float | None, Series("turnwise_clip_fraction")] = None
    """Share of trained tokens whose gradient was clipped to 0 (cispo: weight was clipped)."""
    entropy: Annotated[float | None, Series("turnwise_entropy")] = None
    """Mean entropy of the policy at trained tokens, in nats."""
    off_policy_masked: float | None = None
    """Share of trained tokens that algorithm.off_policy_mask_threshold leaves out of the loss; None
    if it is not set."""
    low_entropy_masked: float | None = None
    """Share of trained tokens that algorithm.entropy.top_quantile leaves out of the loss; None if
    it is 1."""
    correction: float | None = None
    """Mean weight of algorithm.correction."""
    correction_below: float | None = None
    """Share of trained tokens that algorithm.correction masks because their ratio, or their
    sequence's, is below its bounds; None if the correction has no lower bound."""
    correction_above: float | None = None
    """Share of trained tokens that algorithm.correction masks, or whose weight it truncates,
    because their ratio, or their sequence's, is above its bounds; None without a correction."""
    kl: Annotated[float | None, Series("turnwise_kl")] = None
    """Mean KL divergence from the reference model, in nats; None without a penalty."""
    teacher_kl: Annotated[float | None, Series("turnwise_teacher_kl")] = None
    """Mean reverse KL divergence from the teacher, in nats, estimated at trained tokens, where
    tokens without a teacher count as 0; None without teachers."""
    logprob_diff_mean: Annotated[float | None, Series("turnwise_logprob_diff_mean")] = None
    """Mean difference between the engine's and the trainer's log-prob of a token before the first
    update; at step 0, on the canary (the fixed prompt that engines score after each weight update);
    null if nothing was trained."""
    logprob_diff_max: Annotated[float | None, Series("turnwise_logprob_diff_max")] = None
    """Largest of the differences averaged in logprob_diff_mean; null if nothing was trained."""
    staleness: Annotated[
        Counts, Series("turnwise_trained_tokens_by_staleness_total", "staleness")
    ] = None
    """Trained tokens by staleness: the number of optimizer steps between the weights that sampled
    them and the weights at the start of the training step."""
    staleness_max: Annotated[int, Series("turnwise_staleness")] = 0
    """Largest staleness of a trained token; 0 if nothing was trained."""
    layouts: Counts = None
    """Updates by the layout of their micro-batches (see training.packing)."""
    train_seconds: float | None = None
    """Seconds that the slowest rank took to train."""
    train_tokens_per_s: Annotated[float, Series("turnwise_train_tokens_per_second")] = 0.0
    """Tokens computed per second by all ranks, prompts included; 0 if nothing was trained."""
    train_memory_gib: float | None = None
    """Peak memory of a rank so far, in GiB: of its GPU, or of its process on a CPU."""

    engines: int | None = None
    """Number of engines that serve the new weights."""
    weight_version: Annotated[int | None, Series("turnwise_weight_version")] = None
    """Weight version of the engines: the number of optimizer steps."""
    weight_update_seconds: Annotated[float | None, Series("turnwise_update_seconds")] = None
    """Seconds to transfer the new weights to the engines and check them; 0 without an optimizer
    step, because there are no new weights."""
    weight_update_bytes: Annotated[int | None, Series("turnwise_update_bytes")] = None
    """Bytes of the update for an engine that has the previous version (see weights.delta); 0
    without an optimizer step."""
    weights_changed: float | None = None
    """Share of the weights' values, as sent, that the step changed; None without weights.delta."""
    canary_diff_mean: float | None = None
    """Mean log-prob difference between engine and trainer on the canary prompt, of the worst
    engine; None if no weights were sent."""
    canary_diff_max: float | None = None
    """Largest such difference."""
    offloaded_gib: float | None = None
    """Trainer memory freed for the engines, in GiB; None without training.offload."""

    accuracy_heldout: Annotated[float | None, Series("turnwise_accuracy_heldout")] = None
    """Share of held-out trajectories with a reward of at least eval.success_reward; null in a step
    without evaluation, and while its evaluation beside training (eval.background) runs."""
    heldout: dict[str, float] | None = None
    """All results of the evaluation: accuracy, reward_mean, pass@k and mean@k, and the bounds of
    their 95 % intervals, such as accuracy_low; empty where accuracy_heldout is null."""
    heldout_sets: dict[str, dict[str, float]] | None = None
    """With data.eval_sets, the results of each set by name."""
    heldout_dropped: Counts = None
    """Held-out trajectories that failed, by reason: they count as wrong."""
    heldout_seconds: float | None = None
    """Seconds from the evaluation's start to its end."""
    loss_heldout: float | None = None
    """In supervised training, the mean cross-entropy of the trained tokens of held-out rows."""
    epoch: float | None = None
    """Number of epochs of supervised training so far."""
    step_seconds: Annotated[float | None, Series("turnwise_step_seconds")] = None
    """Seconds since the end of the previous step."""
    phase_seconds: Annotated[
        dict[str, float] | None,
        Series("turnwise_phase_seconds_total", "phase"),
        Series(
            "turnwise_tool_seconds_total",
            value=lambda row: (row.get("phase_seconds") or {}).get("tools", 0.0),
        ),
    ] = None
    """Seconds by phase: the phases of the loop (idle, train, write, weights, evaluate, save), and
    the waiting times of all trajectories together (generate, tools, reward, agent, teacher). A
    checkpoint is saved after its step's line is written, so `save` is the time to save the previous
    step."""

    def add_rollouts(self, batch: "Batch", dropped: Counter[str]) -> None:
        groups = batch.groups
        self.add_trajectories([t for group in groups for t in group.trajectories])
        sampled = self.sampled_tokens or 0
        self.dropped = _sorted(dropped)
        self.retried = _sorted(sum((group.retried for group in groups), Counter[str]()))
        self.groups_discarded = batch.discarded_by_reason
        others = sum(len(group.trajectories) for _, group in batch.discarded)
        self.trajectories_discarded = others or None
        made = [*groups, *(group for _, group in batch.discarded)]
        self._add_judging(sum((group.judging for group in made), Counter[str]()))
        self.rollout_seconds = batch.seconds
        self.rollout_tokens_per_s = sampled / batch.seconds if batch.seconds else 0.0
        tokens, seconds = defaultdict[str, int](int), defaultdict[str, float](float)
        for group in groups:
            for trajectory in group.trajectories:
                for call in group.calls.get(trajectory.sample_index, ()):
                    tokens[call.worker] += trajectory.turns[call.turn].sampled_tokens
                    seconds[call.worker] += call.ended - call.asked - (call.queued or 0.0)
        self.worker_tokens_per_s = {
            name: tokens[name] / spent for name, spent in sorted(seconds.items()) if spent > 0
        }
        pools = sum((Counter(each) for each in batch.pools.values()), Counter[str]())
        self.pools = {name: pools[name] for each in batch.pools.values() for name in each} or None
        for name in sorted({group.environment for group in made} - {""}):
            own = [group for group in groups if group.environment == name]
            rewards = [t.reward or 0.0 for group in own for t in group.trajectories]
            if rewards:
                self._environment(name)["reward_mean"] = mean(rewards)
            ended = [group for group in batch.ended if group.environment == name]
            self._environment(name).update(
                trajectories=len(rewards),
                dropped=sum(group.dropped.total() for group in ended),
                groups=len(own),
            )
            out = [(why, group) for why, group in batch.discarded if group.environment == name]
            if out:
                self._environment(name).update(
                    groups_discarded=_sorted(Counter(why for why, _ in out)),
                    trajectories_discarded=sum(len(group.trajectories) for _, group in out),
                )
        for name in batch.pools.keys() - {""}:
            self._environment(name)["pools"] = batch.pools[name]

    def add_trajectories(self, trajectories: Sequence["Trajectory"]) -> None:
        """Add the metrics of finished trajectories."""
        rewards = [t.reward or 0.0 for t in trajectories]
        self.reward_mean = mean(rewards)
        self.reward_std = stdev(rewards) if len(rewards) > 1 else None
        parts = _by_name([t.reward_parts for t in trajectories])
        self.reward_parts = {name: mean(values) for name, values in parts.items()}
        self.reward_parts_std = {
            name: stdev(values) if len(values) > 1 else 0.0 for name, values in parts.items()
        }
        own = _by_name([t.metrics for t in trajectories])
        self.env = {name: mean(values) for name, values in own.items()} or None
        self.trajectories = len(trajectories)
        self.statuses = _sorted(Counter(t.status for t in trajectories))
        self.events = _sorted(sum((t.events for t in trajectories), Counter[str]()))
        self.turns_mean = mean([len(t.turns) for t in trajectories])
        self.sampled_tokens = sum(t.sampled_tokens for t in trajectories)
        played = defaultdict[str, list[float]](list)  # rewards of each policy's players
        for t in trajectories:
            turns = zip(t.turns, t.turn_players, strict=False)
            by = {player: turn.adapter for turn, player in turns}
            for player, policy in by.items():
                if policy:
                    played[policy].append(t.player_rewards.get(player, t.reward or 0.0))
        if played:
            self._add_policies({n: {"reward_mean": mean(r)} for n, r in sorted(played.items())})
        ended = [t for t in trajectories if t.status == "completed"]
        self.completion_tokens = {}
        for whose, lengths in (("", trajectories), ("ended_", ended)):
            if tokens := [t.sampled_tokens for t in lengths]:
                named = ("mean", mean(tokens)), ("min", min(tokens)), ("max", max(tokens))
                self.completion_tokens |= {f"{whose}{name}": float(n) for name, n in named}

    def _add_judging(self, counts: Counter[str]) -> None:
        self.judges = _sorted(Counter(self.judges or {}) + counts) or None

    def _environment(self, name: str) -> JsonObject:
        """Return the metrics of one of several environments, to be extended."""
        self.environments = self.environments or {}
        return self.environments.setdefault(name, {})

    def add_samples(self, batch: "SampleBatch") -> None:
        self.groups_without_signal = batch.groups_without_signal
        self.stale_groups = batch.stale_groups
        self.stale_tokens = batch.stale_tokens
        self.overlong = batch.overlong
        self.truncated_masked = batch.truncated
        self.exact_percent = batch.report.percent
        self.forked = _sorted(batch.report.forked)
        self.trained_tokens = 0

    def add(self, metrics: JsonObject) -> None:
        """Add metrics of the trainer or of a weight update, by their names."""
        for name, value in metrics.items():
            if name == "policies":
                self._add_policies(value)
            else:
                setattr(self, name, value)

    def _add_policies(self, metrics: dict[str, JsonObject]) -> None:
        before = self.policies or {}
        self.policies = before | {n: before.get(n, {}) | own for n, own in metrics.items()}

    def add_evaluation(self, evaluation: "Evaluation | None") -> None:
        """Add an evaluation on held-out problems; None for a step without one."""
        self._add_judging(evaluation.judging if evaluation else Counter())
        self.accuracy_heldout = evaluation.accuracy if evaluation else None
        self.heldout = evaluation.summary if evaluation else {}
        if evaluation is None:
            return
        self.heldout_sets = evaluation.sets or None
        self.heldout_dropped = _sorted(evaluation.dropped)
        self.heldout_seconds = evaluation.seconds
        for name, summary in evaluation.environments.items():
            self._environment(name)["heldout"] = summary

    @classmethod
    def from_json(cls, row: JsonObject) -> "StepMetrics":
        """Read metrics that `to_json` returned."""
        return cls(**{item.name: row[item.name] for item in fields(cls) if item.name in row})

    def to_json(self) -> JsonObject:
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        null = {"logprob_diff_mean", "logprob_diff_max"}
        if self.heldout is not None:
            null.add("accuracy_heldout")
        return {name: value for name, value in values.items() if value is not None or name in null}


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _by_name(rows: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Return the numbers of each name, from the rows that have it."""
    names = sorted({name for row in rows for name in row})
    return {name: [row[name] for row in rows if name in row] for name in names}


def _sorted(counts: Counter[str]) -> dict[str, int]:
    return dict(sorted(counts.items()))


@cache
def meanings() -> dict[str, str]:
    """Return the docstring of each metric."""
    (tree,) = ast.parse(inspect.getsource(StepMetrics)).body
    assert isinstance(tree, ast.ClassDef)
    return {
        ast.unparse(line.target): " ".join(str(ast.literal_eval(following.value)).split())
        for line, following in zip(tree.body, tree.body[1:], strict=False)
        if isinstance(line, ast.AnnAssign) and isinstance(following, ast.Expr)
    }


@cache
def series() -> list[tuple[str, Series]]:
    """Return the series for Prometheus, each with the name of its metric."""
    return [
        (item.name, each)
        for item in fields(StepMetrics)
        for each in getattr(item.type, "__metadata__", ())
    ]
