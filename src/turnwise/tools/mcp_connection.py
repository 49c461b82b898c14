"""One connection to an MCP server, from its start to its end, on the loop of all connections.

One task owns the SDK's contexts, which must be entered and left in the same task; calls come from
others. Importing the SDK takes a second, so that it is imported with the first connection.
"""

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ValidationError

from turnwise.config import McpConfig
from turnwise.core.deadlines import deadline
from turnwise.core.json_types import JsonObject
from turnwise.core.optional import optional
from turnwise.core.untrusted import MAX_BYTES
from turnwise.core.watchdog import waiting
from turnwise.errors import InputError, TurnwiseError, first_line

if TYPE_CHECKING:
    from anyio import CancelScope
    from mcp import Client
    from mcp.client._transport import TransportStreams

    from turnwise.tools.mcp_transports import ServerProcess

_ALIVE_SECONDS = 5.0
"""Time for a server to answer a ping after a call that it did not answer."""
_CLOSE_SECONDS = 8.0
"""Time for a connection to end; more than its parts take together."""
_POLITE_SECONDS = 3.0
"""Time for a session to end by itself, before its tasks are cancelled."""
_LONGEST = 8192
"""Maximum number of characters of a server's error."""
_MAX_PAGES = 100
_MAX_TOOLS = 5_000
_GONE = ("Session terminated", "Session not found")
"""Errors of a server that has lost our MCP session, for example because it started again."""


class McpError(TurnwiseError):
    """An MCP server that failed, or the error that its tool returned."""


class Listed(NamedTuple):
    """A tool as a server lists it."""

    name: str
    description: str
    parameters: JsonObject


