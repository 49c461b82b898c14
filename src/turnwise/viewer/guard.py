"""Access to the viewer: a random token, one host, reading only, and headers that trust no text."""

import hmac
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_HOSTS = {"127.0.0.1", "localhost"}


class Guard:
    """ASGI middleware that answers only who has the token.

    The token comes once in the query; it is then kept in a cookie, and the address no longer
    contains it. A host name other than this machine's is refused, so that no other site's name can
    be pointed here.

    Example:
        app = Guard(app, token=secrets.token_urlsafe(24), port=8080)
    """

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self._app, self._token = app, token
        self._cookie = f"turnwise-view-{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await self._answer(scope)(scope, receive, send_guarded)

    def _answer(self, scope: Scope) -> ASGIApp:
        headers = Headers(scope=scope)
        if headers.get("host", "").rpartition(":")[0] not in _HOSTS:
            return PlainTextResponse("unknown host", 403)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("read only", 405)
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = dict(query).get("token")
        if given is not None and self._matches(given):
            rest = urlencode([(key, value) for key, value in query if key != "token"])
            target = "/" + scope["path"].lstrip("/\\") + (f"?{rest}" if rest else "")
            response = RedirectResponse(target, 303)
            response.set_cookie(self._cookie, self._token, httponly=True, samesite="lax")
            return response
        if given is None and self._matches(self._of_cookie(headers.get("cookie", ""))):
            return self._app
        return PlainTextResponse(
            "open the address that `turnwise view` printed: it contains the token", 403
        )

    def _of_cookie(self, header: str) -> str:
        try:
            kept = SimpleCookie(header).get(self._cookie)
        except CookieError:
            return ""
        return kept.value if kept else ""

    def _matches(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())
