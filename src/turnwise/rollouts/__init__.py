"""Rollouts: agent loops, tools, environments and rewards, run in groups of trajectories."""

from turnwise.rollouts.agent_loop import AgentLoop, RolloutContext
from turnwise.rollouts.data import load_rows
from turnwise.rollouts.environment import Environment
from turnwise.rollouts.group import Group, check_failures
from turnwise.rollouts.problems import Problem, ProblemStream
from turnwise.rollouts.producer import Batch, GroupProducer
from turnwise.rollouts.runner import Runner
from turnwise.rollouts.sampler import TrajectorySampler

__all__ = [
    "AgentLoop",
    "Batch",
    "Environment",
    "Group",
    "GroupProducer",
    "Problem",
    "ProblemStream",
    "RolloutContext",
    "Runner",
    "TrajectorySampler",
    "check_failures",
    "load_rows",
]
