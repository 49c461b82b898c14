"""A channel between a worker and a process that uses it: pickled messages over one connection.

A message takes less processor time than a call of a Ray actor. A worker listens on its node's
address and hands out a token through Ray; from a client that has not sent the token, nothing is
unpickled.
"""

import asyncio
import hmac
import pickle
import secrets
from collections.abc import Callable
from typing import NamedTuple, cast

_LENGTH_BYTES = 8
_TOKEN_BYTES = 32
_TOKEN_SECONDS = 10.0
"""Time in which a client has to send the token."""


class Address(NamedTuple):
    """The address of a listening worker, and the token that its clients send first.

    Example:
        >>> Address("127.0.0.1", 40001, b"secret").port
        40001
    """

    host: str
    port: int
    token: bytes


class Channel(asyncio.Protocol):
    """One end of a connection.

    Args:
        token: Bytes that the other end has to send first; empty at the client's end.
        opened: Called with the channel once the token has come.

    Example:
        channel = await connect(address)
        channel.received = print
        channel.send("hello")
    """

    def __init__(
        self, token: bytes = b"", opened: "Callable[[Channel], None] | None" = None
    ) -> None:
        self.received: Callable[..., None] = lambda message: None
        """Called with each message."""
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once the connection is closed, by either end."""
        self._token, self._opened = token, opened
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._expiry: asyncio.TimerHandle | None = None

    def send(self, message: object) -> None:
        """Send a message; does nothing once the channel is closed.

        Raises:
            Exception: any error of `pickle`.
        """
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)

    def close(self) -> None:
        """Close the connection; what was sent still arrives."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        if self._token:
            loop = asyncio.get_running_loop()
            self._expiry = loop.call_later(_TOKEN_SECONDS, self.close)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._token and not self._check_token():
            return
        start, end = _LENGTH_BYTES, len(self._buffer)
        while start <= end:
            length = int.from_bytes(self._buffer[start - _LENGTH_BYTES : start], "big")
            if start + length > end:
                break
            message = self._buffer[start : start + length]
            start += length + _LENGTH_BYTES
            self.received(pickle.loads(message))
        del self._buffer[: start - _LENGTH_BYTES]

    def connection_lost(self, error: Exception | None) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        if not self.closed.done():
            self.closed.set_result(None)

    def _check_token(self) -> bool:
        """Return whether the token has come; a wrong one closes the connection."""
        if len(self._buffer) < len(self._token):
            return False
        sent = bytes(self._buffer[: len(self._token)])
        if not hmac.compare_digest(sent, self._token):
            self.close()
            self._buffer.clear()
            return False
        del self._buffer[: len(self._token)]
        self._token = b""
        if self._expiry is not None:
            self._expiry.cancel()
        if self._opened is not None:
            self._opened(self)
        return True

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)


async def listen(host: str, opened: Callable[[Channel], None]) -> Address:
    """Listen on a free port until the event loop ends.

    Args:
        opened: Called with each new channel.

    Example:
        address = await listen("127.0.0.1", channels.append)
    """
    token, loop = secrets.token_bytes(_TOKEN_BYTES), asyncio.get_running_loop()
    server = await loop.create_server(lambda: Channel(token, opened), host, 0)
    return Address(host, server.sockets[0].getsockname()[1], token)


async def connect(address: Address) -> Channel:
    """Open a channel to a process that listens.

    Raises:
        OSError: when it cannot be reached.

    Example:
        channel = await connect(address)
    """
    loop = asyncio.get_running_loop()
    _, channel = await loop.create_connection(Channel, address.host, address.port)
    channel._write(address.token)
    return channel
