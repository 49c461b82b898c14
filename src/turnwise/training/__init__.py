"""Training of weights from samples: the trainer's ranks, the algorithms, and the checkpoints."""

from turnwise.training.sample import Sample

__all__ = ["Sample"]
