"""Trajectories in the making: agent loops, tools, environments, groups."""

from turnwise.rollout.agent_loop import AgentLoop, RolloutContext
from turnwise.rollout.environment import Environment, load_eval_rows, load_rows
from turnwise.rollout.runner import Group, Problem, Runner, check_failures

__all__ = [
    "AgentLoop",
    "Environment",
    "Group",
    "Problem",
    "RolloutContext",
    "Runner",
    "check_failures",
    "load_eval_rows",
    "load_rows",
]
