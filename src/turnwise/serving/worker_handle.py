"""The handle of a worker in another process: an `Engine` whose requests share one channel.

Requests that begin in one iteration of the event loop are sent together, and so are the chunks that
the engine returns. All other calls, such as weight updates, are calls of the Ray actor.
"""

import asyncio
import contextlib
import logging
import os
import pickle
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any

from ray.actor import ActorHandle as RayActor
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from turnwise.config import NO_DEADLINE, Config
from turnwise.core.actor import ActorHandle, killed_on_failure, may_be_alive
from turnwise.core.deadlines import StallClock, deadline
from turnwise.core.json_types import Args, Kwargs
from turnwise.core.optional import Foreign
from turnwise.core.watchdog import made_progress
from turnwise.engine.protocol import (
    Chunk,
    InFlight,
    Occupancy,
    PauseMode,
    Rendezvous,
    Request,
    WeightUpdate,
)
from turnwise.errors import DeadlineError, EngineError, TurnwiseError
from turnwise.serving.channel import Address, Channel, ChannelError, connect
from turnwise.serving.engine_host import HEARTBEAT_SECONDS, EngineHost, Event

if TYPE_CHECKING:
    from prometheus_client import Metric

logger = logging.getLogger(__name__)

_BATCH = 4
"""Maximum number of requests in one message, so that the engine begins the first ones while the
last ones are still being prepared."""
_KERNELS = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # oneDNN compiles a kernel for each size of a batch, and again after each weight update. By
    # default it keeps 1,024 kernels, and the engine's memory grows. A small cache is enough,
    # because vLLM itself keeps the kernels that it uses.
    _KERNELS: os.environ.get(_KERNELS, "128"),
}
_GRACE_SECONDS = 10.0
"""Seconds by which a call's deadline exceeds the engine's own deadline, because the engine's error
is more specific."""
_RETRY_SECONDS = 0.5  # pause before a new attempt, if Ray has lost its connection to the actor
_SHUTDOWN_SECONDS = 5.0  # time for an engine to end, after which its process is killed
_MAX_CALLS = 4096  # maximum number of calls that run at once in a worker's actor

_Inbox = asyncio.Queue[Chunk | Exception]


