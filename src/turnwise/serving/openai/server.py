"""The OpenAI server: one address for one engine or a whole fleet.

A request passes CORS, where it is configured, the gate (`protection`) and the sessions
(`middleware`). The chat service (`chat_service`), vLLM's application (`vllm_app`) and the routes of
`routes` answer it. The server runs on the event loop of the engine that it serves.
"""

import asyncio
import ipaddress
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from starlette.types import ASGIApp

from turnwise.chat.session_store import SessionStore
from turnwise.config import Config
from turnwise.core.aio import freeze_gc
from turnwise.core.json_types import JsonObject
from turnwise.engine.protocol import Generator
from turnwise.serving.openai.address import QUEUE, api_key, listen, reachable
from turnwise.serving.openai.metrics import EngineMetrics
from turnwise.serving.openai.middleware import SessionMiddleware
from turnwise.serving.openai.protection import Connection, guarded, most_connections
from turnwise.serving.openai.routes import add_routes
from turnwise.serving.openai.vllm_app import build

if TYPE_CHECKING:
    from turnwise.serving.front_processes import FrontProcesses

logger = logging.getLogger(__name__)

_STOP_SECONDS = 5.0
_KEEP_ALIVE_SECONDS = 120
"""Time that an idle connection stays open: longer than that of clients (OpenAI 5 s, aiohttp 15, Go
90), otherwise a request can arrive on a connection that is just being closed."""


class OpenAIServer:
    """Serves a generator over HTTP: one engine, or the scheduler of several.

    The `port` is serving.port by default, and 0 takes a free one. `processes` serve the sessions
    that clients open; they are started and stopped with the server.
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
        self.base_url = ""  # including /v1
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
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Listen, and return the base URL; InputError when the address cannot be used, or vLLM
        refuses the model."""
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
            options = uvicorn.Config(
                app,
                http=Connection,
                ws="none",
                log_level="error",  # invalid requests would fill the log with warnings
                access_log=False,
                proxy_headers=False,  # nothing asks for the client's address
                lifespan="off",
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                backlog=Connection.most // 2,  # connections that asyncio accepts at once
            )
            options.load()
            # In steps, because `uvicorn.Server.serve` would handle signals.
            self._server = server = uvicorn.Server(options)
            server.lifespan = options.lifespan_class(options)
            await server.startup(sockets=[listening])
        except BaseException:
            listening.close()
            raise
        listening.listen(QUEUE)  # asyncio sets a shorter queue

        async def serve() -> None:
            await server.main_loop()
            await server.shutdown(sockets=[listening])

        self._serving = asyncio.create_task(serve())
        freeze_gc()
        address = reachable(host)
        self.base_url = f"http://{f'[{address}]' if ':' in address else address}:{port}/v1"
        return self.base_url

    def session_url(self, session_id: str) -> str:
        return f"{self.base_url.removesuffix('/v1')}/sessions/{session_id}/v1"

    def urls(self, session_id: str) -> JsonObject:
        """Return a session's base URL as OpenAI's and Anthropic's clients take it."""
        url = self.session_url(session_id)
        return {"base_url": url, "anthropic_base_url": url.removesuffix("/v1")}

    async def application(self) -> ASGIApp:
        """Return the ASGI application with its layers."""
        serving, key = self._config.serving, api_key(self._config)
        # model.path is also a name, unless another was configured
        names = [self.model_name, *([] if serving.served_model_name else [self._config.model.path])]
        app = await build(self._config, self._generator, self.sessions, names)
        add_routes(app)
        app.state.server = self  # for the routes, and vLLM's error handler
        sessions = SessionMiddleware(app, app.state.chats, self.requests, self.processes, key)
        return guarded(sessions, serving, key, self.sessions)

    async def stop(self) -> None:
        """Close the connections and stop listening; end the processes."""
        if self.processes is not None:
            await self.processes.stop()
        if self._server is None or self._serving is None:
            return
        self._server.should_exit = True
        with suppress(TimeoutError):
            async with asyncio.timeout(_STOP_SECONDS):
                await self._serving
