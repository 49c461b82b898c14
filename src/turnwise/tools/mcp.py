"""MCP servers as toolsets: `MCPServer`, in an environment's `tools` or in `rollout.tools`.

All connections use one event loop in a separate thread, so that neither user code nor the training
loop blocks them. A process has one pool of connections for each configuration; the pool lists the
server's tools once. If a connection fails during a call, that call raises an error, and the next
call connects again. Servers are not trusted, so names, schemas and sizes are checked.
"""

import asyncio
import os
import re
import threading
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from pydantic import ValidationError

from turnwise.config import McpConfig
from turnwise.core.deadlines import deadline
from turnwise.core.json_types import JsonObject
from turnwise.core.optional import optional
from turnwise.errors import DeadlineError, InputError
from turnwise.tools.tool import McpError, Tool

if TYPE_CHECKING:
    from turnwise.tools.mcp_connection import McpConnection

_T = TypeVar("_T")
_Listed: TypeAlias = Sequence[tuple[str, str, JsonObject]]
"""Name, description and parameters of each tool that a server lists."""
_NAME = re.compile(r"[A-Za-z0-9_./-]{1,128}")
IDLE_SECONDS = 600.0
"""Seconds after which warm connections (opened in advance) and shared connections end, if no
trajectory uses them."""
_MAX_POOLS = 1000
"""Number of pools from which on unused pools are forgotten."""
_starting = asyncio.Semaphore(2 * (os.cpu_count() or 1))
"""Limits the number of servers that start at the same time."""


class MCPServer:
    """An MCP server whose tools the model may call.

    Args:
        command: Program to start, which speaks MCP over its standard input and output.
        args: Arguments of the program.
        **options: All further keys of an `mcp` entry in `rollout.tools` (`McpConfig`), such as
            `url`, `env`, `tools` and `shared`, with the same defaults.

    Raises:
        InputError: when the arguments contradict each other.

    Example:
        class Clerk(turnwise.Environment):
            problem = "What time is it in Oslo?"
            tools = [turnwise.MCPServer("mcp-server-time", tools=["get_current_time"])]
    """

    def __init__(
        self, command: str | None = None, args: Sequence[str] = (), **options: object
    ) -> None:
        given = {"command": command, "args": args, **options}
        # `start_timeout=None` means no deadline; for every other key, None means the default.
        keys = {k: v for k, v in given.items() if v is not None or k == "start_timeout"}
        try:
            self.config = McpConfig.model_validate(keys)
        except ValidationError as error:
            mistakes = (e["msg"].removeprefix("Value error, ") for e in error.errors())
            raise InputError(f"MCPServer: {'; '.join(mistakes)}") from None

    def toolset(self) -> "McpToolset":
        """Return the toolset of one trajectory, with a connection that is not open yet."""
        return McpToolset(self.config)

    async def close(self) -> None:
        """End the connections that no trajectory uses. Without this call the connections end after
        `IDLE_SECONDS` without use, or when the process exits."""
        await _on_loop(pool_of(self.config).drain())


class McpToolset:
    """The tools of an MCP server for one trajectory."""

    def __init__(self, config: McpConfig) -> None:
        self._config = config
        self._session = uuid.uuid4().hex
        self._pool: Pool | None = None
        self._line: Line | None = None

    async def open(self) -> list[Tool]:
        """Connect, and return the server's tools.

        Raises:
            McpError: when the tools cannot be offered to the model.
            TurnwiseError: with the same errors as `McpConnection.opened`.
        """
        self._pool = pool = pool_of(self._config)

        async def listed() -> _Listed:
            self._line = pool.join(self._session)
            return await pool.listed(await self._line.connection())

        async def call(name: str, arguments: JsonObject) -> object:
            line = self._line  # `close` may remove it meanwhile, in another thread
            if line is None:
                raise McpError(f"{_name_of(self._config)} is closed")
            return await _on_loop(line.call(name, arguments, self._session))

        all_listed, config = await _on_loop(listed()), self._config
        server, tools = _name_of(config), dict[str, Tool]()
        for name, description, parameters in all_listed:
            if config.tools is not None and name not in config.tools:
                continue
            full = config.prefix + name
            if not _NAME.fullmatch(full):
                raise McpError(f"{server} lists a tool with the invalid name {full!r:.80}")
            if name in tools:
                raise McpError(f"{server} lists two tools named {name}")
            tools[name] = Tool(full, description, parameters, partial(call, name))
        if missing := [name for name in config.tools or () if name not in tools]:
            names = ", ".join(repr(name)[:80] for name, *_ in all_listed[:20]) or "none"
            raise McpError(f"{server} has no tool {', '.join(missing)}; it has: {names}")
        return [tools[name] for name in config.tools] if config.tools else list(tools.values())

    async def close(self) -> None:
        """Disconnect, and end the process that `command` started; takes at most a few seconds."""
        if (pool := self._pool) is None:
            return

        async def leave() -> None:  # runs on the loop, to see a line that a cancelled `open` made
            line, self._line = self._line, None
            if line is not None:
                await pool.leave(line)

        await asyncio.shield(_on_loop(leave()))


def _name_of(config: McpConfig) -> str:
    """Return the name that errors use for a server."""
    if config.url:
        return f"the MCP server {re.sub('//[^/@]*@', '//', config.url)}"
    return f"the MCP server {' '.join([config.command or '', *config.args])[:100]}"


