"""One connection to an MCP server, from its start to its end, on the loop of all connections.

One task owns the SDK's contexts, because the same task must enter and leave them; calls come from
different tasks. The transports have two limits that the SDK's transports lack: the size of a
message, and the number of a process's lines that are not answers. The last part of the process's
standard error is kept for error messages; when the process ends, all its child processes are ended
too. Importing the SDK takes a second, so this module is imported late.
"""

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import anyio
import httpx2
import mcp_types
from anyio.streams.memory import MemoryObjectSendStream
from mcp import Client, ClientSession, MCPError
from mcp.client.stdio import get_default_environment
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from pydantic import ValidationError

from turnwise.config import McpConfig
from turnwise.core.aio import run_in_thread
from turnwise.core.child import Child
from turnwise.core.deadlines import deadline
from turnwise.core.json_types import JsonObject
from turnwise.core.untrusted import (
    IDENTITY,
    MAX_BYTES,
    MAX_VALUES,
    AnswerError,
    JsonCount,
    read_line,
)
from turnwise.core.watchdog import waiting
from turnwise.errors import InputError, TurnwiseError, first_line
from turnwise.tools.json_schema import check_parameters
from turnwise.tools.tool import McpError

if TYPE_CHECKING:
    from mcp.client._transport import TransportStreams

_ALIVE_SECONDS = 5.0
"""Time for a server to answer a ping after a call that it did not answer."""
_CLOSE_SECONDS = 8.0
"""Time for a connection to end once it is cancelled; longer than the sum of the limits below that
apply then."""
_POLITE_SECONDS = 3.0
"""Time for a session to end by itself, before it is cancelled."""
_CONNECT_SECONDS = 30.0
_LEAVE_SECONDS = 2.0
"""Time for a process to end after its standard input is closed."""
_KILL_SECONDS = 2.0
"""Time for a process to end after SIGTERM, and again after SIGKILL."""
_LONGEST = 8192
"""Maximum number of characters of a server's error."""
_MAX_UNASKED = 10_000
"""Maximum number of lines between two answers: notifications, and lines that are not messages."""
_MAX_PAGES = 100
_MAX_TOOLS = 5_000
_GONE = ("Session terminated", "Session not found")
"""Errors of a server that has lost our MCP session, for example after a restart."""


