"""A worker's actor that answers HTTP itself, in addition to the fleet's requests."""

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

from turnwise.config import Config
from turnwise.serving.engine_host import EngineHost
from turnwise.serving.openai.opening import make_server
from turnwise.serving.routing import Supervisor
from turnwise.serving.scheduler import Scheduler

if TYPE_CHECKING:
    from fastapi import FastAPI

    from turnwise.serving.openai.server import OpenAIServer


class ServingHost(EngineHost):
    """An actor's class: an engine and, with `serving.worker_servers`, an OpenAI server of its own.
    The server runs on the engine's event loop, because vLLM's sockets are not safe across
    threads."""

    server: "OpenAIServer | None" = None

    @cached_property
    def turns(self) -> Scheduler:
        """Scheduler of the engine for requests that do not come from the fleet. As in a fleet, a
        request that an update or a sleep interrupts continues afterwards."""
        turns = Scheduler(self._config.serving, self._config.engine.request_timeout)
        failed = Supervisor(lambda why: turns.restore(self._name), lambda: None)
        turns.add(self._name, self._engine, failed)
        return turns

    async def _serve(self) -> str | None:
        if not self._config.serving.worker_servers:
            return None
        config = self._server_config()
        self.server = await make_server(config, self.turns, port=0, extend=self._extension)
        base_url = self._listen(self.server)
        if self.server.base_url:  # else a subclass has a server of its own
            await self.server.serve()
        return base_url

    def _server_config(self) -> Config:
        return self._config

    def _listen(self, server: "OpenAIServer") -> str:
        """Listen at the server's address, and return its base URL; subclasses may override it."""
        server.listen()
        return server.base_url

    @property
    def _extension(self) -> "Callable[[FastAPI], FastAPI] | None":
        """The function that adds routes and middleware to the server's application."""
        return None

    async def shutdown(self, exit_after: float | None = None) -> bool:
        if self.server is not None:
            await self.server.stop()
        return await super().shutdown(exit_after)
