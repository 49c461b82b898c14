"""Samples in, better weights out: the policy, its loss, its checkpoints."""

from turnwise.training.grpo import group_advantages
from turnwise.training.sample import Sample

__all__ = ["Sample", "group_advantages"]
