"""Placement of a fleet's workers: each worker has a placement group, until it leaves or its node
dies.

At the beginning of a run, a worker waits up to `engine.start_timeout` seconds for room; later, it
waits without a deadline. Its group tells Ray's autoscaler which resources it needs, and Ray places
the group on nodes that join.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from itertools import islice

import ray
from ray.actor import ActorHandle as RayActor
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from turnwise.config import NO_DEADLINE, Config
from turnwise.core.actor import create_placement_group, remove_bundles
from turnwise.core.aio import run_in_thread
from turnwise.core.ray import outlives_run
from turnwise.serving.colocated.host import on_actors
from turnwise.serving.engine_host import EngineHost
from turnwise.serving.worker_handle import WorkerHandle

logger = logging.getLogger(__name__)

_SEEDS, _SEEDS_OF_START = 2**32, 2**16
"""Number of possible seeds, and the difference between the seeds of two successive starts of a
worker; this difference is larger than the number of workers."""


class WorkerStarter:
    """Starts each worker in bundles of its own; a restarted worker gets the same bundles.

    Args:
        gpus: GPUs for each device of an engine; a value below 1 is the share of one GPU's memory.
        hosts: Handles of `WorkerHost`s, by name: each worker runs its model in the next
            `engine.tensor_parallel_size` of them. None runs the models in the workers' own
            processes.
        host: Class of the workers' actors.
    """

    def __init__(
        self,
        config: Config,
        gpus: float,
        hosts: Mapping[str, RayActor] | None = None,
        host: type[EngineHost] = EngineHost,
    ) -> None:
        self._host = host
        self._config = config.with_api_key()  # workers may serve HTTP themselves
        self._share = 0 if hosts else gpus
        size = config.engine.devices
        self._bundles = size if config.serving.spread and not hosts else 1
        """Number of bundles of one worker: one for all of its devices, or one for each."""
        self._gpus = self._share * size / self._bundles
        self._hosts = hosts
        self._groups: dict[int, PlacementGroup] = {}  # by the worker's index
        self._starts: Counter[int] = Counter()  # number of starts of each worker

    async def __call__(self, name: str, index: int) -> WorkerHandle:
        """Start a worker in its bundles.

        The worker's seed differs from the seeds of all other workers, and of earlier workers with
        the same index, because engines with equal seeds would sample the same tokens.
        """
        config, group = self._config, await self._group_of(name, index)
        seed = config.seed + index + self._starts[index] * _SEEDS_OF_START
        self._starts[index] += 1
        if self._hosts is not None:
            size = config.engine.tensor_parallel_size
            own = dict(islice(self._hosts.items(), index * size, (index + 1) * size))
            # Calls may have to wait until the hosts have finished a training step.
            engine = on_actors(config.engine, own, config.training.step_timeout)
            config = config.model_copy(update={"engine": engine})
        spread = self._bundles > 1
        return await WorkerHandle.start(
            config,
            name=name,
            num_gpus=0 if spread else self._gpus,
            fraction_of_gpus=self._share if 0 < self._share < 1 else 1.0,
            seed=seed % _SEEDS,
            placement=PlacementGroupSchedulingStrategy(group, 0),
            bundle_indices=range(self._bundles) if spread else None,
            host=self._host,
        )

    async def _group_of(self, name: str, index: int) -> PlacementGroup:
        """Return a worker's group, once there is room for it."""
        config, group = self._config, self._groups.get(index)
        if group is not None and not await run_in_thread(_has_place, group, self._bundles):
            logger.warning("%s waits for room in the cluster: its node is gone", name)
            self.leave(index)
            group = None
        if group is None:
            begins = index < config.serving.min_workers and not self._starts[index]
            group = self._groups[index] = await create_placement_group(
                self._bundles,
                self._gpus,
                config.serving.resources,
                f"devices of {name}",
                "serving",
                config.engine.start_timeout if begins else NO_DEADLINE,
            )
        return group

    def leave(self, index: int) -> None:
        """Give back the bundles of a worker."""
        if (group := self._groups.pop(index, None)) is not None:
            remove_bundles(group)

    def end(self) -> None:
        """Give back all bundles if Ray goes on."""
        for index in [*self._groups] if outlives_run() else ():
            self.leave(index)


def _has_place(group: PlacementGroup, bundles: int) -> bool:
    """Return whether a group's bundles are on live nodes; this asks Ray's head, so it takes
    time."""
    nodes = placement_group_table(group)["bundles_to_node_id"]
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    return all(nodes.get(bundle) in alive for bundle in range(bundles))
