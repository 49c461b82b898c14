"""Rollouts: agent loops, tools, environments and rewards, run in groups of trajectories."""

from turnwise.rollout.agent_loop import AgentLoop, RolloutContext
from turnwise.rollout.data import load_eval_rows, load_rows, load_training_rows
from turnwise.rollout.environment import Environment
from turnwise.rollout.group import Group, check_failures
from turnwise.rollout.problems import Problem, ProblemStream
from turnwise.rollout.producer import Batch, GroupProducer
from turnwise.rollout.runner import Runner
from turnwise.rollout.sampler import RolloutSampler

__all__ = [
    "AgentLoop",
    "Batch",
    "Environment",
    "Group",
    "GroupProducer",
    "Problem",
    "ProblemStream",
    "RolloutContext",
    "RolloutSampler",
    "Runner",
    "check_failures",
    "load_eval_rows",
    "load_rows",
    "load_training_rows",
]
