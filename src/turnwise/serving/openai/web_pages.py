"""Protection from web pages: the server's names, requests of other sites, and CORS.

A page in a browser can send requests to every server that the browser reaches. It may read answers
only of its own site, so an attacker lets the name of that site stand for the server's address (DNS
rebinding); such a request has the site's name as its `Host`. Requests of other sites cannot be read
but take effect, unless they have JSON as their content: a browser asks before it sends that.
"""

import socket
from collections.abc import Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from turnwise.config.serving import ServingConfig
from turnwise.serving.openai.address import EVERYWHERE, reachable
from turnwise.serving.openai.middleware import refuse

ANY = "*"
"""Entry of `serving.allowed_hosts` or `serving.cors_origins` that stands for all."""


def guarded(app: ASGIApp, serving: ServingConfig) -> ASGIApp:
    """Return an application behind `PageGuard`, and with CORS for `serving.cors_origins`."""
    if serving.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=serving.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            allow_private_network=True,
        )
    return PageGuard(app, serving)


class PageGuard:
    """Refuses requests whose `Host` is no name of the server (421), and POST requests without JSON
    (415) or of pages of other sites (403).

    Names of the server are its address, that of the connection, loopback names, the machine's own
    name if it listens on all addresses, and `serving.allowed_hosts`. A request without a `Host`,
    which no browser sends, may have any.
    """

    def __init__(self, app: ASGIApp, serving: ServingConfig) -> None:
        names = ["localhost", serving.host, reachable(serving.host), *serving.allowed_hosts]
        if serving.host in EVERYWHERE:
            names.append(socket.gethostname())
        self._app = app
        self._names = {canonical(name) for name in names}
        self._origins: Sequence[str] = serving.cors_origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            for host in headers.getlist("host"):
                if not self._is_ours(host, scope):
                    await refuse(
                        send,
                        421,
                        f"{host} is not an address of this server: use the one that it printed, "
                        "or add the name to serving.allowed_hosts",
                    )
                    return
            if scope["method"] == "POST" and (wrong := self._wrong_post(headers)) is not None:
                await refuse(send, *wrong)
                return
        await self._app(scope, receive, send)

    def _is_ours(self, host: str, scope: Scope) -> bool:
        name, bound = canonical(host), canonical((scope.get("server") or ("",))[0])
        if name in self._names or ANY in self._names or name.endswith(".localhost"):
            return True
        if not _is_ip(name):
            # In-process clients have their URL's name as the bound address. A name without a dot
            # is theirs; one with a dot can be an attacker's.
            return name == bound and "." not in name
        return name == bound or ip_address(name).is_loopback

    def _wrong_post(self, headers: Headers) -> tuple[int, str] | None:
        """Return the status and the message for a request that pages of other sites can send
        without asking; None for others."""
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind.startswith("application/") and kind.endswith("json"):
            return None
        if kind:
            return 415, f"the content is {kind}: send JSON, as application/json"
        origin = headers.get("origin")
        allowed = {ANY, origin}.intersection(self._origins)
        if origin is None or allowed or urlsplit(origin).netloc == headers.get("host"):
            return None
        return 403, f"pages of {origin} may not do this: send JSON, or see serving.cors_origins"


def canonical(host: str) -> str:
    """Return a host of a header or of the configuration without its port, in one form."""
    host = host.strip().lower()
    if host.startswith("["):
        host = host[1:].partition("]")[0]
    elif host.count(":") == 1:
        host = host.partition(":")[0]
    if not _is_ip(host):
        return host.rstrip(".")
    address = ip_address(host)
    return str(getattr(address, "ipv4_mapped", None) or address)


def _is_ip(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
