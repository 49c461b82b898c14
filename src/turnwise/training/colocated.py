"""The process of a trainer's rank that also computes for an inference engine."""

from turnwise.serving.colocated.host import WorkerHost
from turnwise.training.trainer_group import TrainerActor


class ColocatedTrainerActor(TrainerActor, WorkerHost):
    """One rank of the policy, and one rank of an engine's model in the same process."""
