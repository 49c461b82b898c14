"""A channel between a worker and a process that uses it: pickled messages over one connection.

A message takes less processor time than a call of a Ray actor. A worker listens on its node's
address and hands out a token through Ray. Each end proves to the other that it knows the token,
without sending it. Neither end unpickles anything before it has received this proof.
"""

import asyncio
import hmac
import pickle
import secrets
import socket
from collections.abc import Callable, Generator
from typing import NamedTuple, cast

from turnwise.errors import EngineError
from turnwise.serving.openai.address import listen as bind

_LENGTH_BYTES = 8
_BLOCK_BYTES = 32  # size of the token, of a challenge and of a proof
_PROOF_SECONDS = 10.0  # time in which the other end has to prove that it knows the token
_MAX_UNPROVEN = 512
"""Maximum number of connections to a listener whose other end has not proven yet that it knows the
token; if there are more, the oldest connection is closed. The number is large because all processes
of a large run may connect at once."""
_SILENT_SECONDS = 60
"""Seconds after which a connection is closed if the machine of the other end does not answer."""


class ChannelError(EngineError):
    """The channel to a worker was lost or cannot be opened, though the worker is alive."""


class Address(NamedTuple):
    """The address of a listening worker, and the token that its clients have to know."""

    host: str
    port: int
    token: bytes


class Channel(asyncio.Protocol):
    """One end of a connection; `opened` is called once the other end has proven that it knows the
    token."""

    def __init__(self, token: bytes, opened: "Callable[[Channel], None]", *, listens: bool) -> None:
        self.received: Callable[..., None] = lambda message: None
        """Called with each message."""
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Set to the reason ("" if there is no reason) once either end has closed the
        connection."""
        self._token, self._opened, self._listens = token, opened, listens
        self._handshake: Generator[None, bytes, bool] | None = self._shake_hands()
        """None once the other end has proven that it knows the token."""
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._why = ""

    def send(self, message: object) -> None:
        """Send a message; does nothing once the channel is closed."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)

    def close(self, why: str = "") -> None:
        """Close the connection; what was sent still arrives."""
        self._why = self._why or why
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class is not a subclass
        # Have the kernel close a connection that the network has cut without telling either end.
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENT_SECONDS // 2)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _SILENT_SECONDS // 6)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        # The kernel sends no keep-alive probes while sent data is not acknowledged.
        milliseconds = _SILENT_SECONDS * 1000
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        why = f"no proof of the token in {_PROOF_SECONDS:g} s"
        self._expiry = asyncio.get_running_loop().call_later(_PROOF_SECONDS, self.close, why)
        assert self._handshake is not None
        next(self._handshake)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while self._handshake is not None:
            if len(self._buffer) < _BLOCK_BYTES:
                return
            block = bytes(self._buffer[:_BLOCK_BYTES])
            del self._buffer[:_BLOCK_BYTES]
            try:
                self._handshake.send(block)
            except StopIteration as answer:
                if not answer.value:
                    self._buffer.clear()
                    self.close("the other end does not know the token")
                    return
                self._handshake = None
                if self._expiry is not None:
                    self._expiry.cancel()
                self._opened(self)
        try:
            start, end = _LENGTH_BYTES, len(self._buffer)
            while start <= end:
                length = int.from_bytes(self._buffer[start - _LENGTH_BYTES : start], "big")
                if start + length > end:
                    break
                message = self._buffer[start : start + length]
                start += length + _LENGTH_BYTES
                self.received(pickle.loads(message))
            del self._buffer[: start - _LENGTH_BYTES]
        except Exception as error:  # the following bytes cannot be trusted to be messages
            self._buffer.clear()
            self.close(f"a message cannot be read: {error!r}")

    def connection_lost(self, error: Exception | None) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        if not self.closed.done():
            self.closed.set_result(self._why or str(error or ""))

    def _shake_hands(self) -> Generator[None, bytes, bool]:
        """Exchange challenges, then proofs, first the client's; return whether the other end's
        proof is right."""
        mine = secrets.token_bytes(_BLOCK_BYTES)
        self._write(mine)
        theirs = yield
        challenges = mine + theirs if self._listens else theirs + mine
        of_client = hmac.digest(self._token, b"client" + challenges, "sha256")
        of_worker = hmac.digest(self._token, b"worker" + challenges, "sha256")
        if not self._listens:
            self._write(of_client)
            return hmac.compare_digest((yield), of_worker)
        if not hmac.compare_digest((yield), of_client):
            return False
        self._write(of_worker)
        return True

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)


async def listen(
    host: str, opened: Callable[[Channel], object], ports: str | None = None
) -> Address:
    """Listen until the event loop ends, on a free port (in the range `ports` if given); `opened` is
    called with each new channel whose other end has proven that it knows the token."""
    token, loop = secrets.token_bytes(_BLOCK_BYTES), asyncio.get_running_loop()
    unproven: dict[Channel, None] = {}

    def prove(channel: Channel) -> None:
        unproven.pop(channel, None)
        opened(channel)

    def accept() -> Channel:
        channel = Channel(token, prove, listens=True)
        channel.closed.add_done_callback(lambda _: unproven.pop(channel, None))
        unproven[channel] = None
        if len(unproven) > _MAX_UNPROVEN:
            oldest = next(iter(unproven))
            del unproven[oldest]
            oldest.close()
        return channel

    listening = bind(host, 0, ports)
    await loop.create_server(accept, sock=listening)
    return Address(host, listening.getsockname()[1], token)


async def connect(address: Address) -> Channel:
    """Open a channel; raise OSError if the listener cannot be reached or does not know the
    token."""
    loop = asyncio.get_running_loop()
    opened: asyncio.Future[None] = loop.create_future()
    _, channel = await loop.create_connection(
        lambda: Channel(address.token, lambda _: opened.set_result(None), listens=False),
        address.host,
        address.port,
    )
    ends: list[asyncio.Future[None] | asyncio.Future[str]] = [opened, channel.closed]
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    except BaseException:
        channel.close()
        raise
    if not opened.done():
        raise ConnectionError(channel.closed.result() or "it closed the connection")
    return channel
