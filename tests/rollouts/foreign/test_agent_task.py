"""Rows whose task and reward are the agent's."""

import pytest

import turnwise
from turnwise.errors import TrajectoryError
from turnwise.rollouts.environment import load_environment
from turnwise.trajectory import Trajectory


def test_the_agents_reward_is_the_only_one() -> None:
    task = load_environment("turnwise:AgentTask")({"idx": 3, "prompt": "Add."})
    assert isinstance(task, turnwise.AgentTask)
    assert task.problem == "Add."
    assert load_environment("turnwise:AgentTask")({"idx": 3}).problem
    with pytest.raises(TrajectoryError, match=r"rollout\.agent_rewards is false"):
        task.reward(Trajectory("rows:1"))
