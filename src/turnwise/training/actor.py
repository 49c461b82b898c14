"""The process of a trainer's rank, which may also compute for an inference engine."""

import os
from pathlib import Path

import ray

from turnwise.config import Config
from turnwise.core import logs
from turnwise.serving.colocated.host import WorkerHost
from turnwise.training.batching import Layout
from turnwise.weights.process_group import open_store


class TrainerActor:
    """The process of one rank of the policy."""

    def __init__(self) -> None:
        logs.follow()

    def node(self) -> str:
        return str(ray.util.get_node_ip_address())

    def open_store(self, host: str) -> str:
        """Open the ranks' rendezvous store on one address of this node; return host:port."""
        # Kept open: a port that is only looked up may be taken a moment later.
        self._store = open_store(host, 0)
        return f"{host}:{self._store.port}"

    def start(
        self, config: Config, folder: str, rank: int, ranks: int, address: str
    ) -> tuple[int, Layout, str]:
        """Build the rank; return its process's id, and the ranks' layout of micro-batches with a
        warning about it."""
        from turnwise.training.rank import TrainerRank

        policy = TrainerRank(config, Path(folder), rank=rank, ranks=ranks, address=address)
        self._policy = policy
        return os.getpid(), policy.layout, policy.layout_warning

    def call(self, method: str, *args: object) -> object:
        result: object = getattr(self._policy, method)(*args)
        return result

    def ping(self) -> None:
        pass


class ColocatedTrainerActor(TrainerActor, WorkerHost):
    """One rank of the policy, and one rank of an engine's model in the same process."""
