"""Placement of a fleet's workers: a placement group for the first ones, one for each that joins.

When a node dies, Ray moves its bundles to another node. A worker that joins later waits for room as
long as it takes, and its bundles are given back when it leaves. Its group tells Ray's autoscaler
what is wanted, and Ray itself finds the nodes that join.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from itertools import islice

import ray
from ray.actor import ActorHandle as RayActor
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from turnwise.config import NO_DEADLINE, Config
from turnwise.core.actor import create_placement_group, give_back
from turnwise.core.aio import run_in_thread
from turnwise.core.deadlines import deadline
from turnwise.errors import InputError
from turnwise.serving.colocated.host import on_actors
from turnwise.serving.openai.address import with_api_key
from turnwise.serving.worker_handle import WorkerHandle

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
_SEEDS, _SEEDS_OF_START = 2**32, 2**16
"""Number of seeds, and the difference between those of a worker's first start and its second: more
than there are workers."""


class WorkerStarter:
    """Starts each worker in bundles of its own; a restarted worker gets the same bundles.

    Args:
        gpus: GPUs for each device of an engine; a value below 1 is the share of one GPU's memory.
        hosts: Handles of `WorkerHost`s, by name: each worker runs its model in the next
            `engine.tensor_parallel_size` of them. None means the workers' own processes.
    """

    def __init__(
        self, config: Config, gpus: float, hosts: Mapping[str, RayActor] | None = None
    ) -> None:
        self._config = with_api_key(config)  # workers may serve HTTP themselves
        self._share = 0 if hosts else gpus
        size = config.engine.devices
        self._bundles = size if config.serving.spread and not hosts else 1
        """Number of bundles of one worker: one for all of its devices, or one for each."""
        self._gpus = self._share * size / self._bundles
        self._hosts = hosts
        self._group: PlacementGroup | None = None  # of the workers that the run begins with
        self._groups: dict[int, PlacementGroup] = {}  # of each other one, by its index
        self._making = asyncio.Lock()
        self._starts: Counter[int] = Counter()  # number of starts of each worker

    async def __call__(self, name: str, index: int) -> WorkerHandle:
        """Start a worker in its bundles.

        Its seed differs from that of any other worker and of earlier workers with the same index:
        engines with equal seeds would sample the same tokens.
        """
        config = self._config
        if index < config.serving.fewest_workers:
            bundles = range(index * self._bundles, (index + 1) * self._bundles)
            group = await self._first_group(name, bundles)
        else:
            bundles, group = range(self._bundles), await self._own_group(name, index)
        seed = config.seed + index + self._starts[index] * _SEEDS_OF_START
        self._starts[index] += 1
        if self._hosts is not None:
            size = config.engine.tensor_parallel_size
            own = dict(islice(self._hosts.items(), index * size, (index + 1) * size))
            # The hosts may be training.
            engine = on_actors(config.engine, own, config.training.step_timeout)
            config = config.model_copy(update={"engine": engine})
        spread = len(bundles) > 1
        return await WorkerHandle.start(
            config,
            name=name,
            num_gpus=0 if spread else self._gpus,
            fraction_of_gpus=self._share if 0 < self._share < 1 else 1.0,
            seed=seed % _SEEDS,
            placement=PlacementGroupSchedulingStrategy(group, bundles[0]),
            bundle_indices=bundles if spread else None,
        )

    async def _first_group(self, name: str, bundles: range) -> PlacementGroup:
        """Return the group of the workers that the run begins with, once a worker's bundles are on
        live nodes."""
        seconds = self._config.engine.start_timeout
        async with self._making:
            if self._group is None:
                count = self._config.serving.fewest_workers * self._bundles
                self._group = await self._make_group(count, "workers", seconds)
        group, warned = self._group, False
        lacking = f"the cluster has no room for {name}, whose node is gone"
        async with deadline(seconds, f"{lacking}, and none turned up", "serving.resources, GPUs"):
            while not await run_in_thread(_has_place, group, bundles):
                if not warned:
                    warned = True
                    logger.warning("%s; waiting %g s for some to turn up", lacking, seconds)
                await asyncio.sleep(_POLL_SECONDS)
        return group

    async def _own_group(self, name: str, index: int) -> PlacementGroup:
        """Return the group of a worker that joins during the run, once there is room for it."""
        group = self._groups.get(index)
        if group is not None and not await run_in_thread(_has_place, group, range(self._bundles)):
            self.leave(index)
            group = None
        if group is None:
            logger.info("%s joins when the cluster has room for it", name)
            group = await self._make_group(self._bundles, f"devices of {name}", NO_DEADLINE)
            self._groups[index] = group
        return group

    async def _make_group(self, count: int, who: str, seconds: float) -> PlacementGroup:
        resources = self._config.serving.resources
        return await create_placement_group(count, self._gpus, resources, who, "serving", seconds)

    def leave(self, index: int) -> None:
        """Give the bundles of a worker back that joined during the run; those of the workers that
        it began with are one reservation, which ends with the run."""
        if (group := self._groups.pop(index, None)) is not None:
            give_back(group)

    def end(self) -> None:
        """Give all bundles back, where Ray may go on: it is that of the hosts."""
        if self._hosts is not None and self._group is not None:
            give_back(self._group)
            self._group = None


def _has_place(group: PlacementGroup, bundles: range) -> bool:
    """Return whether the bundles are on live nodes; asks Ray's head, which takes time."""
    nodes = placement_group_table(group)["bundles_to_node_id"]
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    return all(nodes.get(bundle) in alive for bundle in bundles)


def gpu_share(config: Config, gpus: float, training: bool) -> float:
    """Return the share of a GPU for each device of an engine and each rank of the trainer.

    It is 1, or less if there are fewer GPUs than devices and ranks.
    """
    takers, said, also = config.serving.fewest_workers * config.engine.devices, "", ""
    for key, teacher in (config.teacher_engines() if training else {}).items():
        takers += teacher.engines * config.engine.devices
        said += f", {teacher.engines * config.engine.devices} of them of {key}"
        also += f" or {key}.engines"
    if training and not config.training.colocated:
        takers += config.training.ranks
    share = min(1.0, gpus / takers)
    together = max(config.engine.devices, config.training.ranks if training else 1)
    if 0 < share < 1 and together > 1:
        raise InputError(
            f"there are {gpus:g} GPUs for {takers} devices of engines and ranks of the trainer"
            f"{said}: ranks that train together, and devices of one engine, need a GPU each (lower "
            f"training.ranks, engine.tensor_parallel_size or serving.workers{also}, or set "
            "training.colocated)"
        )
    return share
