"""MCP servers as toolsets: `MCPServer`, in an environment's `tools` or in `rollout.tools`.

Each trajectory has its own connection, unless the server is shared. All connections live on one
event loop in a thread of their own, so that neither user code nor the training loop holds them up.
A call that fails with its connection is an error of that call; the next call connects again.
Servers and their answers are not trusted: names, schemas and sizes are checked.
"""

import asyncio
import re
import uuid
from collections.abc import Mapping, Sequence
from functools import partial

from pydantic import ValidationError

from turnwise.config import McpConfig
from turnwise.core.json_types import JsonObject
from turnwise.errors import InputError
from turnwise.tools.mcp_connection import Connection, Listed, McpError
from turnwise.tools.mcp_pool import Line, Pool, on_mcp_loop, pool_of
from turnwise.tools.tool import Tool

_NAME = re.compile(r"[A-Za-z0-9_./-]{1,128}")


class MCPServer:
    """An MCP server whose tools the model may call.

    Args:
        command: Program to start, which speaks MCP over its standard input and output.
        args: Its arguments.
        env: Its environment variables besides PATH, HOME and the like; `${NAME}` stands for a
            variable of this process.
        cwd: Its working directory.
        url: URL of a running server, in place of a command (streamable HTTP).
        headers: HTTP headers for the URL; `${NAME}` stands for a variable of this process.
        session_header: Name of an HTTP header with its own value for each trajectory.
        shared: Whether all trajectories use one process or MCP session.
        warm: Number of processes that are started before a trajectory needs them.
        tools: Names of the tools to offer; None offers all.
        prefix: Text before each tool's name.
        start_timeout: Deadline in seconds for the server to start and list its tools.

    Raises:
        InputError: when the arguments contradict each other.

    Example:
        class Clerk(turnwise.Environment):
            problem = "What time is it in Oslo?"
            tools = [turnwise.MCPServer("mcp-server-time", tools=["get_current_time"])]
    """

    def __init__(
        self,
        command: str | None = None,
        args: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        url: str | None = None,
        headers: Mapping[str, str] | None = None,
        session_header: str | None = None,
        shared: bool = False,
        warm: int = 0,
        tools: Sequence[str] | None = None,
        prefix: str = "",
        start_timeout: float | None = 60.0,
    ) -> None:
        try:
            self.config = McpConfig(
                command=command,
                args=list(args),
                env=dict(env or {}),
                cwd=cwd,
                url=url,
                headers=dict(headers or {}),
                session_header=session_header,
                shared=shared,
                warm=warm,
                tools=None if tools is None else list(tools),
                prefix=prefix,
                start_timeout=start_timeout,  # type: ignore[arg-type]  # None sets no deadline
            )
        except ValidationError as error:
            mistakes = (e["msg"].removeprefix("Value error, ") for e in error.errors())
            raise InputError(f"MCPServer: {'; '.join(mistakes)}") from None

    @classmethod
    def configured(cls, config: McpConfig) -> "MCPServer":
        """Return the server of an entry of `rollout.tools`."""
        server = cls.__new__(cls)
        server.config = config
        return server

    def toolset(self) -> "McpToolset":
        """Return one trajectory's connection, which is not open yet."""
        return McpToolset(self.config)

    async def close(self) -> None:
        """End the connections that no trajectory has open; otherwise they end when unused for
        `IDLE_SECONDS`, or at exit."""
        await on_mcp_loop(pool_of(self.config).drain())


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
            McpError: when the server does not start, or lists tools that cannot be offered.
            DeadlineError: when it does not do so in time.
            InputError: when an environment variable is missing.
        """
        self._pool = pool_of(self._config)
        listed = await on_mcp_loop(self._open(self._pool))
        return [self._tool(tool) for tool in _offered(self._config, listed)]

    async def _open(self, pool: Pool) -> Sequence[Listed]:
        self._line = pool.join(self._session)
        return await pool.listed(await self._line.connection())

    def _tool(self, listed: Listed) -> Tool:
        name = self._config.prefix + listed.name
        return Tool(name, listed.description, listed.parameters, partial(self._call, listed.name))

    async def _call(self, name: str, arguments: JsonObject) -> str:
        line = self._line
        if line is None:
            raise McpError(f"{Connection.name_of(self._config)} is closed")
        return await on_mcp_loop(line.call(name, arguments, self._session))

    async def close(self) -> None:
        """Disconnect, and end the process of a command; takes a few seconds at most."""
        if self._pool is not None:
            await asyncio.shield(on_mcp_loop(self._close(self._pool)))

    async def _close(self, pool: Pool) -> None:
        # On the loop: only there is it known whether a cancelled `open` had begun.
        line, self._line = self._line, None
        if line is not None:
            await pool.leave(line)


def _offered(config: McpConfig, listed: Sequence[Listed]) -> list[Listed]:
    """Return the tools to offer.

    Raises:
        McpError: when the server lists an invalid or a repeated name, or not all allowed tools.
    """
    tools: dict[str, Listed] = {}
    for tool in listed:
        if config.tools is not None and tool.name not in config.tools:
            continue
        if not _NAME.fullmatch(config.prefix + tool.name):
            raise McpError(
                f"{Connection.name_of(config)} lists a tool with the invalid name "
                f"{config.prefix + tool.name!r:.80}"
            )
        if tool.name in tools:
            raise McpError(f"{Connection.name_of(config)} lists two tools named {tool.name}")
        tools[tool.name] = tool
    missing = [name for name in config.tools or () if name not in tools]
    if missing:
        names = ", ".join(repr(tool.name)[:80] for tool in listed[:20]) or "none"
        raise McpError(
            f"{Connection.name_of(config)} has no tool {', '.join(missing)}; it has: {names}"
        )
    return [tools[name] for name in config.tools] if config.tools else list(tools.values())
