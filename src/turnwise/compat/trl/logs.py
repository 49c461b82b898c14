"""TRL's names for a run's metrics: `state.log_history`, and the results of `evaluate`.

Every record has both TRL's names and our own names, as in metrics.jsonl.
"""

from collections import defaultdict
from collections.abc import Sequence

from turnwise.config import Config
from turnwise.core.json_types import JsonObject
from turnwise.observe.metrics import StepMetrics
from turnwise.rollouts import Group
from turnwise.trajectory import Trajectory

_NAMES = {
    "phi_seq_mean": "vespo/phi_seq_mean",
    "correction": "sampling/importance_sampling_ratio/mean",
    "logprob_diff_mean": "sampling/sampling_logp_difference/mean",
    "logprob_diff_max": "sampling/sampling_logp_difference/max",
    "step_seconds": "step_time",
}
_CLIPPED = "clip_ratio/region_mean"
_OF_TRAINING = ("staleness_max", "train_tokens_per_s")
"""Metrics of every record that have no meaning in an evaluation."""


class TrlNames:
    """Converts the metrics of a run with this configuration to TRL's names."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def log_history(self, records: Sequence[JsonObject], rows: int) -> list[JsonObject]:
        """Return a record for each training step and each evaluation of a run, in their order.

        Args:
            records: Lines of metrics.jsonl.
            rows: Number of rows of the training data.
        """
        history: list[JsonObject] = []
        # In TRL, the record of a step whose rewards are all equal has these values, too; our record
        # lacks them.
        silent = {
            "loss": 0.0,
            "grad_norm": 0.0,
            "learning_rate": self._config.learning_rate,
        }
        for record in records:
            step = record["step"]
            place: JsonObject = {
                "step": step * self._config.training.optimizer_steps,
                "epoch": step * self._config.rollout.prompts_per_step / rows,
            }
            if step:
                silent["learning_rate"] = record.get("learning_rate") or silent["learning_rate"]
                history.append({**silent, **self.names(record), **place})
            if heldout := record.get("heldout"):
                sets = {f"{of}_": each for of, each in (record.get("heldout_sets") or {}).items()}
                measured = {
                    f"eval_{of}{name}": value
                    for of, each in {"": heldout, **sets}.items()
                    for name, value in {**each, "reward": each["reward_mean"]}.items()
                }
                history.append({**measured, **place})
        return history

    def names(self, record: JsonObject) -> JsonObject:
        """Return a record of metrics under our names and under TRL's.

        Means of the values that reward functions log (`log_metric`) keep their names, as in TRL.
        """
        named: JsonObject = {"reward": record["reward_mean"]}
        for name, values in (("mean", "reward_parts"), ("std", "reward_parts_std")):
            for part, value in (record.get(values) or {}).items():
                named[f"rewards/{part}/{name}"] = value
        tokens = record.get("completion_tokens") or {}
        for name in ("mean", "min", "max") if tokens else ():
            named[f"completions/{name}_length"] = tokens[name]
            named[f"completions/{name}_terminated_length"] = tokens.get(f"ended_{name}", 0.0)
        if (equal := record.get("groups_without_signal")) is not None:
            named["frac_reward_zero_std"] = equal / self._config.rollout.prompts_per_step
        if trajectories := record.get("trajectories"):
            ended = (record.get("statuses") or {}).get("completed", 0)
            named["completions/clipped_ratio"] = 1 - ended / trajectories
            if self._config.rollout.max_turns > 1:
                events = record.get("events") or {}
                calls = events.get("tool_call", 0)
                # Other tool_ events are failed calls, except tool_malformed, which is not a call.
                no_failures = calls + events.get("tool_malformed", 0)
                failed = sum(n for k, n in events.items() if k.startswith("tool_")) - no_failures
                named["tools/call_frequency"] = calls / trajectories
                named["tools/failure_frequency"] = failed / calls if calls else 0.0
        clipped = "cispo_clip_ratio" if self._config.algorithm.loss.name == "cispo" else _CLIPPED
        measured = {**(record.get("loss_metrics") or {}), **record}
        for ours, theirs in {**_NAMES, "clip_fraction": clipped}.items():
            if measured.get(ours) is not None:
                named[theirs] = measured[ours]
        return {**(record.get("env") or {}), **record, **named}

    def of_evaluation(self, trajectories: Sequence[Trajectory]) -> JsonObject:
        """Return an evaluation's metrics under TRL's names and ours, `loss` included."""
        metrics = StepMetrics(loss=self.evaluation_loss(trajectories))
        metrics.add_trajectories(trajectories)
        named = self.names(metrics.to_json())
        return {
            name: value
            for name, value in named.items()
            if isinstance(value, int | float) and name not in _OF_TRAINING
        }

    def evaluation_loss(self, trajectories: Sequence[Trajectory]) -> float:
        """Return the policy's loss on its own answers, which is TRL's evaluation loss.

        Every ratio is 1, so a token's loss is minus its advantage. The loss is reduced as in
        training, without KL penalty and entropy bonus.
        """
        from turnwise.training.samples import make_samples  # imports torch

        groups = defaultdict[str, list[Trajectory]](list)
        for trajectory in trajectories:
            groups[trajectory.problem_id].append(trajectory)
        batch = make_samples(
            [Group(name, found) for name, found in groups.items()], self._config, 0
        )
        sums = count = 0.0
        reduction, constant = self._config.algorithm.reduction, self._config.max_response_tokens
        for sample in batch.samples:
            sums -= sample.advantage * (1 if reduction == "sequence_mean" else sample.trained)
            count += {"token_mean": sample.trained, "constant": constant}.get(reduction, 1)
        return sums / count if count else 0.0
