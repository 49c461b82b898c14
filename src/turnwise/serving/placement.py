"""Where workers run: one placement group, a bundle for each worker."""

import asyncio
from collections.abc import Mapping
from typing import Any

from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from turnwise.config import Config
from turnwise.ray_calls import reserve
from turnwise.serving.colocated import on_actors
from turnwise.serving.remote_worker import RemoteWorker


class WorkerStarter:
    """Starts the worker of a name in its bundle; a successor gets its predecessor's.

    Args:
        gpus: Of each worker, as Ray counts them; a part of 1 is that share of one GPU's memory.
        hosts: Handles of `WorkerHost`s, by name: worker N computes in the Nth of them.
    """

    def __init__(self, config: Config, gpus: float, hosts: Mapping[str, Any] | None = None) -> None:
        self._config = config
        self._gpus = 0 if hosts else gpus
        self._hosts = hosts
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
                serving = self._config.serving
                self._group = await reserve(
                    serving.workers,
                    self._gpus,
                    serving.resources,
                    "workers",
                    "serving",
                    self._config.engine.start_timeout,
                )
        index = int(name.rpartition("-")[2])
        config, gpus = self._config, self._gpus
        if self._hosts is not None:
            host = list(self._hosts)[index]
            seconds = config.training.step_timeout  # the host may be training
            engine = on_actors(config.engine, {host: self._hosts[host]}, seconds)
            config = config.model_copy(update={"engine": engine})
        return await RemoteWorker.start(
            config,
            name=name,
            num_gpus=gpus,
            fraction_of_gpus=gpus if 0 < gpus < 1 else 1.0,
            placement=PlacementGroupSchedulingStrategy(self._group, index),
        )