class Connection:
    """A connection to one server; `session` identifies the trajectory, for `session_header`."""

    def __init__(self, config: McpConfig, session: str) -> None:
        self.name = self.name_of(config)
        self._session, self._config = session, config
        self._process: ServerProcess | None = None
        self._owner: asyncio.Task[None] | None = None
        self._leaving = asyncio.Event()
        self._scope: CancelScope | None = None
        self._failed = self._doubtful = False

    @staticmethod
    def name_of(config: McpConfig) -> str:
        """Return a server's name in errors."""
        if config.url:
            return f"the MCP server {re.sub('//[^/@]*@', '//', config.url)}"
        return f"the MCP server {' '.join([config.command or '', *config.args])[:100]}"

    async def open(self) -> None:
        """Start and greet the server.

        Raises:
            McpError: when it does not start, or is no MCP server.
            DeadlineError: when it does not answer within `start_timeout`.
            InputError: when an environment variable is missing, or the SDK.
        """
        optional("mcp", "mcp", "an MCP server")
        self._ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._owner = asyncio.create_task(self._own(), name=self.name)
        either: list[asyncio.Future[Any]] = [self._ready, self._owner]
        try:
            with waiting(self.name, "MCP server"):
                async with deadline(self._config.start_timeout, f"{self.name} did not start"):
                    await asyncio.wait(either, return_when="FIRST_COMPLETED")
            if not self._ready.done():
                error = None if self._owner.cancelled() else self._owner.exception()
                while isinstance(error, BaseExceptionGroup):  # of the SDK's task groups
                    error = error.exceptions[0]
                if isinstance(error, InputError):
                    raise error
                why = (
                    "it ended" if error is None else f"{type(error).__name__}: {first_line(error)}"
                )
                raise McpError(f"{self.name} did not start: {self._end or why}")
        except BaseException:
            await self.close()
            raise

    async def _own(self) -> None:
        """Hold the SDK's contexts open, until `close` or until the connection fails."""
        import anyio
        from mcp import Client

        self._scope = anyio.CancelScope()
        with self._scope:
            # The handshake by which servers of all versions keep a session.
            async with Client(self._transport(), mode="legacy", cache=None) as client:
                self._ready.set_result(client)
                await self._leaving.wait()

    @asynccontextmanager
    async def _transport(self) -> "AsyncIterator[TransportStreams]":
        from turnwise.tools.mcp_transports import ServerProcess, http_client

        config = self._config
        if config.url is None:
            command = [config.command or "", *config.args]
            self._process = ServerProcess(command, _expanded(config.env, "env"), config.cwd)
            async with self._process.streams() as streams:
                yield streams
            return
        from mcp.client.streamable_http import streamable_http_client

        headers = _expanded(config.headers, "headers")
        if config.session_header:
            headers[config.session_header] = self._session
        async with (
            http_client(headers) as client,
            streamable_http_client(
                config.url, http_client=client, max_sse_event_size=MAX_BYTES
            ) as streams,
        ):
            yield streams

    @property
    def _end(self) -> str:
        """Reason of the process's end; "" while it runs, and for a server with a URL."""
        return self._process.why if self._process is not None else ""

    async def usable(self) -> bool:
        """Return whether it can be used; asks the server, if it left a call unanswered."""
        if self._failed or self._owner is None or self._owner.done() or self._leaving.is_set():
            return False
        if self._process is not None and self._process.ended:
            return False
        if self._doubtful:
            import mcp_types

            try:
                async with deadline(_ALIVE_SECONDS, ""):
                    await self._request(mcp_types.PingRequest(), mcp_types.EmptyResult)
            except McpError:  # an answer too, unless the connection failed
                pass
            except TurnwiseError:
                return False
            self._doubtful = False
            return not self._failed
        return True

    async def list_tools(self) -> list[Listed]:
        """Return all tools that the server lists.

        Raises:
            McpError: when it lists none of that form, or without an end.
        """
        import mcp_types

        tools: list[Listed] = []
        cursor: str | None = None
        for _ in range(_MAX_PAGES):
            params = mcp_types.PaginatedRequestParams(cursor=cursor)
            request = mcp_types.ListToolsRequest(params=params)
            page = await self._request(request, mcp_types.ListToolsResult)
            for tool in page.tools:
                about = f"{self.name} lists the tool {tool.name!r:.80}, whose schema"
                if tool.input_schema.get("type") != "object":
                    raise McpError(f"{about} is of no object")
                if remote := _remote_reference(tool.input_schema):
                    raise McpError(f"{about} refers to {remote:.80}")
                tools.append(Listed(tool.name, tool.description or "", tool.input_schema))
            cursor = page.next_cursor
            if cursor is None or len(tools) > _MAX_TOOLS:
                break
        if cursor is not None or len(tools) > _MAX_TOOLS:
            raise McpError(f"{self.name} lists more than {_MAX_TOOLS} tools or {_MAX_PAGES} pages")
        return tools

    async def call(self, name: str, arguments: JsonObject, session: str) -> str:
        """Call a tool, and return its result as text.

        Args:
            session: Identifier of the trajectory, which a shared server gets as
                `_meta["turnwise/session"]`.

        Raises:
            McpError: when the tool returns an error, or the server fails.
        """
        import mcp_types

        meta: Any = {"turnwise/session": session} if self._config.shared else None
        params = mcp_types.CallToolRequestParams(name=name, arguments=arguments, _meta=meta)
        request = mcp_types.CallToolRequest(params=params)
        result = await self._request(request, mcp_types.CallToolResult)
        text = _text(result)
        if result.is_error:
            raise McpError(text or "the tool failed without a message")
        return text

    async def _request(self, request: Any, kind: type[Any]) -> Any:
        """Send a request, and wait for its answer or the connection's end."""
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        assert self._owner is not None
        asking = asyncio.ensure_future(self._ready.result().session.send_request(request, kind))
        try:
            await asyncio.wait([asking, self._owner], return_when="FIRST_COMPLETED")
            if not asking.done():
                raise self._lost()
            return asking.result()
        except asyncio.CancelledError:
            self._doubtful = True  # it may hang, or just be slow
            raise
        except TurnwiseError:
            raise
        except MCPError as error:
            if error.code == CONNECTION_CLOSED or error.message in _GONE:
                raise self._lost(error.message) from error
            raise McpError(error.message[:_LONGEST]) from error
        except ValidationError as error:
            raise McpError(f"{self.name} gave an invalid answer: {first_line(error)}") from error
        except Exception as error:
            raise self._lost(first_line(error)) from error
        finally:
            asking.cancel()

    def _lost(self, message: str = "") -> McpError:
        self._failed = True
        why = self._end or f"closed the connection ({message[:_LONGEST] or 'it failed'})"
        return McpError(f"{self.name} {why}; it can be called again")

    async def close(self) -> None:
        """End the connection, and the server's process; returns in a few seconds at most."""
        owner = self._owner
        if owner is None:
            return
        self._leaving.set()
        if self._ready.done() and not self._ready.cancelled():
            await asyncio.wait([owner], timeout=_POLITE_SECONDS)
        if self._scope is None:
            owner.cancel()
        else:
            self._scope.cancel()
        await asyncio.wait([owner], timeout=_CLOSE_SECONDS)
        if not owner.done():
            owner.cancel()
        elif not owner.cancelled():
            owner.exception()  # `open` or a call has reported it
        self._ready.cancel()


def _expanded(values: Mapping[str, str], key: str) -> dict[str, str]:
    """Return values with `${NAME}` replaced by this process's environment variables."""

    def variable(found: re.Match[str]) -> str:
        value = os.environ.get(found[1])
        if value is None:
            raise InputError(
                f"an MCP server's {key} names the variable {found[1]}, which is not set"
            )
        return value

    return {name: re.sub(r"\$\{(\w+)\}", variable, value) for name, value in values.items()}


def _remote_reference(schema: object) -> str:
    """Return a schema's first reference to another document; "" if it has none."""
    if isinstance(schema, Mapping):
        for key, value in schema.items():
            if key in ("$ref", "$dynamicRef") and not str(value).startswith("#"):
                return str(value)
            if found := _remote_reference(value):
                return found
    elif isinstance(schema, Sequence) and not isinstance(schema, str):
        return next(filter(None, map(_remote_reference, schema)), "")
    return ""


def _text(result: Any) -> str:
    """Return a result's texts, one per line; other parts are named as left out."""
    parts: list[str] = []
    for block in result.content:
        if block.type == "resource_link":
            parts.append(f"[link: {block.uri}]")
        else:
            holder = block.resource if block.type == "resource" else block
            parts.append(getattr(holder, "text", f"[{block.type} left out]"))
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)
