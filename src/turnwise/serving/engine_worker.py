"""The actor around one engine, and the mailboxes through which the fleet uses it.

Other processes use it through `WorkerHandle`, each with a channel and a mailbox of its own. A
message brings several requests, and one for each step of the engine returns the chunks of all.
The fork server imports this module, without Ray.
"""

import asyncio
import os
import pickle
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from turnwise import errors
from turnwise.config import Config
from turnwise.core import logs
from turnwise.core.aio import freeze_gc
from turnwise.core.json_types import JsonObject
from turnwise.engine.protocol import Chunk, Request
from turnwise.errors import EngineError, InputError, TurnwiseError
from turnwise.serving.channel import Address, Channel, listen
from turnwise.serving.hand_over import RunningTurns
from turnwise.serving.openai import import_server
from turnwise.serving.routing import Supervisor
from turnwise.serving.scheduler import Scheduler
from turnwise.weights import WORKER_EXTENSION

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

    from turnwise.core.optional import Foreign
    from turnwise.internals.vllm import AsyncLLM
    from turnwise.serving.chat_scheduler import ChatBackend
    from turnwise.serving.openai import OpenAIServer

HEARTBEAT_SECONDS = 10.0
"""Time between messages without a chunk, which show that the worker is alive."""
GPU_MEMORY = 0.9
"""Share of a GPU's memory that engines on it take together; vLLM's own default for one is 0.92."""

Event = tuple[str, Chunk | Exception]
"""A request's id, and its next chunk or the error that ended it."""


class Mailbox:
    """Requests of one process that uses the engine, cancelled when it closes its channel or dies,
    and their events that are not sent yet."""

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
        """Send an event of a request, together with all of this iteration of the event loop."""
        if not self._events:
            asyncio.get_running_loop().call_soon(self._flush)
        self._events.append((request_id, event))

    def _flush(self) -> None:
        events, self._events = self._events, []
        self._channel.send(events)

    def _receive(self, requests: Mapping[str, bytes], cancelled: Sequence[str]) -> None:
        """Begin pickled requests, by their ids; end those whose results are no longer needed."""
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