class Line:
    """A connection, opened by `make`, that is replaced after it has failed."""

    def __init__(self, make: "Callable[[], Awaitable[McpConnection]]") -> None:
        self._make = make
        self._connection: McpConnection | None = None
        self._opening: asyncio.Task[McpConnection] | None = None
        self.users = 0
        """Number of trajectories that use the connection."""

    async def connection(self) -> "McpConnection":
        """Return the connection, or a new connection if the current one cannot be used; raise the
        errors of `McpConnection.opened`.

        If the call that needs a new connection is late or cancelled, the connection still starts,
        and the next call can use it.
        """

        async def usable() -> "McpConnection":
            if self._connection is not None and not await self._connection.usable():
                await self._connection.close()
                self._connection = None
            if self._connection is None:
                self._connection = await self._make()
            return self._connection

        if self._opening is None or self._opening.done():
            self._opening = asyncio.create_task(usable())
        return await asyncio.shield(self._opening)

    async def call(self, name: str, arguments: JsonObject, session: str) -> object:
        """Call a tool; see `McpConnection.call`."""
        try:
            connection = await self.connection()
        except DeadlineError as error:  # the start's deadline must not count as the call's
            raise McpError(str(error)) from None
        return await connection.call(name, arguments, session)

    async def close(self) -> None:
        """End the connection, or stop its start."""
        opening, self._opening = self._opening, None
        if opening is not None:
            opening.cancel()
            await asyncio.wait([opening])
            if not opening.cancelled():
                opening.exception()  # the call that needed the connection has reported this error
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


class Pool:
    """All connections with one configuration: warm connections, opened in advance, and one that
    trajectories share."""

    def __init__(self, config: McpConfig) -> None:
        self._config = config
        self._warm: list[asyncio.Task[McpConnection]] = []
        """Connections that are starting, or waiting for a trajectory."""
        self._users = 0
        self._idle: asyncio.TimerHandle | None = None
        self._shared = Line(lambda: self._connect("shared"))
        self._listed: _Listed | None = None
        self._listing = asyncio.Lock()

    @property
    def unused(self) -> bool:
        """Whether the pool has no connections, and no trajectory that needs a connection."""
        return not self._users and not self._warm and self._idle is None

    def join(self, session: str) -> Line:
        """Return the connection of a trajectory; its first use opens it."""

        async def take() -> "McpConnection":
            """Return a warm connection, or open a new one; keep `warm` connections ready."""
            while (task := next((task for task in self._warm if task.done()), None)) is not None:
                self._warm.remove(task)
                if task.exception() is None:  # otherwise the new connection reports the same error
                    if await task.result().usable():
                        self._fill()
                        return task.result()
                    await task.result().close()
            self._fill()
            return await self._connect(session)

        line = self._shared if self._config.shared else Line(take)
        line.users += 1
        self._users += 1
        self._stay()
        return line

    async def leave(self, line: Line) -> None:
        """End a trajectory's use of its connection."""
        line.users -= 1
        self._users -= 1
        if not self._users and self._idle is None:
            self._idle = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._end_idle)
        if line is not self._shared:
            await line.close()

    async def listed(self, connection: "McpConnection") -> _Listed:
        """Return the server's tools; the server lists them once, within `start_timeout` seconds."""
        async with self._listing:
            if self._listed is None:
                missed = f"{_name_of(self._config)} did not list tools"
                async with deadline(self._config.start_timeout, missed):
                    self._listed = await connection.list_tools()
            return self._listed

    async def drain(self) -> None:
        """End the connections that no trajectory uses."""
        self._stay()
        warm, self._warm = self._warm, []
        for task in warm:
            task.cancel()
        made = await asyncio.gather(*warm, return_exceptions=True)
        closing = [each.close() for each in made if not isinstance(each, BaseException)]
        if not self._shared.users:
            closing.append(self._shared.close())
        await asyncio.gather(*closing)

    def _stay(self) -> None:
        """Cancel the timer that ends the connections of an unused pool."""
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _end_idle(self) -> None:
        self._ending = asyncio.create_task(self.drain())  # the reference keeps the task alive

    def _fill(self) -> None:
        while len(self._warm) < self._config.warm:
            self._warm.append(asyncio.create_task(self._connect("warm")))

    async def _connect(self, session: str) -> "McpConnection":
        optional("mcp", "mcp", "an MCP server")
        from turnwise.tools.mcp_connection import McpConnection  # a second to import

        async with _starting:
            connection = McpConnection(_name_of(self._config), self._config, session)
            await connection.opened()
        return connection


_choosing = threading.Lock()
_pools: dict[str, Pool] = {}


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the loop of all connections. The first call starts the loop, and must hold
    `_choosing`."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="turnwise-mcp").start()
    return loop


def pool_of(config: McpConfig) -> Pool:
    """Return the pool of a configuration; callable from any thread."""
    key = config.model_dump_json()
    with _choosing:
        _loop()
        if key not in _pools:
            if len(_pools) >= _MAX_POOLS:  # possible if each row of the data has its own server
                for other in [k for k, pool in _pools.items() if pool.unused]:
                    del _pools[other]
            _pools[key] = Pool(config)
        return _pools[key]


async def _on_loop(work: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine on the loop of all connections; cancelling this call cancels the
    coroutine."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, _loop()))
