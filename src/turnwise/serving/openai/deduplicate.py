"""Retries of clients: a request that repeats one in flight gets the same answer."""

import asyncio
import hashlib
from collections import Counter
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from turnwise.serving.openai.middleware import read_body, split_path


@dataclass(slots=True, eq=False)
class _Running:
    """A request in flight, shared by all clients that wait for its answer."""

    task: "asyncio.Task[None] | None" = None
    sent: list[Message] = field(default_factory=list)
    """The answer so far."""
    listeners: "set[asyncio.Event]" = field(default_factory=set)
    """An event for each waiting client, set when the answer grows or ends."""
    abandoned: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the last client has disconnected."""
    alone: bool = True
    """True if no equal request is in flight, so that a retry is unambiguous."""

    def add(self, message: Message) -> None:
        self.sent.append(message)
        self.wake()

    def wake(self) -> None:
        for listener in self.listeners:
            listener.set()


class RetryDeduplicator:
    """Lets a client's retry share the answer of the request that it repeats.

    A retry has the session, path and body of exactly one request in flight, and is marked as a
    retry: by `x-stainless-retry-count` (OpenAI's and Anthropic's clients) or by an
    `Idempotency-Key` seen before. Without such a key it must name its session, or the completion
    before it. A request is aborted when the last client waiting for it disconnects.

    Args:
        counts: Counts retries that joined a request, as `joined`.
    """

    def __init__(self, app: ASGIApp, counts: Counter[str]) -> None:
        self._app = app
        self._counts = counts
        self._running: dict[bytes, _Running] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope.get("headers", ()))
        idempotent = headers.get(b"idempotency-key")
        retried = headers.get(b"x-stainless-retry-count", b"0") != b"0" or idempotent is not None
        numbered = b"x-stainless-retry-count" in headers
        conversation = _conversation(scope.get("path", ""), headers)
        # Equal requests that name neither may be two clients', each for a sample of its own.
        named = idempotent is not None or (numbered and conversation is not None)
        if scope["type"] != "http" or scope["method"] != "POST" or not named:
            await self._app(scope, receive, send)
            return
        body = await read_body(receive)
        if body is None:
            return
        parts = [scope["path"].encode(), conversation or b"", idempotent or b"", body]
        key = hashlib.sha256(b"\0".join(parts)).digest()
        del parts
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
        received = False

        async def receive() -> Message:
            nonlocal received
            if not received:
                received = True
                return {"type": "http.request", "body": body, "more_body": False}
            await running.abandoned.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            running.add(message)

        await self._app(scope, receive, send)

    def _forget(self, key: bytes, running: _Running) -> None:
        running.wake()
        if self._running.get(key) is running:
            del self._running[key]


def _conversation(path: str, headers: dict[bytes, bytes]) -> bytes | None:
    """Return what, together with the path, identifies a request's conversation; None if nothing
    does."""
    own = headers.get(b"x-session-id", b"")
    if own or split_path(path)[0]:
        return own
    return headers.get(b"x-request-id") or None


async def _relay(running: _Running, receive: Receive, send: Send) -> None:
    """Send the answer so far, then the rest as it arrives, until the client disconnects."""
    changed = asyncio.Event()
    running.listeners.add(changed)
    left = asyncio.ensure_future(receive())
    left.add_done_callback(lambda _: changed.set())
    done = 0
    try:
        while not left.done():
            while done < len(running.sent):
                message = running.sent[done]
                await send(message)
                done += 1
                if message["type"] == "http.response.body" and not message.get("more_body"):
                    return
            assert running.task is not None
            if running.task.done():
                running.task.result()
                return
            await changed.wait()
            changed.clear()
    finally:
        left.cancel()
        running.listeners.discard(changed)
        if not running.listeners:
            running.abandoned.set()
