"""The actor that hosts one engine, and the mailboxes through which the fleet uses it.

Other processes use the engine through `WorkerHandle`, each with a channel and a mailbox of its own.
One message brings several requests; one message for each step of the engine returns all their
chunks. The fork server imports this module, so it does not import Ray at once.
"""

import asyncio
import os
import pickle
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

from turnwise import errors
from turnwise.config import Config
from turnwise.core import logs
from turnwise.core.aio import freeze_gc
from turnwise.core.json_types import JsonObject
from turnwise.engine.protocol import Chunk, Request
from turnwise.errors import EngineError, TurnwiseError
from turnwise.serving.channel import Address, Channel, listen
from turnwise.serving.hand_over import RunningTurns
from turnwise.weights import WORKER_EXTENSION

if TYPE_CHECKING:
    from turnwise.internals.vllm import AsyncLLM

HEARTBEAT_SECONDS = 10.0
"""Seconds between empty messages, which show that the worker is alive."""
GPU_MEMORY = 0.9
"""Share of a GPU's memory that all engines on the GPU take together; vLLM's own default for one
engine is 0.92."""

Event = tuple[str, Chunk | Exception]
"""A request's id, and its next chunk or the error that ended it."""


class Mailbox:
    """Requests of one client process, and the events of these requests that have not been sent yet.
    The requests are cancelled when the client closes its channel or dies."""

    def __init__(
        self, channel: Channel, run: "Callable[[Mailbox, Request], Coroutine[None, None, None]]"
    ) -> None:
        self._channel, self._run = channel, run
        self._events: list[Event] = []
        self._requests: dict[str, asyncio.Task[None]] = {}
        self._heartbeat = asyncio.get_running_loop().call_later(HEARTBEAT_SECONDS, self._beat)
        channel.received = lambda message: self._receive(*message)
        channel.closed.add_done_callback(self._cancel_all)

    def add(self, request_id: str, event: Chunk | Exception) -> None:
        """Send an event of a request, with all events of this iteration of the event loop."""
        if not self._events:
            asyncio.get_running_loop().call_soon(self._flush)
        self._events.append((request_id, event))

    def _flush(self) -> None:
        events, self._events = self._events, []
        self._channel.send(events)

    def _receive(self, requests: Mapping[str, bytes], cancelled: Sequence[str]) -> None:
        """Begin pickled requests, by id; cancel requests that are no longer needed."""
        for name, packed in requests.items():
            try:
                request: Request = pickle.loads(packed)
            except Exception as error:
                self.add(name, EngineError(f"the request {name} cannot be read: {error!r}"))
                continue
            task = self._requests[name] = asyncio.create_task(self._run(self, request))
            task.add_done_callback(partial(self._ended, name))
        for request_id in cancelled:
            if (running := self._requests.get(request_id)) is not None:
                running.cancel()

    def _ended(self, name: str, _: object) -> None:
        self._requests.pop(name, None)

    def _beat(self) -> None:
        self._channel.send([])
        self._heartbeat = asyncio.get_running_loop().call_later(HEARTBEAT_SECONDS, self._beat)

    def _cancel_all(self, _: object) -> None:
        self._heartbeat.cancel()
        for task in self._requests.values():
            task.cancel()


