"""HTTP/1.1 connections with deadlines and limits.

There are deadlines for receiving a request's header and body and for a client's reading of the
answer, and limits on the size of a header and on the number of connections: beyond the latter, each
new connection closes the one that has waited for its client the longest. Clients that send half a
request, or nothing, cannot block others.
"""

import asyncio
import resource
import select
from contextlib import suppress
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_HEAD_SECONDS = 30.0
_BODY_SECONDS = 120.0
"""Time for a whole body: any network transfers serving.max_body_mb faster."""
_READ_SECONDS = 60.0
"""Time for a client to read the next part of its answer."""
_HEAD_BYTES = 65_536
_MOST = 4_096
_FILES = 1 << 20
"""Largest soft limit of open files that a server sets, Linux' own maximum by default."""


def most_connections() -> int:
    """Raise the soft limit of open files to the hard one; return how many connections there may be.

    They are at most half of that limit: requests open further files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Programs that agents start inherit the limit, and some close every number up to it.
    wanted = min(hard, _FILES) if hard != resource.RLIM_INFINITY else _FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # a limit that cannot be raised holds
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else max(16, min(_MOST, soft // 2))


def _has_input(transport: asyncio.Transport) -> bool:
    """Return whether bytes, or the end, wait to be read."""
    asked = select.poll()
    asked.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
    return bool(asked.poll(0))


class Connection(HttpToolsProtocol):
    """One client's connection; uvicorn makes them."""

    most: ClassVar[int] = _MOST
    """Maximum number of open connections of one server; `most_connections` when one starts."""
    _deadline: asyncio.TimerHandle | None = None
    _waiting_since: float | None = None
    """Time at which the wait for the client began; None while a request is answered."""
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait(_HEAD_SECONDS)
        if len(self.connections) > self.most:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_wait()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._deadline is None and self._waiting_since is not None:
            self._wait(_HEAD_SECONDS)  # the first bytes after an idle time
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > _HEAD_BYTES and not self.transport.is_closing():
            self._refuse(b"431 Request Header Fields Too Large")

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._head_bytes = -(1 << 62)  # the body follows
        self._wait(_BODY_SECONDS)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._head_bytes = 0
        self._end_wait()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._deadline is None and not self.pipeline:
            self._waiting_since = self.loop.time()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_clock()
        self._deadline = self.loop.call_later(_READ_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_clock()

    def timeout_keep_alive_handler(self) -> None:
        if _has_input(self.transport):  # the next request came just now: it is read next
            return
        self.transport.abort()  # close() would wait for a client that does not read

    def _wait(self, seconds: float) -> None:
        self._stop_clock()
        self._waiting_since = self.loop.time()
        self._deadline = self.loop.call_later(seconds, self._expire, seconds)

    def _end_wait(self) -> None:
        self._stop_clock()
        self._waiting_since = None

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self, seconds: float) -> None:
        if self.flow.read_paused:  # the client waits for the server
            self._wait(seconds)
        else:
            self._refuse(b"408 Request Timeout")

    def _refuse(self, status: bytes) -> None:
        """Close the connection, with an answer if none has begun."""
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(
                b"HTTP/1.1 " + status + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
            )
        self._end_wait()
        self.transport.close()

    def _make_room(self) -> None:
        """Close the connection that has waited for its client the longest."""
        waiting = [
            (other._waiting_since, id(other), other)
            for other in self.connections
            if isinstance(other, Connection) and other._waiting_since is not None
        ]
        _, _, longest = min(waiting)
        longest._end_wait()
        self.connections.discard(longest)
        longest._refuse(b"503 Service Unavailable")
