"""HTTP/1.1 connections that cannot be held open for nothing.

A request's head and body have to arrive within deadlines, its head is bounded, a client has to
read what it asked for, and only so many connections are open: beyond them, one that waits for its
client is closed for each new one. So clients that send half a request, or nothing, keep nobody out.
"""

import asyncio
import resource
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_HEAD_SECONDS = 30.0
_BODY_SECONDS = 120.0
"""For the whole body: serving.max_body_mb in this time is slower than any network."""
_READ_SECONDS = 60.0
"""For a client to take more of an answer."""
_HEAD_BYTES = 65_536
_MOST = 4_096


def _room() -> int:
    """Connections that may be open: at most half of the files that this process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else max(16, min(_MOST, soft // 2))


class Connection(HttpToolsProtocol):
    """One client's connection, as uvicorn makes it."""

    most: ClassVar[int] = _room()
    """Connections of one server that are open at once."""
    _deadline: asyncio.TimerHandle | None = None
    _waiting_since: float | None = None
    """When it began to wait for its client; None while a request is being answered."""
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
            self._wait(_HEAD_SECONDS)  # it was idle between two requests
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > _HEAD_BYTES and not self.transport.is_closing():
            self._refuse(b"431 Request Header Fields Too Large")

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._head_bytes = -(1 << 62)  # what follows is the body's
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
        self.transport.abort()  # closing would wait for a client that does not read

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
        if self.flow.read_paused:  # it waits for us
            self._wait(seconds)
        else:
            self._refuse(b"408 Request Timeout")

    def _refuse(self, status: bytes) -> None:
        """Close it, with an answer where none has begun."""
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(
                b"HTTP/1.1 " + status + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
            )
        self._end_wait()
        self.transport.close()

    def _make_room(self) -> None:
        """Close the connection that has waited for its client for longest."""
        waiting = [
            (other._waiting_since, id(other), other)
            for other in self.connections
            if isinstance(other, Connection) and other._waiting_since is not None
        ]
        _, _, longest = min(waiting)
        longest._end_wait()
        self.connections.discard(longest)
        longest._refuse(b"503 Service Unavailable")
