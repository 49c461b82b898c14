"""TRL's names of what a run reports: `state.log_history`, and the results of `evaluate`.

Every record also has our own names, those of metrics.jsonl, beside TRL's.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from turnwise.config import Config
from turnwise.core.json_types import JsonObject
from turnwise.observe.metrics import StepMetrics
from turnwise.trajectory import Trajectory

_CLIPPED = {"cispo": "cispo_clip_ratio"}
"""TRL's names of the share of clipped tokens, for losses that have one of their own."""
_OF_TRAINING = ("staleness_max", "train_tokens_per_s")
"""Metrics that every record has, and that mean nothing in an evaluation."""


def log_history(records: Sequence[JsonObject], config: Config) -> list[JsonObject]:
    """Return a record for each training step and each evaluation of a run, in their order.

    Args:
        records: Lines of metrics.jsonl.
    """
    return [each for record in records for each in _entries(record, config)]


def _entries(record: JsonObject, config: Config) -> Iterator[JsonObject]:
    place = {"step": record["step"] * config.training.versions_per_step}
    if record["step"]:
        yield {**trl_names(record, config), **place}
    if heldout := record.get("heldout"):
        sets = {"eval": heldout}
        sets |= {f"eval_{of}": each for of, each in (record.get("heldout_sets") or {}).items()}
        measured = {
            f"{of}_{name}": value for of, each in sets.items() for name, value in each.items()
        }
        measured |= {f"{of}_reward": each["reward_mean"] for of, each in sets.items()}
        yield {**measured, **place}


def trl_names(record: JsonObject, config: Config) -> JsonObject:
    """Return a record of metrics under our names, with TRL's beside them.

    Means of what reward functions log (`log_metric`) have their own names, as in TRL.
    """
    named: JsonObject = {"reward": record["reward_mean"]}
    for name, values in (("mean", "reward_parts"), ("std", "reward_parts_std")):
        for part, value in (record.get(values) or {}).items():
            named[f"rewards/{part}/{name}"] = value
    trajectories, tokens = record.get("trajectories") or 0, record.get("completion_tokens") or {}
    ended = (record.get("statuses") or {}).get("completed", 0)
    if trajectories:
        named["completions/clipped_ratio"] = 1 - ended / trajectories
    for name in ("mean", "min", "max"):
        if name in tokens:
            named[f"completions/{name}_length"] = tokens[name]
            named[f"completions/{name}_terminated_length"] = tokens.get(f"ended_{name}", 0.0)
    if (equal := record.get("groups_without_signal")) is not None:
        named["frac_reward_zero_std"] = equal / config.rollout.prompts_per_step
    events = record.get("events") or {}
    calls = events.get("tool_call", 0)
    if trajectories and config.rollout.max_turns > 1:
        failed = sum(n for k, n in events.items() if k.startswith("tool_")) - calls
        failed -= events.get("tool_malformed", 0)  # which is no call
        named["tools/call_frequency"] = calls / trajectories
        named["tools/failure_frequency"] = failed / calls if calls else 0.0
    if (weight := (record.get("loss_metrics") or {}).get("phi_seq_mean")) is not None:
        named["vespo/phi_seq_mean"] = weight
    clipped = _CLIPPED.get(config.algorithm.loss.name, "clip_ratio/region_mean")
    for ours, theirs in (
        ("clip_fraction", clipped),
        ("correction", "sampling/importance_sampling_ratio/mean"),
        ("logprob_diff_mean", "sampling/sampling_logp_difference/mean"),
        ("logprob_diff_max", "sampling/sampling_logp_difference/max"),
        ("step_seconds", "step_time"),
    ):
        if record.get(ours) is not None:
            named[theirs] = record[ours]
    return {**(record.get("env") or {}), **record, **named}


def evaluation_names(trajectories: Sequence[Trajectory], config: Config) -> JsonObject:
    """Return TRL's metrics of an evaluation's trajectories, `loss` included."""
    metrics = StepMetrics()
    metrics.add_trajectories(trajectories)
    record = {**metrics.to_json(), "loss": evaluation_loss(trajectories, config)}
    named = trl_names(record, config)
    return {
        name: value
        for name, value in named.items()
        if isinstance(value, int | float) and name not in _OF_TRAINING
    }


def evaluation_loss(trajectories: Sequence[Trajectory], config: Config) -> float:
    """Return the policy's loss on its own answers, which TRL calls an evaluation's loss: minus the
    advantages, since every ratio is 1, reduced as in training. The KL penalty is left out."""
    from turnwise.training.algorithms import make_algorithm  # imports torch

    groups = defaultdict[str, list[Trajectory]](list)
    for trajectory in trajectories:
        groups[trajectory.problem_id].append(trajectory)
    advantage = make_algorithm(config.algorithm).advantage
    if advantage.per_turn:
        return 0.0  # TRL has none of these
    if advantage.multi_objective:
        weights = {entry.label: entry.weight for entry in config.rollout.rewards}
        parts = [[t.reward_parts for t in g] for g in groups.values()]
        of_groups = advantage.of_objectives(parts, weights if len(weights) > 1 else {})
    else:
        of_groups = advantage.of_groups([[t.reward or 0.0 for t in g] for g in groups.values()])
    sums = count = 0.0
    reduction, longest = config.algorithm.reduction, config.rollout.max_response_tokens
    constant = longest or config.sampling.max_tokens * config.rollout.max_turns
    for group, values in zip(groups.values(), of_groups, strict=True):
        for trajectory, value in zip(group, values or [0.0] * len(group), strict=True):
            tokens = trajectory.sampled_tokens
            sums -= value if reduction == "sequence_mean" else value * tokens
            count += {"token_mean": tokens, "constant": constant}.get(reduction, 1)
    return sums / count if count else 0.0