class EngineWorker:
    """An actor's class: one `VllmEngine`, with its own OpenAI server if the configuration says so.

    A subclass may override `_create_engine`, and what begins with `_setup_vllm`.

    Args:
        bundle_indices: Bundles of this actor's placement group, one for each device of the
            engine, each of which runs in its own actor; None runs them in child processes.
        fraction_of_gpus: Share of each GPU's memory that the engine may take.
        seed: Seed of the engine's random numbers; None takes the configuration's.
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
        self.llm: AsyncLLM | None = None
        """vLLM's engine, once it has started."""
        self.server_thread: threading.Thread | None = None
        self.base_url: str | None = None
        """Base URL of this worker's own OpenAI server; None without one."""
        self.http_server: uvicorn.Server | None = None
        self._config = config
        self._seed = config.seed if seed is None else seed
        self._name = name
        self._share = fraction_of_gpus
        self._metrics = False
        self._address: Address | None = None
        self._server: OpenAIServer | None = None
        self._chats: asyncio.Task[ChatBackend] | None = None
        self._bundle_indices = bundle_indices
        self._running = RunningTurns()

    async def post_init_async(self) -> int:
        """Build the engine, which takes seconds; returns this process's id."""
        from turnwise.engine.adapters import EngineAdapters
        from turnwise.engine.vllm_engine import VllmEngine
        from turnwise.internals import vllm

        logs.follow()
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

        def start(_: str, llm_kwargs: JsonObject, metrics: bool) -> "AsyncLLM":
            self._metrics = metrics
            self._create_engine(llm_kwargs)
            if self.llm is None:
                raise InputError("_create_engine must set self.llm, as the one it overrides does")
            return self.llm

        self._engine = VllmEngine(
            config.model,
            engine.model_copy(update=changes),
            seed=self._seed,
            deterministic=config.deterministic,
            adapters=EngineAdapters.of(config),
            worker_extension=WORKER_EXTENSION,
            name=self._name,
            start=start,
        )
        vllm.enable_envs_cache()  # or vLLM reads environment variables for each token
        await self._engine.load_adapters()
        if config.serving.worker_servers:
            make, extend = await import_server(), self._setup_vllm_openai_api_server
            self._server = make(self._server_config(), self._turns, port=0, extend=extend)
            self.server_thread, self.base_url, self.http_server = self._setup_vllm_server()
            if self._server.base_url:  # else a subclass has a server of its own
                await self._server.serve()
        freeze_gc()
        return os.getpid()

    @cached_property
    def _turns(self) -> Scheduler:
        """The engine for requests that come from no fleet: those that an update or a sleep ends
        early go on after it, as a fleet's do."""
        turns = Scheduler(self._config.serving, self._config.engine.request_timeout)
        failed = Supervisor(lambda why: turns.restore(self._name), lambda: None)
        turns.add(self._name, self._engine, failed)
        return turns

    def _create_engine(self, llm_kwargs: JsonObject) -> None:
        """Start vLLM's engine as `self.llm`; a hook for subclasses that change the arguments of
        vLLM's AsyncEngineArgs, or start it themselves."""
        from turnwise.engine.vllm_start import start_llm

        self.llm = start_llm(self._config.model.path, llm_kwargs, self._metrics)

    def _setup_vllm_server(self) -> tuple[threading.Thread, str, "uvicorn.Server"]:
        """Open this worker's OpenAI server, which answers once this has returned; a hook.

        Returns a thread that ends when the server does, the base URL, and uvicorn's server, which
        ends when its `should_exit` is set. It runs on the engine's event loop, because vLLM's
        sockets are not safe across threads: join the thread in another one only.
        """
        assert self._server is not None
        server = self._server.listen()
        thread = threading.Thread(target=self._server.ended.wait, daemon=True)
        thread.start()
        return thread, self._server.base_url, server

    def _setup_vllm_openai_api_server(self, app: "FastAPI") -> "FastAPI":
        """Return the server's application, which has all routes; a hook for subclasses that add
        routes and middleware.

        Middleware runs around all requests that have the server's key. It and coroutines run on the
        engine's event loop, which they must not block; other routes run in threads.
        """
        return app

    def _server_config(self) -> Config:
        return self._config

    async def report_dp_openai_server_base_url(self) -> str | None:
        """Return the base URL of this worker's own OpenAI server; None without one."""
        return self.base_url

    async def chat_completion_generator(self, request: "Foreign") -> AsyncIterator[tuple[int, str]]:
        """Answer a chat request without HTTP, as verl's server actor does.

        Args:
            request: vLLM's `ChatCompletionRequest`, or a dictionary of its keys.

        Yields:
            A status of HTTP and a server-sent event, "data: ..." and an empty line: one with the
            answer, with `stream` one for each chunk and "[DONE]", or one with the error.
        """
        tree = request if isinstance(request, dict) else request.model_dump(exclude_unset=True)
        if self._chats is None:
            self._chats = asyncio.create_task(self._start_chats())
        chats = await asyncio.shield(self._chats)
        async with aclosing(chats.events(tree)) as events:
            async for event in events:
                yield event

    async def _start_chats(self) -> "ChatBackend":
        from turnwise.serving.chat_scheduler import ChatBackend

        chats = ChatBackend(self._config, self._turns)
        await chats.start()
        return chats

    async def shutdown(self, exit_after: float | None = None) -> bool:
        """End the server and the engine, and return True. The owner kills the actor, or, if Ray's
        head is gone, the process ends by itself after `exit_after` seconds."""
        if exit_after is not None:
            asyncio.get_running_loop().call_later(exit_after, os._exit, 0)
        if self._server is not None and self.http_server is not None:
            self.http_server.should_exit = True
            await self._server.stop()
        await self._engine.shutdown()
        return True

    async def call(self, method: str, *args: object) -> Any:
        return await getattr(self._engine, method)(*args)

    async def hand_over(self) -> bool:
        """End the requests of all processes early, to go on on other workers, and compute no more;
        return False, and end none, while one of them could not, or one came from elsewhere."""
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
