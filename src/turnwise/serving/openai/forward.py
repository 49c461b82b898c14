"""Forwarding of requests to the process that serves their session (`session_processes`)."""

import asyncio
from collections.abc import Iterable, Set
from typing import TYPE_CHECKING
from urllib.parse import quote_from_bytes

import aiohttp
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from yarl import URL

from turnwise.errors import TurnwiseError, describe_error
from turnwise.serving.openai.middleware import read_body, refuse

if TYPE_CHECKING:
    from turnwise.serving.openai.session_processes import SessionProcesses

_CONNECT_SECONDS = 10.0
_OF_CONNECTION = {"connection", "keep-alive", "transfer-encoding"}
_OF_REQUEST = {*_OF_CONNECTION, "content-length", "host", "origin"}
_OF_ANSWER = {*_OF_CONNECTION, "date", "server"}
"""Headers that concern one connection, so that they are not forwarded."""
_IN_URL = "%/?:@!$&'()*+,;=~[]"
"""Characters that a request's target keeps, beside letters and digits."""


class _NoAnswerError(TurnwiseError):
    """A request was not answered."""


class ForwardSessions:
    """ASGI middleware that forwards requests to the process that has their session.

    Args:
        processes: None forwards nothing.
    """

    def __init__(self, app: ASGIApp, processes: "SessionProcesses | None") -> None:
        self._app = app
        self._processes = processes
        self._client: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._processes is None or scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path: str = scope["path"]
        name = ""
        if path.startswith("/sessions/"):
            name = path.removeprefix("/sessions/").partition("/")[0]
        elif path.startswith("/v1/"):
            name = dict(scope["headers"]).get(b"x-session-id", b"").decode("latin-1")
        if (place := self._processes.place_of(name)) is None:
            await self._app(scope, receive, send)
        elif (body := await read_body(receive)) is not None:
            base_url, lost = place
            address = base_url.removesuffix("/v1")
            try:
                await self._forward(address, lost, body, scope, receive, send)
            except _NoAnswerError as error:
                await refuse(send, 502, f"the process of session {name} does not answer: {error}")

    async def _forward(
        self,
        address: str,
        lost: "asyncio.Future[str]",
        body: bytes,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Send a request to an address, and its answer back, until the client disconnects.

        Args:
            lost: Set when no answer will come.

        Raises:
            _NoAnswerError: when the answer did not begin.
            ClientError: when it broke off.
        """
        if self._client is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
            connector = aiohttp.TCPConnector(limit=0)
            self._client = aiohttp.ClientSession(
                timeout=timeout, connector=connector, auto_decompress=False
            )
        target = quote_from_bytes(scope["raw_path"], _IN_URL)
        if scope["query_string"]:
            target += "?" + quote_from_bytes(scope["query_string"], _IN_URL)
        url = URL(address + target, encoded=True)
        started = False

        async def relay(client: aiohttp.ClientSession) -> None:
            nonlocal started
            async with client.request(
                scope["method"],
                url,
                data=body,
                headers=_own(scope["headers"], _OF_REQUEST),
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
                allow_redirects=False,
            ) as answer:
                headers = [
                    (key.encode(), value.encode())
                    for key, value in _own(answer.raw_headers, _OF_ANSWER)
                ]
                start = {"type": "http.response.start", "status": answer.status}
                started = True
                await send({**start, "headers": headers})
                async for piece in answer.content.iter_any():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

        relayed: asyncio.Future[None] = asyncio.ensure_future(relay(self._client))
        left = asyncio.ensure_future(receive())
        try:
            ends: list[asyncio.Future[None] | asyncio.Future[Message] | asyncio.Future[str]]
            ends = [relayed, left, lost]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if relayed.done():
                relayed.result()
            elif lost.done():
                raise aiohttp.ClientConnectionError(lost.result())
        except aiohttp.ClientError as error:
            if started:
                raise
            raise _NoAnswerError(describe_error(error)) from error
        finally:
            relayed.cancel()
            left.cancel()

    async def close(self) -> None:
        """Close the connections to the processes."""
        if self._client is not None:
            await self._client.close()


def _own(headers: Iterable[tuple[bytes, bytes]], left_out: Set[str]) -> list[tuple[str, str]]:
    """Return the headers of an HTTP message that are not among `left_out`."""
    pairs = ((_text(key), _text(value)) for key, value in headers)
    return [pair for pair in pairs if pair[0].lower() not in left_out]


def _text(header: bytes) -> str:
    """Decode a header as aiohttp encodes it."""
    try:
        return header.decode()
    except UnicodeDecodeError:
        return header.decode("latin-1")
