"""The handle of a worker in another process: an `Engine` whose requests share one channel.

All other calls, such as weight updates, are Ray's.
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ray.actor import ActorHandle as RayActor
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from turnwise.config import NO_DEADLINE, Config
from turnwise.core.actor import ActorHandle, killed_on_failure, may_be_alive
from turnwise.core.deadlines import deadline
from turnwise.engine.protocol import InFlight, PauseMode, WeightUpdate
from turnwise.errors import DeadlineError, EngineError, TurnwiseError
from turnwise.serving.channel import Address, Channel, ChannelError, connect
from turnwise.serving.engine_worker import HEARTBEAT_SECONDS, EngineWorker
from turnwise.serving.remote_requests import RemoteRequests

if TYPE_CHECKING:
    from prometheus_client import Metric

_KERNELS = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # oneDNN compiles a kernel for each size of a batch, and again after each weight update. By
    # default it keeps 1,024 of them, and the engine's memory grows; vLLM keeps those that it uses.
    _KERNELS: os.environ.get(_KERNELS, "128"),
}
_GRACE_SECONDS = 10.0
"""Extra time of a call beyond the engine's own deadline, whose error is more specific."""
_RETRY_SECONDS = 0.5
"""Time after which an actor to which Ray lost its connection is asked again."""
_SHUTDOWN_SECONDS = 5.0
"""Time in which an engine ends; its process is killed then."""
_MAX_CALLS = 4096
"""Maximum number of calls that run at once in a worker's actor."""