class WorkerHandle:
    """One worker's actor, started and held by this process.

    Every call raises `EngineError` if the actor is dead, `DeadlineError` if it does not answer in
    time, and any error of the engine itself. `ChannelError` means that the channel, with all
    requests on it, was lost or could not be opened; the next request or health check opens another
    channel.
    """

    def __init__(self, process: ActorHandle, timeout: float) -> None:
        self.name = process.name
        self.pid = 0
        self.base_url: str | None = None
        """URL of the worker's own OpenAI server; None if it does not have a server."""
        self.actor = process.actor
        """Ray's handle of the worker."""
        self._process = process
        self._timeout = timeout
        self._inboxes: dict[str, _Inbox] = {}
        self._outbox: list[Request] = []
        self._cancelled: list[str] = []
        self._failure: str | None = None
        """Reason why no request is accepted any more; None while requests are accepted."""
        self._channel: Channel | None = None
        self._clock = StallClock(self._timeout + HEARTBEAT_SECONDS)
        """Gives up the channel if no message comes for this time while requests run."""
        self._clock.stopped = True
        self._opened: asyncio.Future[TurnwiseError | None] | None = None
        """Future set to None once the channel is open, or to the reason why it cannot be opened;
        None while no channel is open or being opened."""
        self._listening: asyncio.Task[None] | None = None
        self._explaining: set[asyncio.Task[None]] = set()
        """Tasks that still tell requests why their channel was lost."""

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
        host: type[EngineHost] = EngineHost,
    ) -> "WorkerHandle":
        """Start an actor and its engine.

        Args:
            host: Class of the actor.
            num_gpus: GPUs that Ray reserves for the actor.
            placement: Ray's scheduling strategy, such as a bundle of a placement group.
            bundle_indices: Bundles of the placement group, if each device of the engine gets its
                own actor.

        Raises:
            InputError: when vLLM refuses the model or an argument.
            DeadlineError: when the engine is not ready after `engine.start_timeout` seconds.
        """
        process = ActorHandle.create(
            host,
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
        handle = cls(process, config.engine.request_timeout)
        with killed_on_failure(process):
            handle.pid, handle.base_url = await process.call(
                "start", what="start", seconds=config.engine.start_timeout
            )
            await handle._have_channel()
        return handle

    @classmethod
    def attach(cls, actor: RayActor, name: str, timeout: float) -> "WorkerHandle":
        """Use the actor of a worker that another process holds; `timeout` is
        `engine.request_timeout`."""
        return cls(ActorHandle(actor, name, EngineError), timeout)

    async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        if self._failure is not None:
            raise EngineError(self._failure)
        if request.id in self._inboxes:
            raise EngineError(f"{self.name} already runs a request {request.id}")
        inbox = self._inboxes[request.id] = _Inbox()
        self._flush_soon()
        self._outbox.append(request)
        if len(self._outbox) >= _BATCH:
            self._flush()
        self._clock.stopped = False
        self._begin_listening()
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
            if self._inboxes.get(request.id) is inbox:  # otherwise its channel was lost
                del self._inboxes[request.id]
                self._clock.stopped = not self._inboxes
                if not ended:
                    self._flush_soon()
                    self._cancelled.append(request.id)

    def _begin_listening(self) -> "asyncio.Future[TurnwiseError | None]":
        if self._opened is None:
            self._opened = asyncio.get_running_loop().create_future()
            self._listening = asyncio.create_task(self._listen(self._opened))
        return self._opened

    async def _have_channel(self) -> None:
        if self._failure is not None:
            raise EngineError(self._failure)
        if (error := await asyncio.shield(self._begin_listening())) is not None:
            raise type(error)(str(error))

    def _flush_soon(self) -> None:
        if not self._outbox and not self._cancelled:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and all requests with it
                asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        if self._channel is None:  # the requests are sent once a channel is open
            return
        batch, self._outbox = self._outbox, []
        cancelled, self._cancelled = self._cancelled, []
        packed: dict[str, bytes] = {}
        for request in batch:
            if request.id in cancelled:
                continue
            try:  # one by one, so that a bad request fails alone
                packed[request.id] = pickle.dumps(request, pickle.HIGHEST_PROTOCOL)
            except Exception as error:
                if (inbox := self._inboxes.get(request.id)) is not None:
                    why = f"the request cannot be sent to {self.name}: {error!r}"
                    inbox.put_nowait(EngineError(why))
        if packed or cancelled:
            self._channel.send((packed, cancelled))

    async def _listen(self, opened: "asyncio.Future[TurnwiseError | None]") -> None:
        """Open a channel and pass on its messages; once it is lost, fail all requests on it."""
        lost: TurnwiseError

        def receive(events: list[Event]) -> None:
            made_progress()
            self._clock.moved()
            for request_id, event in events:
                if (inbox := self._inboxes.get(request_id)) is not None:
                    inbox.put_nowait(event)

        seconds, what = self._timeout + _GRACE_SECONDS, "open a channel"
        try:
            address = Address(*await self._process.call("address", what=what, seconds=seconds))
            try:
                async with deadline(_GRACE_SECONDS, f"{self.name} did not {what}"):
                    self._channel = channel = await connect(address)
            except (OSError, DeadlineError) as error:
                where = f"{address.host}:{address.port}"
                raise ChannelError(f"{self.name} cannot be reached at {where}: {error}") from error
            opened.set_result(None)
            channel.received = receive
            self._flush()
            async with self._clock.watching(f"{self.name} did not answer"):
                why = await channel.closed
            lost = ChannelError(f"{self.name} closed its channel" + (f" ({why})" if why else ""))
        except TurnwiseError as error:
            lost = error if isinstance(error, ChannelError) else EngineError(str(error))
        except Exception as error:  # any error, because requests wait for the outcome
            lost = EngineError(f"the channel to {self.name} failed: {error!r}")
        logger.debug("%s", lost)
        was_open = opened.done()
        inboxes = self._take_requests(lost)

        async def explain() -> None:
            """End the requests with the reason, which may be that their worker died."""
            why = lost
            if inboxes and was_open and isinstance(why, ChannelError):
                ask = self._process.call
                try:
                    await ask("call", "num_in_flight", what="answer", seconds=_GRACE_SECONDS)
                except DeadlineError:
                    pass  # the supervisor decides whether the worker is alive
                except TurnwiseError as error:
                    if not may_be_alive(error):
                        why = EngineError(str(error))
            for inbox in inboxes:
                inbox.put_nowait(type(why)(str(why)))

        explaining = asyncio.create_task(explain())
        self._explaining.add(explaining)
        explaining.add_done_callback(self._explaining.discard)

    def _take_requests(self, lost: TurnwiseError) -> list[_Inbox]:
        """Close the channel, so that another can be opened; return the inboxes of all requests."""
        channel, opened = self._channel, self._opened
        inboxes = list(self._inboxes.values())
        self._channel = self._opened = None
        self._inboxes = {}
        self._outbox, self._cancelled = [], []
        self._clock.stopped = True
        if channel is not None:
            channel.close()
        if opened is not None and not opened.done():
            opened.set_result(lost)
        return inboxes

    def fail(self, why: str) -> None:
        """Raise `EngineError` from every running request, and from every later one."""
        self._failure = self._failure or why
        error = EngineError(self._failure)
        if self._listening is not None:
            self._listening.cancel()
        for inbox in self._take_requests(error):
            inbox.put_nowait(EngineError(self._failure))

    async def pause(self, mode: PauseMode = "keep") -> None:
        # Draining has only the engine's own deadline, which limits the time without new tokens.
        await self._call("pause", mode, seconds=NO_DEADLINE if mode == "wait" else None)

    async def resume(self) -> None:
        await self._call("resume")

    async def sleep(self) -> None:
        await self._call("sleep")

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        await self._call("wake_up", tags)

    async def init_collective(self, group: Rendezvous, timeout: float | None = None) -> None:
        await self._call("init_collective", group, timeout, seconds=timeout)

    async def check_update(self, manifest: WeightUpdate) -> list[str]:
        devices: list[str] = await self._call("check_update", manifest)
        return devices

    async def update_weights(
        self, manifest: WeightUpdate, in_flight: InFlight = "keep", timeout: float | None = None
    ) -> int:
        call = self._call("update_weights", manifest, in_flight, timeout, seconds=timeout)
        return int(await call)

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: Args = (), kwargs: Kwargs = None
    ) -> list[Foreign]:
        """Call a method of the engine's workers; see `VllmEngine.collective_rpc`."""
        call = self._call("collective_rpc", method, timeout, args, kwargs, seconds=timeout)
        return list(await call)

    async def reset_prefix_cache(self) -> None:
        await self._call("reset_prefix_cache")

    async def check_health(self) -> Occupancy | None:
        occupancy: Occupancy | None = None
        async with deadline(self._timeout + _GRACE_SECONDS, f"{self.name} did not check_health"):
            while True:
                try:
                    occupancy = await self._call("check_health")
                    break
                except EngineError as error:
                    if not may_be_alive(error):
                        raise
                    await asyncio.sleep(_RETRY_SECONDS)
        await self._have_channel()
        return occupancy

    async def num_in_flight(self) -> int:
        return int(await self._call("num_in_flight"))

    async def hand_over(self) -> bool:
        """See `EngineHost.hand_over`."""
        seconds = self._timeout + _GRACE_SECONDS
        return bool(await self._process.call("hand_over", what="hand_over", seconds=seconds))

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
        """Call a method of the engine; the engine's own deadline, `seconds`, is earlier than the
        deadline of this call."""
        seconds = (seconds or self._timeout) + _GRACE_SECONDS
        return await self._process.call("call", method, *args, what=method, seconds=seconds)
