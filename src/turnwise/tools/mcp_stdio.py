"""The process of an MCP server that speaks over its standard input and output.

A transport for the MCP SDK with limits that its own lacks: a message has a largest size, lines that
are no messages are dropped up to a number, and the end of standard error is kept for errors. The
process and all that it started end with the transport, in a few seconds at most.
"""

import asyncio
import atexit
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

import anyio
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCError, JSONRPCResponse, jsonrpc_message_adapter

from turnwise.core.children import exited, kill_group
from turnwise.core.untrusted import MAX_BYTES, MAX_VALUES, AnswerError, read_line, values_in

MAX_UNASKED = 10_000
"""Maximum number of lines between two answers: notifications, and lines that are no messages."""
_KEPT = 4096
"""Number of bytes of standard error that are kept for messages."""
_LEAVE_SECONDS = 2.0
"""Time to end after standard input is closed."""
_KILL_SECONDS = 2.0
"""Time to end after SIGTERM, and again after SIGKILL."""

_running: set[asyncio.subprocess.Process] = set()
"""Servers whose process groups have not been ended."""


@atexit.register
def _kill_all() -> None:
    for process in list(_running):
        kill_group(process.pid, process.returncode is not None)


class ServerProcess:
    """A server's process.

    Args:
        command: Program and arguments.
        env: Variables besides those that are always inherited.

    Example:
        server = ServerProcess(["mcp-server-time"], {}, None)
        async with server.streams() as (reading, writing):
            ...
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], cwd: str | None) -> None:
        self._command, self._env, self._cwd = command, env, cwd
        self._process: asyncio.subprocess.Process | None = None
        self._errors = b""
        self._flooded = ""
        self.ended = False
        """Whether it can no longer answer."""

    @property
    def why(self) -> str:
        """Reason of its end, with the last line of its standard error; "" while it runs."""
        if self._process is None or not self.ended:
            return ""
        if self._flooded:
            return self._flooded
        status = self._process.returncode
        how = "closed its output" if status is None else f"ended with status {status}"
        lines = self._errors.decode(errors="replace").strip().splitlines()
        return how + (f" ({lines[-1].strip()[:300]})" if lines else "")

    @asynccontextmanager
    async def streams(
        self,
    ) -> AsyncIterator[
        tuple[
            "anyio.streams.memory.MemoryObjectReceiveStream[SessionMessage | Exception]",
            "anyio.streams.memory.MemoryObjectSendStream[SessionMessage]",
        ]
    ]:
        """Start the process and open its streams of messages; it has ended afterwards.

        Raises:
            OSError: when it cannot be started.
        """
        process = await asyncio.create_subprocess_exec(
            *self._command,
            env={**get_default_environment(), **self._env},
            cwd=self._cwd,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # a group of its own, to end what it starts too
            limit=MAX_BYTES,
        )
        self._process = process
        _running.add(process)
        received, reading = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        writing, to_send = anyio.create_memory_object_stream[SessionMessage](0)

        async def read() -> None:
            assert process.stdout is not None
            async with received:
                try:
                    await self._read(process.stdout, received)
                finally:
                    self.ended = True

        async def write() -> None:
            assert process.stdin is not None
            async with to_send:
                async for message in to_send:
                    text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                    process.stdin.write(text.encode() + b"\n")
                    await process.stdin.drain()

        self._stderr = asyncio.create_task(self._keep_errors(process.stderr))
        tasks = [asyncio.create_task(read()), asyncio.create_task(write()), self._stderr]
        try:
            yield reading, writing
        finally:
            with anyio.CancelScope(shield=True):
                await self._end(tasks)
                reading.close()
                writing.close()

    async def _read(
        self,
        output: asyncio.StreamReader,
        received: "anyio.streams.memory.MemoryObjectSendStream[SessionMessage | Exception]",
    ) -> None:
        unasked = 0
        while True:
            try:
                line = await read_line(output)
            except AnswerError as error:
                self._flooded = str(error)
                return
            if not line:
                assert self._process is not None
                await exited(self._process, 1.0)  # its status and its last words explain the end
                await asyncio.wait([self._stderr], timeout=1.0)
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
                try:
                    await received.send(SessionMessage(message))
                except (anyio.ClosedResourceError, anyio.BrokenResourceError):
                    return

    async def _keep_errors(self, errors: asyncio.StreamReader | None) -> None:
        assert errors is not None
        while part := await errors.read(65536):
            self._errors = (self._errors + part)[-_KEPT:]

    async def _end(self, tasks: Sequence["asyncio.Task[None]"]) -> None:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        self.ended = True
        process.stdin.close()
        if not await exited(process, _LEAVE_SECONDS):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGTERM)
            await exited(process, _KILL_SECONDS)
        # Also whatever it started and left behind.
        kill_group(process.pid, process.returncode is not None)
        await exited(process, _KILL_SECONDS)
        _running.discard(process)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=_KILL_SECONDS)
        for task in tasks:  # a broken pipe, after which there is nothing to write
            if task.done() and not task.cancelled():
                task.exception()
        process._transport.close()  # type: ignore[attr-defined]  # a grandchild may hold a pipe
