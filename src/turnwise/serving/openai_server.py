"""The OpenAI server: one address before one engine or a whole fleet.

vLLM's application answers (`vllm_server`); around it stand the layers of `middleware`, beside it
the routes of `routes`. Runs in the event loop of the engine that it serves.
"""

import asyncio
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from turnwise.config import Config
from turnwise.engine.protocol import Generator
from turnwise.errors import DeadlineError
from turnwise.serving.address import QUEUE, listen, reachable
from turnwise.serving.connections import Connection
from turnwise.serving.middleware import ApiKey, BodyLimit, RetryJoin, SessionMiddleware
from turnwise.serving.routes import add_routes, make_metrics
from turnwise.serving.scheduler import Scheduler
from turnwise.serving.sessions import SessionStore
from turnwise.serving.vllm_server import build
from turnwise.tasks import settle_heap

_START_SECONDS = 30.0
_STOP_SECONDS = 5.0
_KEEP_ALIVE_SECONDS = 120
"""For a connection without a request: longer than clients keep theirs (OpenAI's 5 s, aiohttp 15,
Go 90), or a request can meet a connection that is just being closed."""


class OpenAIServer:
    """Serves a generator over HTTP.

    Args:
        config: Model, sampling defaults, address and key.
        generator: One engine, or the scheduler before many.
        port: Where it listens; None is serving.port, 0 a free one.
    """

    def __init__(self, config: Config, generator: Generator, port: int | None = None) -> None:
        serving = config.serving
        self.sessions = SessionStore(
            config.sampling,
            idle_seconds=serving.session_idle,
            max_bytes=serving.session_memory_mb << 20,
        )
        self.base_url = ""
        """Of the API, /v1 included; known once it is started."""
        path = config.model.path
        self.model_name = serving.served_model_name or Path(path).name or Path(path).resolve().name
        """Name of the model for clients, whose requests may give any."""
        self.workers: Callable[[], Mapping[str, str]] = dict
        """Base URLs of workers' own servers, by name; set by whoever runs a fleet."""
        self._config = config
        self._generator = generator
        self._port = serving.port if port is None else port
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Listen; returns the base URL.

        Raises:
            InputError: when the address cannot be had, or vLLM refuses the model.
            DeadlineError: when the server is not up in time.
        """
        listening = listen(self._config.serving.host, self._port)
        host, port = listening.getsockname()[:2]
        try:
            app = await self.application()
        except BaseException:
            listening.close()
            raise
        options = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            log_level="error",  # clients that send nonsense would fill the log with warnings
            access_log=False,
            lifespan="off",
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            backlog=Connection.most // 2,  # connections that asyncio accepts in one go
        )
        self._server = _Server(options)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))
        try:
            async with asyncio.timeout(_START_SECONDS):
                await self._server.ready.wait()
        except TimeoutError:
            raise DeadlineError(
                f"the OpenAI server at {host}:{port} was not up in {_START_SECONDS:g} s"
            ) from None
        settle_heap()
        address = reachable(host)
        self.base_url = f"http://{f'[{address}]' if ':' in address else address}:{port}/v1"
        return self.base_url

    def session_url(self, session_id: str) -> str:
        """The base URL of one session."""
        return f"{self.base_url.removesuffix('/v1')}/sessions/{session_id}/v1"

    async def application(self) -> ASGIApp:
        """The ASGI application, with all that stands around it."""
        serving, store, counts = self._config.serving, self.sessions, Counter[str]()
        app = await build(
            self._config,
            self._generator,
            self._healthy,
            store.remember_completion,
            # model.path names it, too, unless a name was chosen
            [self.model_name, *([] if serving.served_model_name else [self._config.model.path])],
        )
        add_routes(
            app,
            store,
            make_metrics(store, self._generator, counts),
            model=self.model_name,
            url=lambda name: self.base_url if name is None else self.session_url(name),
            workers=lambda: self.workers(),
        )
        app.state.server = self  # vLLM's error handler looks for one
        key = serving.api_key or os.environ.get("TURNWISE_API_KEY")
        inner = RetryJoin(SessionMiddleware(app, store, counts), counts)
        return BodyLimit(ApiKey(inner, key, store), serving.max_body_mb << 20)

    def _healthy(self) -> bool:
        scheduler = self._generator
        if isinstance(scheduler, Scheduler):
            return any(worker.usable for worker in scheduler.workers.values())
        return True

    async def stop(self) -> None:
        """End the connections, then listen no more."""
        if self._server is None or self._serving is None:
            return
        self._server.should_exit = True
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await self._serving
        except TimeoutError:
            self._server.force_exit = True
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)


class _Server(uvicorn.Server):
    """Sets `ready` when it listens, and leaves signals to the program that it runs in."""

    def __init__(self, options: uvicorn.Config) -> None:
        super().__init__(options)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(QUEUE)  # asyncio takes what it accepts in one go for the queue, too
        self.ready.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
