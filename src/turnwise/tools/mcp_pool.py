"""The connections to MCP servers with one configuration: warm ones, and one that is shared.

There is one pool for each configuration in a process, whoever made the `MCPServer`, and it lists
the server's tools once. All pools live on one event loop in a daemon thread.
"""

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from turnwise.config import McpConfig
from turnwise.core.deadlines import deadline
from turnwise.core.json_types import JsonObject
from turnwise.errors import DeadlineError, TurnwiseError
from turnwise.tools.mcp_connection import Connection, Listed, McpError

_T = TypeVar("_T")
IDLE_SECONDS = 600.0
"""Time without a trajectory after which warm and shared connections end."""
_MAX_POOLS = 1000
"""Number of pools above which unused ones are forgotten."""
_STARTING = 2 * (os.cpu_count() or 1)
"""Maximum number of servers that start at the same time."""


class Line:
    """A connection that is replaced after it has failed.

    Args:
        make: Opens a connection.
    """

    def __init__(self, make: Callable[[], Awaitable[Connection]]) -> None:
        self._make = make
        self._connection: Connection | None = None
        self._opening: asyncio.Task[Connection] | None = None
        self._ending: asyncio.Task[None] | None = None
        self.users = 0
        """Number of trajectories that have it open."""

    async def connection(self) -> Connection:
        """Return the connection, or a new one if that cannot be used.

        A start continues when the call that needs it is late or cancelled: the next finds it done.

        Raises:
            TurnwiseError: as `Connection.open` does.
        """
        if self._opening is None or self._opening.done():
            self._opening = asyncio.create_task(self._open())
        return await asyncio.shield(self._opening)

    async def _open(self) -> Connection:
        if self._connection is not None and not await self._connection.usable():
            await self._drop()
        if self._connection is None:
            self._connection = await self._make()
        return self._connection

    async def call(self, name: str, arguments: JsonObject, session: str) -> str:
        """Call a tool; see `Connection.call`."""
        try:
            connection = await self.connection()
        except DeadlineError as error:  # not the call's own deadline
            raise McpError(str(error)) from None
        return await connection.call(name, arguments, session)

    async def close(self) -> None:
        """End the connection, or its start."""
        opening, self._opening = self._opening, None
        if opening is not None:
            opening.cancel()
            await asyncio.wait([opening])
            if not opening.cancelled():
                opening.exception()  # the call that needed it has reported it
        await self._drop()

    async def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._ending = asyncio.create_task(connection.close())
        if self._ending is not None:
            await asyncio.shield(self._ending)  # it ends also if this start is cancelled


class Pool:
    """All connections with one configuration."""

    def __init__(self, config: McpConfig) -> None:
        self._config = config
        self._warm: list[Connection] = []
        self._filling = 0
        self._users = 0
        self._idle: asyncio.TimerHandle | None = None
        self._shared = Line(lambda: self._connect("shared"))
        self._listed: list[Listed] | None = None
        self._listing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def unused(self) -> bool:
        """Whether it has no connections, and no trajectory that needs one."""
        return not self._users and not self._warm and self._idle is None

    def join(self, session: str) -> Line:
        """Return the connection of a trajectory, opened with its first use."""
        line = self._shared if self._config.shared else Line(lambda: self._take(session))
        line.users += 1
        self._users += 1
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        return line

    async def leave(self, line: Line) -> None:
        """End a trajectory's use of its connection."""
        line.users -= 1
        self._users -= 1
        if not self._users and self._idle is None:
            loop = asyncio.get_running_loop()
            self._idle = loop.call_later(IDLE_SECONDS, lambda: self._spawn(self.drain()))
        if line is not self._shared:
            await line.close()

    async def listed(self, connection: Connection) -> Sequence[Listed]:
        """Return the server's tools, which are asked for once.

        Raises:
            McpError: as `Connection.list_tools` does.
            DeadlineError: when it does not answer within `start_timeout`.
        """
        async with self._listing:
            if self._listed is None:
                seconds, missed = (
                    self._config.start_timeout,
                    f"{connection.name} did not list tools",
                )
                async with deadline(seconds, missed):
                    self._listed = await connection.list_tools()
            return self._listed

    async def drain(self) -> None:
        """End the connections that no trajectory has open."""
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        warm, self._warm = self._warm, []
        closing = [connection.close() for connection in warm]
        if not self._shared.users:
            closing.append(self._shared.close())
        await asyncio.gather(*closing)

    async def _take(self, session: str) -> Connection:
        """Return a warm connection, or open one; keeps `warm` of them ready."""
        while self._warm:
            connection = self._warm.pop(0)
            if await connection.usable():
                self._fill()
                return connection
            await connection.close()
        self._fill()
        return await self._connect(session)

    def _fill(self) -> None:
        missing = self._config.warm - len(self._warm) - self._filling
        for _ in range(missing):
            self._filling += 1
            self._spawn(self._warm_up())

    async def _warm_up(self) -> None:
        try:
            connection = await self._connect("warm")
        except TurnwiseError:
            return  # a trajectory will meet the same error, and report it
        finally:
            self._filling -= 1
        if self._users:
            self._warm.append(connection)
        else:
            await connection.close()

    async def _connect(self, session: str) -> Connection:
        connection = Connection(self._config, session)
        async with _starting():
            await connection.open()
        return connection

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Loop:
    """The loop of all connections, and what lives on it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.pools: dict[str, Pool] = {}
        self.starting = asyncio.Semaphore(_STARTING)
        threading.Thread(target=self.loop.run_forever, daemon=True, name="turnwise-mcp").start()


_choosing = threading.Lock()
_loop: _Loop | None = None


def _the_loop() -> _Loop:
    global _loop
    with _choosing:
        if _loop is None:
            _loop = _Loop()
        return _loop


def _starting() -> asyncio.Semaphore:
    return _the_loop().starting


def pool_of(config: McpConfig) -> Pool:
    """Return the pool of a configuration; callable from any thread."""
    pools, key = _the_loop().pools, config.model_dump_json()
    with _choosing:
        if key not in pools:
            if len(pools) >= _MAX_POOLS:  # environments whose servers differ in each row
                for other in [k for k, pool in pools.items() if pool.unused]:
                    del pools[other]
            pools[key] = Pool(config)
        return pools[key]


async def on_mcp_loop(work: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine on the loop of all connections; cancelling this call cancels it."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, _the_loop().loop))