class McpConnection:
    """A connection to an MCP server.

    Args:
        name: Name of the server in errors.
        session: Id of the trajectory's session, sent in the header `session_header`.
    """

    def __init__(self, name: str, config: McpConfig, session: str) -> None:
        self._name, self._session, self._config = name, session, config
        self._leaving = asyncio.Event()
        self._scope = anyio.CancelScope()
        self._ready: asyncio.Future[ClientSession] = asyncio.get_running_loop().create_future()

        async def own() -> None:
            """Hold the SDK's contexts open, until `close` or until the connection fails."""
            transport = self._stdio() if config.url is None else self._http(config.url)
            with self._scope:
                # With this handshake, servers of all versions keep a session.
                async with Client(transport, mode="legacy", cache=None) as client:
                    self._ready.set_result(client.session)
                    await self._leaving.wait()

        self._owner = asyncio.create_task(own(), name=name)
        self._owner.add_done_callback(lambda owner: owner.cancelled() or owner.exception())
        self._end = ""
        """Reason why the process ended; "" while it runs, and for a server with a URL."""
        self._failed = self._doubtful = False

    async def opened(self) -> None:
        """Wait until the server has started and the handshake is done.

        Raises:
            McpError: when the server does not start, or is not an MCP server.
            DeadlineError: when the server does not answer within `start_timeout`.
            InputError: when an environment variable is missing.
        """
        either: list[asyncio.Future[Any]] = [self._ready, self._owner]
        try:
            with waiting(self._name, "MCP server"):
                async with deadline(self._config.start_timeout, f"{self._name} did not start"):
                    await asyncio.wait(either, return_when="FIRST_COMPLETED")
            if not self._ready.done():
                error = None if self._owner.cancelled() else self._owner.exception()
                while isinstance(error, BaseExceptionGroup):  # task groups wrap the error
                    error = error.exceptions[0]
                if isinstance(error, InputError):
                    raise error
                why = (
                    "it ended" if error is None else f"{type(error).__name__}: {first_line(error)}"
                )
                raise McpError(f"{self._name} did not start: {self._end or why}")
        except BaseException:
            await self.close()
            raise

    @asynccontextmanager
    async def _http(self, url: str) -> "AsyncIterator[TransportStreams]":
        headers = {**IDENTITY, **_expanded(self._config.headers, "headers")}
        if self._config.session_header:
            headers[self._config.session_header] = self._session

        async def limit(response: httpx2.Response) -> None:
            # The SDK itself limits single events; a stream of events has no maximum length.
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                assert isinstance(response.stream, httpx2.AsyncByteStream)
                response.stream = _Limited(response.stream)

        waits = httpx2.Timeout(_CONNECT_SECONDS, read=None)  # calls have their own deadlines
        async with (
            httpx2.AsyncClient(
                headers=headers, timeout=waits, event_hooks={"response": [limit]}
            ) as client,
            streamable_http_client(
                url, http_client=client, max_sse_event_size=MAX_BYTES
            ) as streams,
        ):
            yield streams

    @asynccontextmanager
    async def _stdio(self) -> "AsyncIterator[TransportStreams]":
        """Start the server's process, and end it at the end of the `with` block. Raise OSError when
        the process does not start."""
        config = self._config
        environment = {**get_default_environment(), **_expanded(config.env, "env")}
        command = [config.command or "", *config.args]
        child = await Child.start(command, environment, cwd=config.cwd)
        received, reading = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        writing, to_send = anyio.create_memory_object_stream[SessionMessage](0)

        async def read() -> None:
            async with received:
                with suppress(OSError, anyio.ClosedResourceError, anyio.BrokenResourceError):
                    self._end = await _pass_on(child, received)
                self._end = self._end or "closed its output"

        async def write() -> None:
            with suppress(OSError, RuntimeError):  # a broken pipe, or a pipe that `end` has closed
                async with to_send:
                    async for message in to_send:
                        text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                        child.stdin.write(text.encode() + b"\n")
                        await child.stdin.drain()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            tasks.start_soon(write)
            try:
                yield reading, writing
            finally:
                with anyio.CancelScope(shield=True):
                    await child.end(_KILL_SECONDS, leave=_LEAVE_SECONDS, terminate=_KILL_SECONDS)
                reading.close()
                writing.close()
                tasks.cancel_scope.cancel()

    async def usable(self) -> bool:
        """Return whether the connection can be used; ping the server if it left a call
        unanswered."""
        if self._failed or self._end or self._leaving.is_set() or self._owner.done():
            return False
        if self._doubtful:
            try:
                async with deadline(_ALIVE_SECONDS, ""):
                    await self._request(mcp_types.PingRequest(), mcp_types.EmptyResult)
            except McpError:  # an error is also an answer, unless the connection failed
                pass
            except TurnwiseError:
                return False
            self._doubtful = False
            return not self._failed
        return True

    async def list_tools(self) -> list[tuple[str, str, JsonObject]]:
        """Return name, description and parameters of all tools that the server lists. Raise
        McpError when a tool has an invalid schema, or there are too many tools or pages."""
        tools: list[tuple[str, str, JsonObject]] = []
        cursor: str | None = None
        for _ in range(_MAX_PAGES):
            params = mcp_types.PaginatedRequestParams(cursor=cursor)
            request = mcp_types.ListToolsRequest(params=params)
            page = await self._request(request, mcp_types.ListToolsResult)
            for tool in page.tools:
                about = f"{self._name} lists the tool {tool.name!r:.80}, whose schema"
                if tool.input_schema.get("type") != "object":
                    raise McpError(f"{about} is of no object")
                try:  # in a thread, because this loop serves all connections
                    await run_in_thread(check_parameters, tool.input_schema, tool.name)
                except InputError as error:
                    raise McpError(f"{self._name}: {error}") from None
                tools.append((tool.name, tool.description or "", tool.input_schema))
            if len(tools) > _MAX_TOOLS:
                break
            if (cursor := page.next_cursor) is None:
                return tools
        raise McpError(f"{self._name} lists more than {_MAX_TOOLS} tools or {_MAX_PAGES} pages")

    async def call(self, name: str, arguments: JsonObject, session: str) -> object:
        """Call a tool, and return its texts joined by line breaks, or a list of texts and images if
        the result has an image. A note takes the place of each part that is left out.

        A shared server gets the trajectory's `session` as `_meta["turnwise/session"]`.

        Raises:
            McpError: when the tool returns an error, or the server fails.
        """
        meta: Any = {"turnwise/session": session} if self._config.shared else None
        params = mcp_types.CallToolRequestParams(name=name, arguments=arguments, _meta=meta)
        request = mcp_types.CallToolRequest(params=params)
        result = await self._request(request, mcp_types.CallToolResult)
        parts: list[Any] = []
        for block in result.content:
            if block.type == "resource_link":
                parts.append(f"[link: {block.uri}]")
            elif block.type in ("text", "resource"):
                holder = block.resource if block.type == "resource" else block
                parts.append(getattr(holder, "text", f"[{block.type} left out]"))
            elif block.type == "image" and not result.is_error:
                url = f"data:{block.mime_type};base64,{block.data}"
                parts.append({"type": "image", "image": url})
            else:
                parts.append(f"[{block.type} left out]")
        if any(isinstance(part, dict) for part in parts):
            return parts
        if not parts and result.structured_content is not None:
            parts = [json.dumps(result.structured_content, ensure_ascii=False)]
        text = "\n".join(parts)
        if result.is_error:
            raise McpError(text or "the tool failed without a message")
        return text

    async def _request(self, request: Any, kind: type[Any]) -> Any:
        """Send a request and return its answer; raise McpError for an error or an invalid answer,
        or if the connection has ended."""
        asking = asyncio.ensure_future(self._ready.result().send_request(request, kind))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            asking.cancel()  # not awaited, because the cancelled task sends a notice to the server
            self._doubtful = True  # the server may hang, or just be slow
            raise
        except MCPError as error:
            if error.code == mcp_types.CONNECTION_CLOSED or error.message in _GONE:
                raise self._lost(error.message) from error
            raise McpError(error.message[:_LONGEST]) from error
        except ValidationError as error:
            raise McpError(f"{self._name} gave an invalid answer: {first_line(error)}") from error
        except Exception as error:
            raise self._lost(first_line(error)) from error

    def _lost(self, message: str) -> McpError:
        self._failed = True
        why = self._end or f"closed the connection ({message[:_LONGEST] or 'it failed'})"
        return McpError(f"{self._name} {why}; it can be called again")

    async def close(self) -> None:
        """End the connection and the server's process, in at most a few seconds, even if this call
        is cancelled. It may be called again."""
        polite = _POLITE_SECONDS if self._ready.done() else 0.0
        if not self._leaving.is_set():
            self._leaving.set()
            self._scope.deadline = anyio.current_time() + polite
        await asyncio.wait([self._owner], timeout=polite + _CLOSE_SECONDS)
        self._owner.cancel()


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