class EngineHost:
    """An actor's class: one `VllmEngine`, which other processes use through `WorkerHandle`.

    Args:
        bundle_indices: Bundles of this actor's placement group, one for each device of the
            engine. Each device then has its own actor. With None, vLLM runs the devices' workers in
            child processes.
        fraction_of_gpus: Share of each GPU's memory that the engine may take.
        seed: Seed of the engine's random numbers; None takes the seed of the configuration.
        name: The worker's name in errors.
    """

    def __init__(
        self,
        config: Config,
        bundle_indices: Sequence[int] | None = None,
        fraction_of_gpus: float = 1.0,
        seed: int | None = None,
        name: str = "worker-0",
    ) -> None:
        self._config = config
        self._seed = config.seed if seed is None else seed
        self._name = name
        self._share = fraction_of_gpus
        self._address: Address | None = None
        self._bundle_indices = bundle_indices
        self._running = RunningTurns()

    async def start(self) -> tuple[int, str | None]:
        """Build the engine, which takes seconds; return this process's id, and the base URL of its
        own OpenAI server (None if it does not have a server)."""
        from turnwise.engine.adapters import EngineAdapters
        from turnwise.engine.vllm_engine import VllmEngine
        from turnwise.internals import vllm

        logs.redirect_output()
        config, engine = self._config, self._config.engine
        if self._bundle_indices is not None:
            from turnwise.serving.colocated.host import on_bundles  # needs Ray

            engine = on_bundles(engine, self._bundle_indices, self._name)
        vllm_args = dict(engine.vllm_args)
        if self._share < 1.0:
            whole = vllm_args.get("gpu_memory_utilization", GPU_MEMORY)
            vllm_args["gpu_memory_utilization"] = whole * self._share
        if parser := config.serving.reasoning_parser:  # a grammar begins where reasoning ends
            vllm_args.setdefault("reasoning_parser", parser)
        changes: dict[str, object] = {"vllm_args": vllm_args}
        served = config.serving.worker_servers or config.metrics.port is not None
        if engine.metrics is None and served:
            changes["metrics"] = True
        self._engine = VllmEngine(
            config.model,
            engine.model_copy(update=changes),
            seed=self._seed,
            deterministic=config.deterministic,
            adapters=EngineAdapters.of(config),
            worker_extension=WORKER_EXTENSION,
            name=self._name,
            start=self._start_llm,
        )
        vllm.enable_envs_cache()  # otherwise vLLM reads environment variables for each token
        await self._engine.load_adapters()
        base_url = await self._serve()
        freeze_gc()
        return os.getpid(), base_url

    def _start_llm(self, path: str, llm_kwargs: JsonObject, metrics: bool) -> "AsyncLLM":
        """Start vLLM; subclasses may override it, as they may `_serve`."""
        from turnwise.engine.vllm_start import start_llm

        return start_llm(path, llm_kwargs, metrics)

    async def _serve(self) -> str | None:
        """Open the host's own server, and return its base URL; this class does not have a
        server."""
        return None

    async def shutdown(self, exit_after: float | None = None) -> bool:
        """End the engine, and return True. The owner kills the actor, or, if Ray's head is gone,
        the process ends by itself after `exit_after` seconds."""
        if exit_after is not None:
            asyncio.get_running_loop().call_later(exit_after, os._exit, 0)
        await self._engine.shutdown()
        return True

    async def call(self, method: str, *args: object) -> Any:
        return await getattr(self._engine, method)(*args)

    async def hand_over(self) -> bool:
        """Abort the requests of all processes, so that they continue on other workers, and pause
        the engine. Abort nothing and return False while a request could not continue on another
        worker, or did not come through a channel."""
        others = await self._engine.num_in_flight() - self._running.count
        if others > 0 or self._running.bound:
            return False
        await self._engine.pause("abort")
        return True

    async def address(self) -> Address:
        """Return where this worker listens for the channels of its clients."""
        if self._address is None:
            from ray.util import get_node_ip_address  # reads the environment when it is imported

            host = get_node_ip_address()
            self._address = await listen(
                host, lambda channel: Mailbox(channel, self._run), self._config.serving.ports
            )
        return self._address

    async def _run(self, mailbox: Mailbox, request: Request) -> None:
        ended = False
        try:
            async with (
                aclosing(self._engine.stream(request)) as made,
                aclosing(self._running.watched(request, made)) as chunks,
            ):
                async for chunk in chunks:
                    mailbox.add(request.id, chunk)
                    ended = chunk.finish_reason is not None
            if not ended:  # the caller waits without a deadline
                raise EngineError(f"{self._name} ended request {request.id} without a reason")
        except Exception as error:
            # An error of another type, such as a subclass, may not be readable in another process.
            known = isinstance(error, TurnwiseError) and type(error).__module__ == errors.__name__
            mailbox.add(request.id, error if known else EngineError(f"{self._name}: {error!r}"))
