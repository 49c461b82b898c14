"""The OpenAI server: one address for one engine or a whole fleet.

A request passes CORS, where it is configured, the gate (`protection`) and the sessions
(`middleware`). The chat service (`chat_service`), vLLM's application (`vllm_app`) and the routes of
`routes` answer it. The server runs on the event loop of the engine that it serves.
"""

import asyncio
import ipaddress
import logging
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from starlette.types import ASGIApp

from turnwise.chat.session_store import SessionStore
from turnwise.config import Config
from turnwise.core.aio import freeze_gc
from turnwise.core.deadlines import deadline
from turnwise.engine.protocol import Generator
from turnwise.serving.openai.address import QUEUE, api_key, listen, reachable
from turnwise.serving.openai.metrics import EngineMetrics
from turnwise.serving.openai.middleware import SessionMiddleware
from turnwise.serving.openai.protection import Connection, guarded, most_connections
from turnwise.serving.openai.routes import add_routes
from turnwise.serving.openai.vllm_app import build
from turnwise.serving.scheduler import Scheduler

if TYPE_CHECKING:
    from turnwise.serving.front_processes import FrontProcesses

logger = logging.getLogger(__name__)

_START_SECONDS = 30.0
_STOP_SECONDS = 5.0
_KEEP_ALIVE_SECONDS = 120
"""Time that an idle connection stays open.

It is longer than that of clients (OpenAI 5 s, aiohttp 15, Go 90): otherwise a request can arrive on
a connection that is just being closed.
"""


class OpenAIServer:
    """Serves a generator over HTTP: one engine, or the scheduler of several.

    Args:
        port: Port to listen on; None is serving.port, 0 a free one.
        processes: Processes that serve the sessions that clients open; started and stopped with
            the server. None without any.
    """

    def __init__(
        self,
        config: Config,
        generator: Generator,
        port: int | None = None,
        processes: "FrontProcesses | None" = None,
    ) -> None:
        serving = config.serving
        self.sessions = SessionStore.from_config(config) if processes is None else processes.store
        self.base_url = ""
        """URL of the API, including /v1; "" before the start."""
        path = config.model.adapter or config.model.path
        self.model_name = serving.served_model_name or Path(path).name or Path(path).resolve().name
        """Model name in responses; requests may use any name if there are no adapters."""
        self.workers: Callable[[], Mapping[str, str]] = dict
        """Returns the base URLs of workers' own servers, by name; set by the owner of a fleet."""
        self.requests: Counter[str] = Counter() if processes is None else processes.requests
        """HTTP requests, by status or event; with those of `processes`."""
        self.processes = processes
        self._config = config
        self._generator = generator
        self.engines = EngineMetrics(generator)
        self._port = serving.port if port is None else port
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Listen, and return the base URL.

        Raises `InputError` when the address cannot be used, or vLLM refuses the model.
        """
        serving = self._config.serving
        listening = listen(serving.host, self._port, serving.ports)
        host, port = listening.getsockname()[:2]
        if api_key(self._config) is None and not ipaddress.ip_address(host).is_loopback:
            logger.warning(
                "the OpenAI server at %s:%d is open to everybody who can reach this address: set "
                "serving.api_key, or leave serving.host at 127.0.0.1",
                *(host, port),
            )
        Connection.most = most_connections()
        try:
            app = await self.application()
            if self.processes is not None:
                await self.processes.start()
        except BaseException:
            listening.close()
            raise
        options = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            log_level="error",  # invalid requests would fill the log with warnings
            access_log=False,
            lifespan="off",
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            backlog=Connection.most // 2,  # connections that asyncio accepts at once
        )
        self._server = _Server(options)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))
        async with deadline(_START_SECONDS, f"the OpenAI server at {host}:{port} was not up"):
            await self._server.ready.wait()
        freeze_gc()
        address = reachable(host)
        self.base_url = f"http://{f'[{address}]' if ':' in address else address}:{port}/v1"
        return self.base_url

    def session_url(self, session_id: str) -> str:
        return f"{self.base_url.removesuffix('/v1')}/sessions/{session_id}/v1"

    async def application(self) -> ASGIApp:
        """Return the ASGI application with its layers."""
        serving, store, counts = self._config.serving, self.sessions, self.requests
        processes, key, generator = self.processes, api_key(self._config), self._generator
        app = await build(
            self._config,
            generator,
            lambda: (
                not isinstance(generator, Scheduler)
                or any(worker.usable for worker in generator.workers.values())
            ),
            store,
            # model.path is also a name, unless another was configured
            [self.model_name, *([] if serving.served_model_name else [self._config.model.path])],
        )
        add_routes(app)
        app.state.server = self  # for the routes, and vLLM's error handler
        sessions = SessionMiddleware(app, app.state.chats, store, counts, processes, key)
        return guarded(sessions, serving, key, store)

    async def stop(self) -> None:
        """Close the connections and stop listening; end the processes."""
        if self.processes is not None:
            await self.processes.stop()
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
    """uvicorn's server, which sets `ready` once it listens and does not handle signals."""

    def __init__(self, options: uvicorn.Config) -> None:
        super().__init__(options)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(QUEUE)  # asyncio sets a shorter queue
        self.ready.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
