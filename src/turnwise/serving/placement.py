"""Where workers run: one placement group, a bundle for each worker."""

import asyncio
from typing import Any

from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from turnwise.config import Config
from turnwise.errors import EngineError
from turnwise.ray_calls import reply_of
from turnwise.serving.remote_worker import RemoteWorker

_CPU_SHARE = 0.001
"""A bundle must hold something; workers share the cores as the operating system has it."""


class WorkerStarter:
    """Starts the worker of a name in its bundle; a successor gets its predecessor's.

    Args:
        gpus: Of each worker, as Ray counts them; a part of 1 is that share of one GPU's memory.
    """

    def __init__(self, config: Config, gpus: float) -> None:
        self._config = config
        self._gpus = gpus
        self._group: Any = None
        self._making = asyncio.Lock()

    async def __call__(self, name: str) -> RemoteWorker:
        """Start `worker-N` in bundle N.

        Raises:
            DeadlineError: when the cluster has no room for all workers, or the engine is not up,
                within `engine.start_timeout` seconds.
            InputError: when vLLM refuses the model or an argument.
        """
        async with self._making:
            if self._group is None:
                self._group = await self._reserve()
        index = int(name.rpartition("-")[2])
        return await RemoteWorker.start(
            self._config,
            name=name,
            num_gpus=self._gpus,
            fraction_of_gpus=self._gpus if 0 < self._gpus < 1 else 1.0,
            placement=PlacementGroupSchedulingStrategy(self._group, index),
        )

    async def _reserve(self) -> Any:
        count = self._config.serving.workers
        bundle = {"CPU": _CPU_SHARE} | ({"GPU": self._gpus} if self._gpus else {})
        group = placement_group([bundle] * count, strategy="PACK")
        what = f"a cluster with {self._gpus:g} GPUs for each of {count} workers"
        seconds = self._config.engine.start_timeout
        await reply_of(group.ready(), what, "have room", seconds, EngineError)
        return group
