"""Protection of the server: slow clients, large bodies, clients without the key, and web pages.

An `HttpConnection` limits times, headers and the number of connections, so that clients that send
half a request, or nothing, cannot block other clients. The `Gate` is the outermost layer of the
application, except for CORS.

A page in a browser may read answers of its own site only. So an attacker lets the name of the
page's site resolve to the server's address (DNS rebinding); the page's requests then have this name
as their `Host`. Requests from pages of other sites take effect although the page cannot read the
answers. The exception is JSON: a browser asks the server before it sends JSON to another site.
"""

import asyncio
import hashlib
import hmac
import resource
import select
import socket
from collections.abc import Callable
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import ClassVar
from urllib.parse import parse_qsl, urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from turnwise.chat.session_store import SessionStore
from turnwise.config.serving import ServingConfig
from turnwise.core.untrusted import JsonCount
from turnwise.serving.openai import bodies
from turnwise.serving.openai.address import EVERYWHERE, reachable
from turnwise.serving.openai.errors import refusal

ANY = "*"  # entry of `serving.allowed_hosts` or `serving.cors_origins` that allows all
TICKET = "ticket"  # parameter of a URL with the `ticket` of its session
_HEAD_SECONDS = 30.0
_BODY_SECONDS = 120.0  # time for a whole body: any network transfers serving.max_body_mb faster
_READ_SECONDS = 60.0  # time for a client to read the next part of its answer
_HEAD_BYTES = 65_536
_MAX_CONNECTIONS = 4_096
_FILES = 1 << 20
"""Maximum soft limit of open files that a server sets; it is Linux' own default maximum."""
_TOKENIZE_BYTES = 2 << 20
"""Maximum size in bytes of the body of /tokenize and /detokenize. The context length does not bound
their text, and tokenizers take 150 bytes of memory for each byte of it."""
_BODIES = 8  # number of bodies of maximum size that may be in memory at once
_MEMORY = 4  # bytes of memory for a body's values that count as one byte of a body


def max_connections() -> int:
    """Raise the soft limit of open files towards the hard one; return the maximum number of
    connections, which is at most half of the limit, because requests open further files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Programs that agents start inherit the limit, and some of them close every file descriptor up
    # to it.
    wanted = min(hard, _FILES) if hard != resource.RLIM_INFINITY else _FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # a limit that cannot be raised holds
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        _MAX_CONNECTIONS
        if soft == resource.RLIM_INFINITY
        else max(16, min(_MAX_CONNECTIONS, soft // 2))
    )


class HttpConnection(HttpToolsProtocol):
    """One client's connection, with deadlines for the headers and the body of a request and for the
    client to read the answer. If a server has more than `max_open` connections, each new one closes
    the connection that has waited the longest for its client."""

    max_open: ClassVar[int] = _MAX_CONNECTIONS
    _deadline: asyncio.TimerHandle | None = None
    _waiting_since: float | None = None
    """Time at which the wait for the client began; None while a request is answered."""
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait(_HEAD_SECONDS)
        if len(self.connections) <= self.max_open:
            return
        waiting = [
            (other._waiting_since, id(other), other)
            for other in self.connections
            if isinstance(other, HttpConnection) and other._waiting_since is not None
        ]
        _, _, longest = min(waiting)
        longest._end_wait()
        self.connections.discard(longest)
        longest._refuse(b"503 Service Unavailable")

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
        if self.cycle.response_complete:  # the later body has ended uvicorn's own wait
            self._wait(_HEAD_SECONDS)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._deadline is None and not self.pipeline:
            self._waiting_since = self.loop.time()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._set_clock(_READ_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._set_clock()

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.is_closing():  # a connection that was reset has no file any more
            return
        asked = select.poll()
        asked.register(self.transport.get_extra_info("socket").fileno(), select.POLLIN)
        if not asked.poll(0):  # else the next request came just now: it is read next
            self.transport.abort()  # close() would wait for a client that does not read

    def _wait(self, seconds: float) -> None:
        def expire() -> None:
            if self.flow.read_paused:  # the client waits for the server
                self._wait(seconds)
            else:
                self._refuse(b"408 Request Timeout")

        self._set_clock(seconds, expire)
        self._waiting_since = self.loop.time()

    def _end_wait(self) -> None:
        self._set_clock()
        self._waiting_since = None

    def _set_clock(self, seconds: float = 0.0, then: Callable[[], None] | None = None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if then is None else self.loop.call_later(seconds, then)

    def _refuse(self, status: bytes) -> None:
        """Close the connection; send the status first if no answer has begun."""
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(
                b"HTTP/1.1 " + status + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
            )
        self._end_wait()
        self.transport.close()


class Access:
    """Finds the server's key in requests, and decides which requests need no key."""

    def is_open(self, path: str) -> bool:
        """Return whether requests to a path need no key."""
        return path in ("/health", "/ping")

    def authorization(self, path: str, headers: Headers) -> str:
        """Return the key of a request in the form of an `Authorization` header, "Bearer KEY"."""
        if "/v1/messages" in path and (own := headers.get("x-api-key")):
            return f"Bearer {own}"  # the header of Anthropic's clients
        return headers.get("authorization", "")