async def _pass_on(
    child: Child, received: MemoryObjectSendStream[SessionMessage | Exception]
) -> str:
    """Pass on the messages of a process until its output ends; return the reason why it ended."""
    unasked = 0
    while unasked <= _MAX_UNASKED:
        try:
            line = await read_line(child.stdout)
        except AnswerError as error:
            return str(error)
        if not line:
            await child.exited(1.0)  # the status and the last lines of stderr explain the end
            await child.heard(1.0)
            status, lines = child.status, child.last_words.splitlines()
            how = "closed its output" if status is None else f"ended with status {status}"
            return how + (f" ({lines[-1].strip()[:300]})" if lines else "")
        message = None
        if JsonCount(line).values <= MAX_VALUES:
            with suppress(ValueError):
                message = mcp_types.jsonrpc_message_adapter.validate_json(line, by_name=False)
        answer = isinstance(message, mcp_types.JSONRPCResponse | mcp_types.JSONRPCError)
        unasked = 0 if answer else unasked + 1
        if message is not None:
            await received.send(SessionMessage(message))
    return f"sent {_MAX_UNASKED} lines that answer no request"


class _Limited(httpx2.AsyncByteStream):
    """A response's body that raises an error when it becomes too long."""

    def __init__(self, body: httpx2.AsyncByteStream) -> None:
        self._body = body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size, count = 0, JsonCount()
        async for part in self._body:
            size += len(part)
            count.add(part)
            if size > MAX_BYTES or count.values > MAX_VALUES:
                raise httpx2.StreamError(
                    f"a message of more than {MAX_BYTES:,} bytes or {MAX_VALUES:,} values"
                )
            yield part

    async def aclose(self) -> None:
        await self._body.aclose()