class WorkerHandle(RemoteRequests):
    """One worker's actor, started and held by this process.

    Every call raises `EngineError` if the actor is dead, `DeadlineError` if it does not answer in
    time, and any error of the engine itself. `ChannelError` means that the channel was lost, with
    all requests on it, or that there is none; the next request, or health check, opens another.

    Example:
        worker = await WorkerHandle.start(config, name="worker-0", num_gpus=1)
        completion = await generate(worker, Request([1, 2, 3], config.sampling, "request-0"))
        await worker.shutdown()
    """

    worker_class: type = EngineWorker
    """Class of the actors that `start` starts."""

    def __init__(self, process: ActorHandle, config: Config) -> None:
        self._timeout = config.engine.request_timeout
        super().__init__(process.name, self._timeout + HEARTBEAT_SECONDS)
        self.pid = 0
        self.base_url: str | None = None
        """URL of the worker's own OpenAI server; None without one."""
        self.actor = process.actor
        """Ray's handle of the worker."""
        self._process = process

    @classmethod
    async def start(
        cls,
        config: Config,
        *,
        name: str = "worker-0",
        num_gpus: float = 0,
        fraction_of_gpus: float = 1.0,
        seed: int | None = None,
        placement: PlacementGroupSchedulingStrategy | str = "DEFAULT",
        bundle_indices: Sequence[int] | None = None,
    ) -> "WorkerHandle":
        """Start an actor and its engine.

        Args:
            num_gpus: GPUs that Ray reserves for it.
            placement: Ray's scheduling strategy, such as a bundle of a placement group.
            bundle_indices: Bundles of that group, if each device of the engine gets its own actor.

        Raises:
            InputError: when vLLM refuses the model or an argument.
            DeadlineError: when the engine is not ready after `engine.start_timeout` seconds.
            ChannelError: when no connection to the worker's node can be opened.
        """
        process = ActorHandle.create(
            cls.worker_class,
            *(config, bundle_indices, fraction_of_gpus, seed, name),
            name=name,
            config=config,
            log=name,
            threads=config.engine.threads,
            num_gpus=num_gpus,
            placement=placement,
            max_concurrency=_MAX_CALLS,
            environment=_ENVIRONMENT,
            failure=EngineError,
        )
        handle = cls(process, config)
        with killed_on_failure(process):
            handle.pid = await process.call(
                "post_init_async", what="start", seconds=config.engine.start_timeout
            )
            handle.base_url = await process.call(
                "report_dp_openai_server_base_url", what="report its address", seconds=10.0
            )
            await handle._have_channel()
        return handle

    @classmethod
    def attach(cls, actor: RayActor, name: str, config: Config) -> "WorkerHandle":
        """Use the actor of a worker that another process holds."""
        return cls(ActorHandle(actor, name, EngineError), config)

    async def _open(self) -> Channel:
        seconds = self._timeout + _GRACE_SECONDS
        what = "open a channel"
        address = Address(*await self._process.call("address", what=what, seconds=seconds))
        try:
            async with deadline(_GRACE_SECONDS, f"{self.name} did not {what}"):
                return await connect(address)
        except (OSError, DeadlineError) as error:
            where = f"{address.host}:{address.port}"
            raise ChannelError(f"{self.name} cannot be reached at {where}: {error}") from error

    async def _ask(self) -> None:
        try:
            await self._process.call("call", "num_in_flight", what="answer", seconds=_GRACE_SECONDS)
        except EngineError as error:
            if not may_be_alive(error):
                raise

    async def pause(self, mode: PauseMode = "keep") -> None:
        # Draining has only the engine's own deadline, on time without new tokens.
        await self._call("pause", mode, seconds=NO_DEADLINE if mode == "wait" else None)

    async def resume(self) -> None:
        await self._call("resume")

    async def sleep(self) -> None:
        await self._call("sleep")

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        await self._call("wake_up", tags)

    async def prepare_refit_info(
        self, state_dict_info: Mapping[str, tuple[Sequence[int], object]]
    ) -> None:
        await self._call("prepare_refit_info", state_dict_info)

    async def init_collective(
        self,
        rank_prefix: int,
        ip: str,
        port: int,
        world_size: int,
        train_world_size: int,
        timeout: float | None = None,
    ) -> None:
        arguments = (rank_prefix, ip, port, world_size, train_world_size, timeout)
        await self._call("init_collective", *arguments, seconds=timeout)

    async def check_update(self, manifest: WeightUpdate) -> list[str]:
        devices: list[str] = await self._call("check_update", manifest)
        return devices

    async def update_weights(
        self, manifest: WeightUpdate, in_flight: InFlight = "keep", timeout: float | None = None
    ) -> int:
        arguments = (manifest, in_flight, timeout)
        return int(await self._call("update_weights", *arguments, seconds=timeout))

    async def reset_prefix_cache(self) -> None:
        await self._call("reset_prefix_cache")

    async def check_health(self) -> None:
        async with deadline(self._timeout + _GRACE_SECONDS, f"{self.name} did not check_health"):
            while True:
                try:
                    await self._call("check_health")
                    break
                except EngineError as error:
                    if not may_be_alive(error):
                        raise
                    await asyncio.sleep(_RETRY_SECONDS)
        await self._have_channel()

    async def num_in_flight(self) -> int:
        return int(await self._call("num_in_flight"))

    async def metrics(self) -> "list[Metric]":
        metrics: list[Metric] = await self._call("metrics")
        return metrics

    async def shutdown(self) -> None:
        """End the engine and its process; kill an actor that does not answer."""
        self.fail(f"{self.name} was shut down")
        try:
            await self._process.call(
                "shutdown", 2 * _SHUTDOWN_SECONDS, what="shut down", seconds=_SHUTDOWN_SECONDS
            )
        except TurnwiseError:
            pass  # dead or hung: it is killed in either case
        finally:
            self.kill()

    def kill(self) -> None:
        """End the actor and, with it, its engine."""
        self._process.kill()

    async def _call(self, method: str, *args: object, seconds: float | None = None) -> Any:
        """Call a method of the engine, whose own deadline, `seconds`, comes first."""
        seconds = (seconds or self._timeout) + _GRACE_SECONDS
        return await self._process.call("call", method, *args, what=method, seconds=seconds)