def guarded(
    app: ASGIApp,
    serving: ServingConfig,
    key: str | None,
    store: SessionStore,
    access: Access | None = None,
) -> ASGIApp:
    """Return an application behind a `Gate`, and with CORS for `serving.cors_origins`."""
    app = Gate(app, serving, key, store, access or Access())
    if not serving.cors_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=serving.cors_origins,
        allow_methods=["*"],
        allow_headers=["*"],
        allow_private_network=True,
    )


class Gate:
    """Refuses requests that are not meant for the server, are not allowed, or are too large.

    - 421: the `Host` is not a name of the server. Its names are its address, the address of the
      connection, loopback names, the machine's own name if it listens on all addresses, and
      `serving.allowed_hosts`. A request without a `Host`, which no browser sends, passes.
    - 415: a POST request with content that is neither JSON nor protobuf.
    - 403: a POST request without a content type from a page of another site.
    - 401: the API key is missing or wrong. Every route except /health and /ping needs it (see
      `Access`). Sessions of rollouts need no key, because their paths are random secrets that only
      their agents know.
    - 413: the body is too large, in bytes or in the number of its values (`bodies`).
    - 503: all bodies in flight are too large together, in bytes or in memory for their values.

    HEAD is answered as GET, without the body. If `key` is None, no request needs a key.
    """

    def __init__(
        self,
        app: ASGIApp,
        serving: ServingConfig,
        key: str | None,
        store: SessionStore,
        access: Access,
    ) -> None:
        self._access = access
        names = ["localhost", serving.host, reachable(serving.host), *serving.allowed_hosts]
        if serving.host in EVERYWHERE:
            names.append(socket.gethostname())
        self._app = app
        self._names = {canonical(name) for name in names}
        self._origins = serving.cors_origins
        self._max_bytes = serving.max_body_mb << 20
        self._megabytes = serving.max_body_mb
        self._held = 0
        """Size in bytes of all bodies of requests in flight; many small values count as more than
        their size."""
        self._key = key
        self._store = store

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        head = scope["method"] == "HEAD"  # not all routes of the framework answer HEAD
        limited_path = scope["path"] in ("/tokenize", "/detokenize")
        limit = min(self._max_bytes, _TOKENIZE_BYTES) if limited_path else self._max_bytes
        read, held, started = 0, 0, False
        count = JsonCount()

        def check(size: int, cost: int) -> None:
            if size > limit:
                raise HTTPException(
                    413, f"the body is larger than {limit:,} bytes (serving.max_body_mb)"
                )
            if cost + self._held - held > _BODIES * self._max_bytes:
                raise HTTPException(503, "too many large requests are in flight; try again")

        async def limited() -> Message:
            nonlocal read, held
            message = await receive()
            part = message.get("body", b"")
            read += len(part)
            check(read, read)
            if counted:
                count.add(part)
                bodies.check(count, self._megabytes)
            cost = max(read, count.memory // _MEMORY)
            check(read, cost)
            self._held += cost - held
            held = cost
            return message

        async def noting(message: Message) -> None:
            nonlocal started
            started = True
            if head and message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        try:
            headers = Headers(scope=scope)
            counted = not bodies.is_protobuf(scope, headers)
            self._check_page(scope, headers)
            announced = headers.get("content-length", "")
            size = int(announced) if announced.isdecimal() else 0
            check(size, size)
            if not self._open(scope, headers):
                raise HTTPException(401, "this server needs its API key as a bearer token")
            await self._app({**scope, "method": "GET"} if head else scope, limited, noting)
        except HTTPException as error:
            if started:
                raise
            await refusal(error.status_code, error.detail)(scope, receive, noting)
        finally:
            self._held -= held

    def _check_page(self, scope: Scope, headers: Headers) -> None:
        """Refuse requests to other host names, and POST requests that browsers send from pages of
        other sites without asking the server first."""
        bound = canonical((scope.get("server") or ("",))[0])
        for host in headers.getlist("host"):
            name = canonical(host)
            if (address := _ip_of(name)) is not None:
                ours = name == bound or address.is_loopback
            else:
                # In-process clients have their URL's name as the bound address. A name without a
                # dot belongs to such a client; a name with a dot can be an attacker's.
                ours = name.endswith(".localhost") or (name == bound and "." not in name)
            if not ours and name not in self._names and ANY not in self._names:
                raise HTTPException(
                    421,
                    f"{host} is not an address of this server: use the one that it printed, "
                    "or add the name to serving.allowed_hosts",
                )
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        # A browser asks the server before it sends these types to another site.
        is_asked = kind.startswith("application/") and kind.endswith(("json", "x-protobuf"))
        if scope["method"] != "POST" or is_asked:
            return
        no_body = kind == "application/octet-stream" and headers.get("content-length") == "0"
        if kind and not no_body:  # some clients, such as aiohttp, set a type without a body
            raise HTTPException(415, f"the content is {kind}: send JSON, as application/json")
        origin = headers.get("origin")
        allowed = {ANY, origin}.intersection(self._origins)
        if origin is None or allowed or urlsplit(origin).netloc == headers.get("host"):
            return
        raise HTTPException(
            403,
            f"pages of {origin} may not send this request: send JSON, or name the origin in "
            "serving.cors_origins",
        )

    def _open(self, scope: Scope, headers: Headers) -> bool:
        """Return whether a request has the key, or needs no key."""
        path: str = scope["path"]
        if self._key is None or self._access.is_open(path):
            return True
        if _equal(self._access.authorization(path, headers), f"Bearer {self._key}"):
            return True
        if not path.startswith("/sessions/"):
            return False
        name, _, rest = path.removeprefix("/sessions/").partition("/")
        if (session := self._store.get(name)) is not None and session.private:
            managing = rest in ("", "reward")
            return session.agent_rewards if managing else f"{rest}/".startswith("v1/")
        shown = dict(parse_qsl(scope["query_string"].decode("latin-1"))).get(TICKET, "")
        return _equal(shown, ticket(self._key, name))


def ticket(key: str, session: str) -> str:
    """Return a ticket that replaces the key in requests of one session. It is for the URLs of
    redirects, because HTTP libraries send the key to the first address only."""
    return hmac.new(key.encode(), f"session {session}".encode(), "sha256").hexdigest()


def _equal(sent: str, secret: str) -> bool:
    """Compare part of a request with a secret, in a time that reveals nothing about the secret."""
    known = hashlib.sha256(secret.encode()).digest()
    return hmac.compare_digest(hashlib.sha256(sent.encode("latin-1", "replace")).digest(), known)


def canonical(host: str) -> str:
    """Return a host from a header or the configuration without its port, in canonical form."""
    host = host.strip().lower()
    if host.startswith("["):
        host = host[1:].partition("]")[0]
    elif host.count(":") == 1:
        host = host.partition(":")[0]
    if (address := _ip_of(host)) is None:
        return host.rstrip(".")
    return str(getattr(address, "ipv4_mapped", None) or address)


def _ip_of(name: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(name)
    except ValueError:
        return None
