"""A process that serves sessions of clients (`serving.session_processes`)."""

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import ray

from turnwise.chat.session_store import Place
from turnwise.config import Config
from turnwise.core import logs
from turnwise.core.json_types import JsonObject
from turnwise.errors import InputError
from turnwise.serving.openai import import_server
from turnwise.serving.openai.address import both_urls, listen
from turnwise.serving.scheduler_process import Message, Report, SchedulerProcess

if TYPE_CHECKING:
    from turnwise.serving.openai.server import OpenAIServer


logger = logging.getLogger(__name__)

_PORT_SECONDS = 3.0
"""Time in which the port of a process that died becomes free."""
LOST = "was lost when its process died"
"""End of a session, after "the session NAME"."""


class SessionProcess(SchedulerProcess):
    """An actor's class: an OpenAI server, which samples from the driver's engines.

    `SessionProcesses`, in the driver, opens sessions in it.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._counted_requests: Counter[str] = Counter()

    async def start(self, port: int, lost: Sequence[str]) -> tuple[str, str]:
        """Start the server, and return its base URL and the id of its node.

        Args:
            port: Port to listen on, if no other program has taken it; 0 takes a free one.
            lost: Names of the sessions of the process before this one, to which requests are
                refused.

        Raises:
            InputError: when the server cannot start.
        """
        logs.follow()
        port = await _free_port(self.config.serving.host, port)
        self._server: OpenAIServer = (await import_server())(self.config, self.scheduler, port)
        self._server.sessions.refuse(lost, LOST)
        self._server.sessions.changes = {}
        base_url = await self._server.start()
        return base_url, ray.get_runtime_context().get_node_id()

    async def open(self, name: str | None, training: bool, group: str) -> JsonObject:
        """Open a session and describe it, with its URLs.

        Raises:
            InputError: when a session of that name is open.
        """
        session = self._server.sessions.open(name, training=training, group=group)
        return {**session.describe(), **both_urls(self._server.session_url(session.id))}

    async def list_sessions(self, after: Place | None, most: int) -> list[tuple[Place, JsonObject]]:
        """Return a page of the sessions of clients; see `SessionStore.page`."""
        return self._server.sessions.page(after, most)

    async def report(self, messages: Sequence[Message] = ()) -> Report:
        """See `SchedulerProcess.report`; with the counts of the server."""
        report = await super().report(messages)
        counts = Counter(self._server.requests)
        report.requests = counts - self._counted_requests
        store = self._server.sessions
        report.sessions, store.changes = store.changes or {}, {}
        self._counted_requests = counts
        return report

    async def stop(self) -> bool:
        """Stop the server, and return True; the owner kills the actor."""
        await self._server.stop()
        return True


async def _free_port(host: str, port: int) -> int:
    """Return the port once it is free; 0 if another program has taken it."""
    for _ in range(10 if port else 0):
        try:
            listen(host, port).close()
            return port
        except InputError as error:
            why = error
            await asyncio.sleep(_PORT_SECONDS / 10)
    if port:
        logger.warning("the address of lost sessions is given up, for another port: %s", why)
    return 0
