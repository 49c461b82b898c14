"""Alarms, from lines of metrics.jsonl."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from turnwise.config import Config, ModelConfig, RolloutConfig, TrainingConfig, dump_config
from turnwise.observe.alarms import alarm_finder, alarms_of_run, find_alarms

HEALTHY: dict[str, Any] = {
    "reward_mean": 0.5,
    "groups_without_signal": 2,
    "trajectories": 64,
    "statuses": {"completed": 60, "length": 4},
    "dropped": {},
    "events": {"tool_call": 100, "tool_error": 3},
    "logprob_diff_mean": 1e-6,
    "entropy": 1.0,
    "step_seconds": 10.0,
    "phase_seconds": {"idle": 4.0, "train": 6.0},
    "staleness": {"0": 100, "1": 20},
    "worker_tokens_per_s": {"worker-0": 30.0, "worker-1": 50.0, "worker-2": 55.0},
}


def run(*rows: dict[str, Any]) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl: a healthy run's, with changes; the first is that of step 0."""
    steps = [HEALTHY | row | {"step": step} for step, row in enumerate(rows, start=1)]
    return [{"step": 0, "accuracy_heldout": 0.1}, *steps]


def make(staleness: int = 0, updates: int = 1, **alarms: Any) -> Config:
    return Config(
        model=ModelConfig(path="m"),
        rollout=RolloutConfig(prompts_per_step=8),
        training=TrainingConfig(max_staleness=staleness, updates_per_step=updates),
        alarms=alarms,
    )


BAD: dict[str, dict[str, Any]] = {
    "no_signal": {"groups_without_signal": 7},
    "truncated": {"statuses": {"length": 30, "context_full": 10, "completed": 24}},
    "tool_errors": {"events": {"tool_call": 10, "tool_error": 3, "tool_timeout": 2}},
    "dropped": {"dropped": {"environment_error": 16}},
    "logprob_growth": {"logprob_diff_mean": 0.01},
    "entropy_left": {"entropy": 0.01},
    "idle": {"phase_seconds": {"idle": 9.5, "train": 0.5}},
    "slow_worker": {"worker_tokens_per_s": {"worker-0": 20.0, "worker-1": 50.0, "worker-2": 55}},
    "stale": {"staleness": {"0": 10, "1": 90}},
    "reward_left": {"reward_mean": 0.1},
}
SAID = {
    "no_signal": "88% of the groups have no signal: all their rewards are equal; raise sampling.n",
    "truncated": "62% of the trajectories end at their maximum length",
    "tool_errors": "50% of the tool calls fail (in the last step tool_error 3, tool_timeout 2)",
    "dropped": "20% of the trajectories fail and are dropped (in the last step environment_e",
    "logprob_growth": "the log-probs of engine and trainer differ by 0.01 on average, 1e-06 at",
    "entropy_left": "the policy's entropy fell from 1 to 0.01 nats",
    "idle": "the trainer waits for rollouts during 95% of a step; more engines",
    "slow_worker": "worker-0 samples 20 tokens/s in a turn, 38% of what the other workers do",
    "stale": "90% of the trained tokens are as old as training.max_staleness allows (1 step): ",
    "reward_left": "the mean reward fell from 0.500 to 0.100",
}


@pytest.mark.parametrize("name", BAD)
def test_an_alarm_is_raised_once_after_its_steps(name: str) -> None:
    config = make(staleness=1)
    rows = run(*[{}] * 5, *[BAD[name]] * 9)
    (alarm,) = find_alarms(rows, config)
    assert (alarm.name, alarm.step) == (name, 8)
    assert alarm.message.startswith(SAID[name])
    share = name in ("no_signal", "truncated", "tool_errors", "dropped", "idle", "stale")
    assert alarm.message.endswith(" (a mean over 3 steps)") == share
    assert find_alarms(rows[:8], config) == []
    assert find_alarms(rows, make(staleness=1, **{name: None})) == []
    assert find_alarms(rows, make(staleness=1, steps=4))[0].step == 9


@pytest.mark.parametrize(
    ("rewards", "raised"),
    [
        ([0.5] * 20, True),
        ([0.5, 0.6] * 10, True),
        ([0.02 * step for step in range(20)], False),
        ([0.5] * 19, False),
    ],
)
def test_a_reward_that_does_not_rise_is_an_alarm(rewards: list[float], raised: bool) -> None:
    rows = run(*({"reward_mean": reward} for reward in rewards))
    alarms = find_alarms(rows, make(flat_steps=20))
    assert [alarm.name for alarm in alarms] == ["flat_steps"] * raised
    assert find_alarms(rows, make(flat_steps=0)) == []


def test_a_reward_that_varies_has_not_fallen() -> None:
    rewards = [0.0, 0.0, 0.09, 0.0, 0.0, 0.0, 0.0]
    assert find_alarms(run(*({"reward_mean": reward} for reward in rewards)), make()) == []


def test_staleness_counts_versions_and_its_bound_counts_steps() -> None:
    rows = run(*[{"staleness": {"0": 10, "2": 90}}] * 5)
    assert [alarm.name for alarm in find_alarms(rows, make(staleness=1, updates=2))] == ["stale"]
    assert find_alarms(rows, make(staleness=2, updates=2)) == []


def test_steps_without_some_metrics_raise_nothing() -> None:
    """Those that trained nothing have no entropy, and older runs lack other metrics."""
    bare = {"step": 1, "trajectories": 8, "reward_mean": 0.0}
    find = alarm_finder(make())
    for step in range(1, 9):
        assert find(bare | {"step": step}) == []


def test_a_threshold_that_is_met_is_no_alarm() -> None:
    assert find_alarms(run(*[{"groups_without_signal": 4}] * 5), make()) == []


@pytest.mark.parametrize("name", ["tool_errors", "slow_worker"])
def test_a_command_in_an_alarm_names_the_run(name: str, tmp_path: Path) -> None:
    rows = run(*[{}] * 5, *[BAD[name]] * 9)
    config = make().model_copy(update={"output_dir": "my runs", "name": "a"})
    (alarm,) = find_alarms(rows, config)
    assert re.search(r"`turnwise (show|trace timeline) 'my runs/a'", alarm.message)
    moved = tmp_path / "moved"
    moved.mkdir()
    (moved / "config.yaml").write_text(dump_config(config))
    (moved / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (alarm,) = alarms_of_run(moved)
    assert f" {moved}" in alarm.message
    assert "RUN" not in alarm.message
