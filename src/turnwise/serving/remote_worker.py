"""A worker's face in another process: an `Engine` whose requests share few Ray calls.

All requests that begin in one round of the event loop travel in one call, and one call that is
always under way brings back the chunks of all of them. So Ray's cost per call (about a
millisecond) is paid per engine step and not per request.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError, RayTaskError

from turnwise import logs
from turnwise.config import NO_DEADLINE, Config, SamplingConfig
from turnwise.engine.protocol import (
    Chunk,
    Completion,
    InFlight,
    PauseMode,
    Route,
    collect,
)
from turnwise.errors import EngineError, TurnwiseError
from turnwise.ray_calls import death, reply_of
from turnwise.serving.worker import HEARTBEAT_SECONDS, Submission, VllmAsyncGenerationWorker
from turnwise.watchdog import made_progress

if TYPE_CHECKING:
    from prometheus_client import Metric

logger = logging.getLogger(__name__)

_BATCH = 4
"""Requests that one call submits, at most: where many trajectories go on at once, the engine works
on the first of them while the last are still in the making."""
_GRACE_SECONDS = 10.0
_MAX_CALLS = 4096

WorkerActor = ray.remote(max_concurrency=_MAX_CALLS)(VllmAsyncGenerationWorker)


class RemoteWorker:
    """A worker actor, started and held.

    Raises from every call: `EngineError` when the actor died, `DeadlineError` when it did not
    answer in time, and whatever the engine itself raises.
    """

    def __init__(self, actor: Any, name: str, config: Config) -> None:
        self.name = name
        self.pid = 0
        self.base_url: str | None = None
        """Of the worker's own OpenAI server, where it has one."""
        self.actor = actor
        """Held here, so that Ray keeps the actor."""
        self._timeout = config.engine.request_timeout
        self._inboxes: dict[str, asyncio.Queue[Chunk | Exception]] = {}
        self._outbox: list[Submission] = []
        self._cancelled: list[str] = []
        self._failure: str | None = None
        self._collecting: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        config: Config,
        *,
        name: str = "worker-0",
        num_gpus: float = 0,
        fraction_of_gpus: float = 1.0,
        seed: int | None = None,
        placement: Any = "DEFAULT",
        bundle_indices: Sequence[int] | None = None,
    ) -> "RemoteWorker":
        """Start an actor and its engine.

        Args:
            num_gpus: GPUs that Ray reserves for it.
            placement: Ray's scheduling strategy, such as a bundle of a placement group.
            bundle_indices: Bundles of that group for the engine's devices, where each is an actor.

        Raises:
            InputError: when vLLM refuses the model or an argument.
            DeadlineError: when the engine is not up after `engine.start_timeout` seconds.
        """
        environment = {
            **logs.environment(config, name),
            "OMP_NUM_THREADS": str(config.engine.threads),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "TOKENIZERS_PARALLELISM": "false",
        }
        actor = WorkerActor.options(
            num_cpus=0,
            num_gpus=num_gpus,
            scheduling_strategy=placement,
            runtime_env={"env_vars": environment},
        ).remote(
            config,
            bundle_indices=bundle_indices,
            fraction_of_gpus=fraction_of_gpus,
            seed=seed,
            name=name,
        )
        remote = cls(actor, name, config)
        try:
            remote.pid = await remote._wait(
                actor.post_init_async.remote(), "start", config.engine.start_timeout
            )
            remote.base_url = await remote._wait(
                actor.report_dp_openai_server_base_url.remote(), "tell its address", 10.0
            )
        except BaseException:
            ray.kill(actor)
            raise
        return remote

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingConfig,
        request_id: str,
        seed: int | None = None,
        route: Route | None = None,
    ) -> Completion:
        chunks = self.stream(prompt_token_ids, sampling, request_id, seed, route)
        return await collect(chunks, self.name)

    async def stream(
        self,
        prompt_token_ids: Sequence[int],
        sampling: Any,
        request_id: str,
        seed: int | None = None,
        route: Route | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        if self._failure is not None:
            raise EngineError(self._failure)
        if request_id in self._inboxes:
            raise EngineError(f"{self.name} already runs a request {request_id}")
        inbox: asyncio.Queue[Chunk | Exception] = asyncio.Queue()
        self._inboxes[request_id] = inbox
        self._submit((request_id, list(prompt_token_ids), sampling, seed))
        ended = False
        try:
            while not ended:
                event = await inbox.get()
                if isinstance(event, Exception):
                    ended = True
                    raise event
                ended = event.finish_reason is not None
                yield event
        finally:
            del self._inboxes[request_id]
            if not ended:
                self._cancel(request_id)

    def _submit(self, submission: Submission) -> None:
        if not self._outbox and not self._cancelled:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(submission)
        if len(self._outbox) >= _BATCH:
            self._flush()
        if self._collecting is None or self._collecting.done():
            self._collecting = asyncio.create_task(self._collect())

    def _cancel(self, request_id: str) -> None:
        if not self._outbox and not self._cancelled:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and all with it
                asyncio.get_running_loop().call_soon(self._flush)
        self._cancelled.append(request_id)

    def _flush(self) -> None:
        batch, self._outbox = self._outbox, []
        cancelled, self._cancelled = self._cancelled, []
        batch = [submission for submission in batch if submission[0] not in cancelled]
        if self._failure is not None:
            return
        if batch:
            self._send(batch)
        if cancelled:
            self.actor.cancel.remote(cancelled)

    def _send(self, batch: list[Submission]) -> None:
        try:
            self.actor.submit.remote(batch)
        except Exception as error:  # what cannot be sent fails its own request, and no other
            if len(batch) > 1:
                for submission in batch:
                    self._send([submission])
            elif (inbox := self._inboxes.get(batch[0][0])) is not None:
                inbox.put_nowait(EngineError(f"{self.name} cannot be asked: {error!r}"))

    async def _collect(self) -> None:
        seconds = self._timeout + HEARTBEAT_SECONDS
        while self._failure is None and self._inboxes:
            try:
                async with asyncio.timeout(seconds):
                    events = await self.actor.collect.remote()
            except TimeoutError:
                self.fail(f"{self.name} has not answered for {seconds:g} s")
                return
            except Exception as error:  # whatever it is, no chunk comes any more
                known = isinstance(error, RayError) and not isinstance(error, RayTaskError)
                logger.debug("%s", error)
                why = death(self.name, error) if known else f"{self.name} failed: {error!r}"
                self.fail(why)
                return
            made_progress()
            for request_id, event in events:
                if (inbox := self._inboxes.get(request_id)) is not None:
                    inbox.put_nowait(event)

    def fail(self, why: str) -> None:
        """Raise `EngineError` from every request under way, and from every later one."""
        self._failure = self._failure or why
        for inbox in self._inboxes.values():
            inbox.put_nowait(EngineError(self._failure))

    async def abort(self, request_id: str) -> None:
        await self._call("abort", request_id)

    async def pause(self, mode: PauseMode = "keep") -> None:
        # Draining has no deadline but the engine's own, which watches that tokens come.
        await self._call("pause", mode, seconds=NO_DEADLINE if mode == "wait" else None)

    async def resume(self) -> None:
        await self._call("resume")

    async def sleep(self) -> None:
        await self._call("sleep")

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        await self._call("wake_up", tags)

    async def prepare_refit_info(
        self, state_dict_info: Mapping[str, tuple[Sequence[int], Any]]
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

    async def check_update(self, manifest: dict[str, Any]) -> list[str]:
        devices: list[str] = await self._call("check_update", manifest)
        return devices

    async def update_weights(
        self, manifest: dict[str, Any], in_flight: InFlight = "keep", timeout: float | None = None
    ) -> int:
        arguments = (manifest, in_flight, timeout)
        return int(await self._call("update_weights", *arguments, seconds=timeout))

    async def reset_prefix_cache(self) -> None:
        await self._call("reset_prefix_cache")

    async def check_health(self) -> None:
        if self._failure is not None:
            raise EngineError(self._failure)
        await self._call("check_health")

    async def load(self) -> int:
        return int(await self._call("load"))

    async def metrics(self) -> "list[Metric]":
        metrics: list[Metric] = await self._call("metrics")
        return metrics

    async def shutdown(self) -> None:
        """End the engine and its process; an actor that does not answer is killed."""
        self.fail(f"{self.name} was shut down")
        if self._collecting is not None:
            self._collecting.cancel()
        try:
            await self._wait(self.actor.shutdown.remote(), "shut down", 5.0)
        except TurnwiseError:
            pass  # dead or deaf: what follows ends it
        finally:
            self.kill()

    def kill(self) -> None:
        """End the actor and, with it, its engine."""
        ray.kill(self.actor)

    async def _call(self, method: str, *args: Any, seconds: float | None = None) -> Any:
        """Call a method of the engine, whose own deadline, `seconds`, comes first."""
        seconds = (seconds or self._timeout) + _GRACE_SECONDS
        return await self._wait(self.actor.call.remote(method, *args), method, seconds)

    async def _wait(self, reply: Awaitable[Any], what: str, seconds: float) -> Any:
        return await reply_of(reply, self.name, what, seconds, EngineError)
