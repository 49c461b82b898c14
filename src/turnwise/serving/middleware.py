"""What stands around vLLM's application, plain ASGI, from the outside in.

`BodyLimit` bounds what is read, `ApiKey` asks for the key, `RetryJoin` lets a retry share the
answer of the request that it repeats, `SessionMiddleware` finds the session of a request.
"""

import asyncio
import hashlib
import hmac
import json
from collections import Counter
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from fastapi import Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from turnwise.serving.sessions import NAME_RULE, SessionStore, valid_name
from turnwise.serving.vllm_server import CALL, Call

GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
"""Paths of the requests that sample, which belong to sessions."""
_TOKENIZE_BYTES = 2 << 20
"""Largest body of /tokenize and /detokenize, whose text no context bounds: tokenizers take 150
bytes for each byte of text."""
_BODIES = 8
"""Bodies of the largest size that are held at once."""


def split_path(path: str) -> tuple[str | None, str]:
    """A session's name, where the path has one, and the path without it.

    Anthropic's clients add /v1 to a base URL that ends with it already.
    """
    name = None
    if path.startswith("/sessions/") and "/v1/" in path:
        name, _, rest = path.removeprefix("/sessions/").partition("/v1/")
        path = "/v1/" + rest
    return name, path.removeprefix("/v1") if path.startswith("/v1/v1/") else path


class BodyLimit:
    """Refuses bodies that are too large (413) or too many (503), before they are read.

    Args:
        most: Bytes of one body.
    """

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most
        self._held = 0
        """Bytes of all bodies of requests in flight."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        most = self._most
        if split_path(scope["path"])[1] in ("/tokenize", "/detokenize"):
            most = min(most, _TOKENIZE_BYTES)
        read, started = 0, False

        def check(size: int) -> None:
            if size > most:
                raise HTTPException(
                    413, f"the body is larger than {most:,} bytes (serving.max_body_mb)"
                )
            if size + self._held > _BODIES * self._most:
                raise HTTPException(503, "too many large requests are in flight; try again")

        async def limited() -> Message:
            nonlocal read
            message = await receive()
            size = len(message.get("body", b""))
            check(read + size)
            read += size
            self._held += size
            return message

        async def noting(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            announced = dict(scope["headers"]).get(b"content-length", b"")
            check(int(announced) if announced.isdigit() else 0)
            await self._app(scope, limited, noting)
        except HTTPException as error:
            if started:
                raise
            await refuse(send, error.status_code, error.detail)
        finally:
            self._held -= read


class ApiKey:
    """Asks for the key on every route but /health.

    The session of a rollout needs none: its path, which is random and known to its agent alone,
    is a key to that session.
    """

    def __init__(self, app: ASGIApp, key: str | None, store: SessionStore) -> None:
        self._app = app
        self._digest = _digest(f"Bearer {key}".encode()) if key else None
        self._store = store

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._open(scope):
            await refuse(send, 401, "this server wants its key as a bearer token")
            return
        await self._app(scope, receive, send)

    def _open(self, scope: Scope) -> bool:
        path: str = scope["path"]
        if self._digest is None or path == "/health" or self._of_rollout(path):
            return True
        headers = dict(scope["headers"])
        sent = headers.get(b"authorization", b"")
        if "/v1/messages" in path and (own := headers.get(b"x-api-key")):
            sent = b"Bearer " + own  # Anthropic's clients send it so
        return hmac.compare_digest(_digest(sent), self._digest)

    def _of_rollout(self, path: str) -> bool:
        name, _, rest = path.removeprefix("/sessions/").partition("/")
        if not path.startswith("/sessions/") or (session := self._store.get(name)) is None:
            return False
        managing = rest in ("", "reward")
        return session.private and (session.agent_rewards if managing else rest[:3] == "v1/")


class SessionMiddleware:
    """Finds the session of each request and sets `CALL` around it."""

    def __init__(self, app: ASGIApp, store: SessionStore, counts: Counter[str]) -> None:
        self._app = app
        self._store = store
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        name, path = split_path(scope["path"])
        if name is None and b"x-session-id" in headers:
            name = headers[b"x-session-id"].decode("latin-1")
        scope = {**scope, "path": path, "raw_path": path.encode()}
        if path not in GENERATING or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        if name is not None and not valid_name(name):
            await refuse(send, 400, NAME_RULE)
            return
        if name is not None and (why := self._store.gone(name)) is not None:
            await refuse(send, 410, f"the session {name} {why}")
            return
        previous = headers.pop(b"x-request-id", b"").decode("latin-1")
        headers.pop(b"x-session-id", None)

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._counts[str(message["status"])] += 1
            await send(message)

        with self._store.request(name, previous) as session:
            if session.id:
                headers[b"x-session-id"] = session.id.encode()
            scope["headers"] = list(headers.items())
            token = CALL.set(Call(session))
            try:
                await self._app(scope, receive, counted)
            finally:
                CALL.reset(token)


@dataclass(slots=True, eq=False)
class _Running:
    """A request in flight, and all who wait for its answer."""

    task: "asyncio.Task[None] | None" = None
    said: list[Message] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    listeners: int = 0
    abandoned: asyncio.Event = field(default_factory=asyncio.Event)
    alone: bool = True
    """No other request like it runs: a retry can only mean this one."""

    def tell(self, message: Message) -> None:
        self.said.append(message)
        news, self.news = self.news, asyncio.Event()
        news.set()


class RetryJoin:
    """Lets a client's retry share the answer of the request that it repeats.

    A retry is a request with the session, path and body of the one such request that is still
    running, which says that it is one: by `x-stainless-retry-count` (OpenAI's and Anthropic's
    clients) or by an `Idempotency-Key` seen before. A request is aborted when the last who waits
    for it has gone.
    """

    def __init__(self, app: ASGIApp, counts: Counter[str]) -> None:
        self._app = app
        self._counts = counts
        self._running: dict[bytes, _Running] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope.get("headers", ()))
        idempotent = headers.get(b"idempotency-key")
        retried = headers.get(b"x-stainless-retry-count", b"0") != b"0" or idempotent is not None
        named = b"x-stainless-retry-count" in headers or idempotent is not None
        if scope["type"] != "http" or scope["method"] != "POST" or not named:
            await self._app(scope, receive, send)
            return
        body = await _body(receive)
        if body is None:
            return
        key = _digest(
            b"\0".join(
                [
                    scope["path"].encode(),
                    _conversation(scope["path"], headers),
                    idempotent or b"",
                    body,
                ]
            )
        )
        known = self._running.get(key)
        if known is not None and known.abandoned.is_set():
            known = None
        running = known if retried and known is not None and known.alone else None
        if running is None:
            running = _Running(alone=known is None)
            if known is not None:
                known.alone = False
            running.task = asyncio.create_task(self._run(running, scope, body))
            self._running[key] = running
            running.task.add_done_callback(lambda _: self._forget(key, running))
        else:
            self._counts["joined"] += 1
        del body
        await _relay(running, receive, send)

    async def _run(self, running: _Running, scope: Scope, body: bytes) -> None:
        asked = False

        async def receive() -> Message:
            nonlocal asked
            if not asked:
                asked = True
                return {"type": "http.request", "body": body, "more_body": False}
            await running.abandoned.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            running.tell(message)

        await self._app(scope, receive, send)

    def _forget(self, key: bytes, running: _Running) -> None:
        running.news.set()
        if self._running.get(key) is running:
            del self._running[key]


def _conversation(path: str, headers: dict[bytes, bytes]) -> bytes:
    """Which conversation a request says it is of, beside its path."""
    named = headers.get(b"x-session-id") or split_path(path)[0]
    return headers.get(b"x-session-id", b"") if named else headers.get(b"x-request-id", b"")


async def _body(receive: Receive) -> bytes | None:
    """A request's whole body; None if the client went away."""
    pieces: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        pieces.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(pieces)


