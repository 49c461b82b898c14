"""Transports for the MCP SDK with limits that its own lack: a message has a largest size.

From a server's process, lines that are no messages are dropped up to a number, and the end of
standard error is kept for errors. The process and all that it started end with the transport, in a
few seconds at most.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TypeAlias

import anyio
import httpx2
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCError, JSONRPCResponse, jsonrpc_message_adapter

from turnwise.core.child import Child
from turnwise.core.untrusted import (
    IDENTITY,
    MAX_BYTES,
    MAX_VALUES,
    AnswerError,
    read_line,
    values_in,
)

_Received: TypeAlias = SessionMessage | Exception
MAX_UNASKED = 10_000
"""Maximum number of lines between two answers: notifications, and lines that are no messages."""
_CONNECT_SECONDS = 30.0
_LEAVE_SECONDS = 2.0
"""Time to end after standard input is closed."""
_KILL_SECONDS = 2.0
"""Time to end after SIGTERM, and again after SIGKILL."""


class ServerProcess:
    """A server's process; `env` has its variables besides those that are always inherited."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], cwd: str | None) -> None:
        self._command, self._env, self._cwd = command, env, cwd
        self._child: Child | None = None
        self._flooded = ""
        self.ended = False
        """Whether it can no longer answer."""

    @property
    def why(self) -> str:
        """Reason of its end, with the last line of its standard error; "" while it runs."""
        if self._child is None or not self.ended:
            return ""
        if self._flooded:
            return self._flooded
        status = self._child.status
        how = "closed its output" if status is None else f"ended with status {status}"
        lines = self._child.last_words.splitlines()
        return how + (f" ({lines[-1].strip()[:300]})" if lines else "")

    @asynccontextmanager
    async def streams(
        self,
    ) -> AsyncIterator[
        tuple[MemoryObjectReceiveStream[_Received], MemoryObjectSendStream[SessionMessage]]
    ]:
        """Start the process and open its streams of messages; it has ended afterwards.

        Raises:
            OSError: when it cannot be started.
        """
        environment = {**get_default_environment(), **self._env}
        self._child = child = await Child.start(self._command, environment, cwd=self._cwd)
        received, reading = anyio.create_memory_object_stream[_Received](0)
        writing, to_send = anyio.create_memory_object_stream[SessionMessage](0)

        async def read() -> None:
            async with received:
                try:
                    with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
                        await self._read(child, received)
                finally:
                    self.ended = True

        async def write() -> None:
            async with to_send:
                async for message in to_send:
                    text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                    child.stdin.write(text.encode() + b"\n")
                    await child.stdin.drain()

        tasks = [asyncio.create_task(read()), asyncio.create_task(write())]
        try:
            yield reading, writing
        finally:
            with anyio.CancelScope(shield=True):
                self.ended = True
                await child.end(_KILL_SECONDS, leave=_LEAVE_SECONDS, terminate=_KILL_SECONDS)
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks, timeout=_KILL_SECONDS)
                for task in tasks:  # a broken pipe, after which there is nothing to write
                    if task.done() and not task.cancelled():
                        task.exception()
                reading.close()
                writing.close()

    async def _read(self, child: Child, received: MemoryObjectSendStream[_Received]) -> None:
        unasked = 0
        while True:
            try:
                line = await read_line(child.stdout)
            except AnswerError as error:
                self._flooded = str(error)
                return
            if not line:
                await child.exited(1.0)  # its status and its last words explain the end
                await child.heard(1.0)
                return
            message = None
            if values_in(line) <= MAX_VALUES:
                with suppress(ValueError):
                    message = jsonrpc_message_adapter.validate_json(line, by_name=False)
            answer = isinstance(message, JSONRPCResponse | JSONRPCError)
            unasked = 0 if answer else unasked + 1
            if unasked > MAX_UNASKED:
                self._flooded = f"sent {MAX_UNASKED} lines that answer no request"
                return
            if message is not None:
                await received.send(SessionMessage(message))


def http_client(headers: Mapping[str, str]) -> httpx2.AsyncClient:
    """Return a client whose JSON answers have at most `MAX_BYTES` bytes.

    It waits for answers without a deadline; calls have their own.
    """
    return httpx2.AsyncClient(
        headers={**IDENTITY, **headers},
        timeout=httpx2.Timeout(_CONNECT_SECONDS, read=None),
        event_hooks={"response": [_limit]},
    )


async def _limit(response: httpx2.Response) -> None:
    # The SDK limits events itself; streams of them have no end.
    if not response.headers.get("content-type", "").startswith("text/event-stream"):
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _Limited(response.stream)


class _Limited(httpx2.AsyncByteStream):
    """A body that fails when it becomes too long."""

    def __init__(self, body: httpx2.AsyncByteStream) -> None:
        self._body = body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = values = 0
        async for part in self._body:
            size += len(part)
            values += values_in(part)
            if size > MAX_BYTES or values > MAX_VALUES:
                raise httpx2.StreamError(
                    f"a message of more than {MAX_BYTES:,} bytes or {MAX_VALUES:,} values"
                )
            yield part

    async def aclose(self) -> None:
        await self._body.aclose()
