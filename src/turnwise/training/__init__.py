"""Samples in, better weights out: the policy's ranks, its algorithms, its checkpoints."""

from turnwise.training.sample import Sample

__all__ = ["Sample"]