async def _relay(running: _Running, receive: Receive, send: Send) -> None:
    """Send all that was said and will be said; stop when this listener goes away."""
    running.listeners += 1
    gone = asyncio.ensure_future(receive())
    told = 0
    try:
        while not gone.done():
            while told < len(running.said):
                message = running.said[told]
                await send(message)
                told += 1
                if message["type"] == "http.response.body" and not message.get("more_body"):
                    return
            assert running.task is not None
            if running.task.done():
                running.task.result()
                return
            news = asyncio.create_task(running.news.wait())
            await asyncio.wait({gone, news}, return_when=asyncio.FIRST_COMPLETED)
            news.cancel()
    finally:
        gone.cancel()
        running.listeners -= 1
        if not running.listeners:
            running.abandoned.set()


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()


async def http_error(_: Any, error: Any) -> Response:
    """What the framework itself refuses, such as a path that is not there."""
    return Response(
        _error_body(error.status_code, str(error.detail)),
        error.status_code,
        error.headers,
        "application/json",
    )


def _error_body(status: int, message: str) -> bytes:
    kind = HTTPStatus(status).phrase
    error = {"message": message, "type": kind, "param": None, "code": status}
    return json.dumps({"error": error}).encode()


async def refuse(send: Send, status: int, message: str) -> None:
    """Answer with an error in OpenAI's shape."""
    body = _error_body(status, message)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
