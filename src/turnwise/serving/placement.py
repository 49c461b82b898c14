"""Where workers run: one placement group, a bundle for each worker.

When a node dies, Ray looks for another one for the bundles that were there.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from itertools import islice
from typing import Any

import ray
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from turnwise.config import Config
from turnwise.errors import DeadlineError
from turnwise.ray_calls import reserve
from turnwise.serving.colocated import on_actors
from turnwise.serving.remote_worker import RemoteWorker
from turnwise.tasks import run_in_thread

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
_SEEDS = 2**32


class WorkerStarter:
    """Starts the worker of a name in its bundle; a successor gets its predecessor's.

    Args:
        gpus: Of each of an engine's devices, as Ray counts them; a part of 1 is that share of one
            GPU's memory.
        hosts: Handles of `WorkerHost`s, by name: each worker computes in the next
            `engine.tensor_parallel_size` of them.
    """

    def __init__(self, config: Config, gpus: float, hosts: Mapping[str, Any] | None = None) -> None:
        self._config = config
        self._share = 0 if hosts else gpus
        size = config.engine.devices
        self._bundles = size if config.serving.spread and not hosts else 1
        """Bundles of one worker: one for all of its devices, or one for each."""
        self._gpus = self._share * size / self._bundles
        self._hosts = hosts
        self._group: Any = None
        self._making = asyncio.Lock()
        self._lives: Counter[int] = Counter()
        """How often each worker was started."""

    async def __call__(self, name: str) -> RemoteWorker:
        """Start `worker-N` in bundle N, with a seed that no other worker and no other life of it
        has: two that begin alike would sample the same.

        Raises:
            DeadlineError: when the cluster has no room for all workers (or for this one, whose
                node is gone), or the engine is not up, within `engine.start_timeout` seconds.
            InputError: when vLLM refuses the model or an argument.
        """
        async with self._making:
            if self._group is None:
                serving = self._config.serving
                self._group = await reserve(
                    serving.workers * self._bundles,
                    self._gpus,
                    serving.resources,
                    "workers",
                    "serving",
                    self._config.engine.start_timeout,
                )
        index = int(name.rpartition("-")[2])
        await self._wait_for_place(name, index)
        config = self._config
        seed = config.seed + index + self._lives[index] * config.serving.workers
        self._lives[index] += 1
        if self._hosts is not None:
            size = config.engine.tensor_parallel_size
            own = dict(islice(self._hosts.items(), index * size, (index + 1) * size))
            seconds = config.training.step_timeout  # the hosts may be training
            engine = on_actors(config.engine, own, seconds)
            config = config.model_copy(update={"engine": engine})
        bundles = range(index * self._bundles, (index + 1) * self._bundles)
        spread = len(bundles) > 1
        return await RemoteWorker.start(
            config,
            name=name,
            num_gpus=0 if spread else self._gpus,
            fraction_of_gpus=self._share if 0 < self._share < 1 else 1.0,
            seed=seed % _SEEDS,
            placement=PlacementGroupSchedulingStrategy(self._group, bundles[0]),
            bundle_indices=bundles if spread else None,
        )

    async def _wait_for_place(self, name: str, index: int) -> None:
        """Wait until the worker's bundle is on a node that is there."""
        seconds = self._config.engine.start_timeout
        lacking = f"the cluster has no room for {name}, whose node is gone"
        warned = False
        try:
            async with asyncio.timeout(seconds):
                while not await run_in_thread(lambda: self._has_place(index)):
                    if not warned:
                        warned = True
                        logger.warning("%s; waiting %g s for some to turn up", lacking, seconds)
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            raise DeadlineError(
                f"{lacking}, and none turned up within {seconds:g} s (serving.resources, GPUs)"
            ) from None

    def _has_place(self, index: int) -> bool:
        nodes = placement_group_table(self._group)["bundles_to_node_id"]
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        own = range(index * self._bundles, (index + 1) * self._bundles)
        return all(nodes.get(bundle) in alive for bundle in own)
