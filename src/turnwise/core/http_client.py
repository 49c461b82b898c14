"""The client of all HTTP and WebSocket requests to other servers, which are not trusted.

An answer has a maximum size, and must not be compressed. A redirect is never followed, because it
may lead into this network. An address must begin with http, https, ws or wss. The caller sets
deadlines, with `core.deadlines` or as part of a tool or environment. `tests/test_doors.py` names
the few files that send requests without this client, and why they do.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Self
from urllib.parse import urlsplit

import aiohttp

from turnwise.core.spans import trace_headers
from turnwise.core.untrusted import IDENTITY, MAX_BYTES, AnswerError, admit
from turnwise.core.user_code import use_daemon_threads
from turnwise.errors import InputError, first_line

_SCHEMES = ("http", "https", "ws", "wss")


class HttpError(Exception):
    """A connection that broke off; the message says why."""


class Unreachable(HttpError):
    """A server to which no connection could be opened."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """The answer to a request, with any status, including redirects."""

    status: int
    headers: Mapping[str, str]
    """The headers; look-ups ignore the case of names."""
    body: bytes

    @property
    def ok(self) -> bool:
        """Whether the status is 2xx."""
        return self.status // 100 == 2


class HttpClient:
    """A client on the running event loop; close it after use.

    Args:
        connect_seconds: Deadline for opening a connection; None if a deadline of the caller covers
            it.
        cookies: Keep servers' cookies, even of a server whose address is an IP address.
        proxies: Use the proxies and the logins (`~/.netrc`) of the environment.
    """

    def __init__(
        self,
        *,
        connect_seconds: float | None = None,
        cookies: bool = False,
        proxies: bool = False,
    ) -> None:
        use_daemon_threads(asyncio.get_running_loop())  # aiohttp looks up names in threads
        redirects = aiohttp.TraceConfig()
        redirects.on_request_redirect.append(_refuse_redirect)  # `ws_connect` has no option for it
        self._session = aiohttp.ClientSession(
            cookie_jar=aiohttp.CookieJar(unsafe=True) if cookies else aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, connect=connect_seconds),
            trust_env=proxies,
            trace_configs=[redirects],
            auto_decompress=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the client's connections; safe to repeat."""
        await self._session.close()

    async def request(
        self,
        method: str,
        url: str,
        *,
        json: object = None,
        headers: Mapping[str, str] | None = None,
        largest: int = MAX_BYTES,
    ) -> HttpAnswer:
        """Send a request, with `json` as its body if that is not None, and read the answer.

        Raises:
            Unreachable, HttpError: when there is no whole answer.
            AnswerError: when the answer has more than `largest` bytes, or is compressed.
            InputError: when the address or a header is not valid.
        """
        _check(url)
        all_headers = {**IDENTITY, **trace_headers(), **(headers or {})}
        try:
            async with self._session.request(
                method, url, json=json, headers=all_headers, allow_redirects=False
            ) as response:
                encoding = response.headers.get("content-encoding", "identity")
                if encoding != "identity":
                    raise AnswerError(
                        f"sent an answer in {encoding[:20]!r}, which was not asked for"
                    )
                body = bytearray()
                async for part in response.content.iter_any():
                    body += part
                    admit(len(body), largest)
                return HttpAnswer(response.status, response.headers, bytes(body))
        except aiohttp.InvalidURL as error:
            raise InputError(f"{url[:200]} is not a URL") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _failure(error) from error
        except ValueError as error:  # a line break in a header
            why = first_line(error)
            raise InputError(f"no request can be sent to {url[:200]}: {why}") from error

    async def web_socket(self, url: str) -> "WebSocket":
        """Open a WebSocket, whose messages have at most `MAX_BYTES`; raises as `request` does."""
        _check(url)
        try:
            socket = await self._session.ws_connect(
                url, max_msg_size=MAX_BYTES, headers=trace_headers()
            )
        except aiohttp.InvalidURL as error:
            raise InputError(f"{url[:200]} is not a URL") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _failure(error) from error
        return WebSocket(socket)


class WebSocket:
    """An open WebSocket of texts."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket

    async def send(self, text: str) -> None:
        """Send a text. If the socket is closed, drop the text; `receive` then raises the reason."""
        with suppress(aiohttp.ClientError, OSError):
            await self._socket.send_str(text)

    async def receive(self) -> bytes:
        """Return the next text.

        Raises:
            AnswerError: when the text is too long, or cannot be read.
            HttpError: when the socket is closed, or something other than a text came.
        """
        message = await self._socket.receive()
        if message.type is aiohttp.WSMsgType.ERROR:
            raise AnswerError(f"sent what cannot be read: {message.data}")
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise HttpError(f"{message.type.name.lower()} {message.extra or ''}".strip())
        return str(message.data).encode(errors="replace")

    async def close(self) -> None:
        """Close the socket; wait at most a few seconds for the server to agree."""
        await self._socket.close()


def _check(url: str) -> None:
    try:
        known = urlsplit(url).scheme in _SCHEMES
    except ValueError:  # brackets that are not an address
        known = False
    if not known:
        raise InputError(f"{url[:200]} is not an http, https, ws or wss URL")


def _failure(error: aiohttp.ClientError | OSError) -> HttpError:
    kinds = (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError)
    kind = Unreachable if isinstance(error, kinds) else HttpError
    return kind(first_line(error))


async def _refuse_redirect(
    _: aiohttp.ClientSession,
    __: SimpleNamespace,
    redirected: aiohttp.TraceRequestRedirectParams,
) -> None:
    raise aiohttp.ClientError(
        f"it answered {redirected.response.status}, and a redirect is not followed"
    )
