"""Plain ASGI middleware around vLLM's application, from the outside in.

`Gate` checks the key and limits bodies; then come the retries of `deduplicate`, and
`SessionMiddleware` finds the session of each request, whose chats the chat service answers.
`web_pages` is around them.

vLLM's own server knows chats in other envelopes, too: several in one request, and requests to one
path for every API. A batch is taken apart, so that each of its chats takes the path of a chat that
is sent alone, and is a turn of the request's session.
"""

import asyncio
import hashlib
import hmac
import json
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import ExitStack
from http import HTTPStatus
from typing import TYPE_CHECKING, TypeVar

import msgspec
from fastapi import Request, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from turnwise.chat.session_store import SessionStore
from turnwise.core.json_types import JsonObject
from turnwise.core.spans import TRACE_HEADERS, joined
from turnwise.errors import InputError
from turnwise.serving.openai.request_context import RequestContext, serving
from turnwise.serving.openai.request_options import MAX_COMPLETIONS

if TYPE_CHECKING:
    from turnwise.serving.openai.chat_service import ChatService

_Result = TypeVar("_Result")
SESSION_NAME = "turnwise.session"
"""Key of the scope for the name of the request's session, None without one."""
_CHAT = "/v1/chat/completions"
GENERATING = (_CHAT, "/v1/completions", "/v1/responses", "/v1/messages")
"""Paths of the requests that sample, which belong to sessions."""
BATCH = "/v1/chat/completions/batch"
"""Path of a request with several chats; `messages` is a list of conversations."""
INVOCATIONS = "/invocations"
"""Path of SageMaker's requests."""
_APIS = {"messages": _CHAT, "prompt": "/v1/completions", "input": "/v1/responses"}
"""Path of each API, by a key that only its requests have."""
OPENING = "/v1/sessions"
"""Path, below that of a session, that opens another under it."""
_OWN_HEADERS = b"endpoint-load-metrics-format"
"""Header of a request whose answer needs headers of its own."""
_TOKENIZE_BYTES = 2 << 20
"""Maximum body of /tokenize and /detokenize.

No context length bounds their text, and tokenizers take 150 bytes for each byte of it.
"""
_BODIES = 8
"""Number of bodies of maximum size that are in memory at once."""


def split_path(path: str) -> tuple[str | None, str]:
    """Return the session's name in a path, or None, and the path without it.

    Anthropic's clients add /v1 to a base URL that already ends with it.
    """
    name = None
    if path.startswith("/sessions/") and "/v1/" in path:
        name, _, rest = path.removeprefix("/sessions/").partition("/v1/")
        path = "/v1/" + rest
    return name, path.removeprefix("/v1") if path.startswith("/v1/v1/") else path


async def read_body(receive: Receive) -> bytes | None:
    """Return a request's whole body; None if the client disconnected."""
    pieces: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        pieces.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(pieces)


def replaying(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that returns a body that was read already, then what else comes."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return waiting.pop() if waiting else await receive()

    return replay


async def unless_gone(work: Awaitable[_Result], receive: Receive) -> _Result | None:
    """Return the result of `work`; None if the client disconnects first, which cancels the work."""
    working: asyncio.Future[_Result] = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(receive())
    gone.add_done_callback(lambda _: working.cancel())
    try:
        return await working
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if gone.done() and task is not None and not task.cancelling():
            return None
        raise
    finally:
        gone.cancel()


class Gate:
    """Requires the API key, and refuses bodies that are too large (413) or too many (503).

    Every route but /health and /ping needs the key. Sessions of rollouts need none: their paths are
    random secrets, known only to their agents. HEAD is answered as GET, without the body.

    Args:
        most: Maximum size of one body, in bytes.
        key: The key; None lets every request pass.
        store: The server's sessions.
    """

    def __init__(self, app: ASGIApp, most: int, key: str | None, store: SessionStore) -> None:
        self._app = app
        self._most = most
        self._held = 0
        """Size of all bodies of requests in flight, in bytes."""
        self._digest = _digest(f"Bearer {key}".encode()) if key else None
        self._store = store

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        head = scope["method"] == "HEAD"  # which not all routes of the framework know
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
            if head and message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        try:
            announced = dict(scope["headers"]).get(b"content-length", b"")
            check(int(announced) if announced.isdigit() else 0)
            if not self._open(scope):
                raise HTTPException(401, "this server needs its API key as a bearer token")
            await self._app({**scope, "method": "GET"} if head else scope, limited, noting)
        except HTTPException as error:
            if started:
                raise
            await refuse(noting, error.status_code, error.detail)
        finally:
            self._held -= read

    def _open(self, scope: Scope) -> bool:
        path: str = scope["path"]
        if self._digest is None or path in ("/health", "/ping") or self._of_rollout(path):
            return True
        headers = dict(scope["headers"])
        sent = headers.get(b"authorization", b"")
        if "/v1/messages" in path and (own := headers.get(b"x-api-key")):
            sent = b"Bearer " + own  # the header of Anthropic's clients
        return hmac.compare_digest(_digest(sent), self._digest)

    def _of_rollout(self, path: str) -> bool:
        name, _, rest = path.removeprefix("/sessions/").partition("/")
        if not path.startswith("/sessions/") or (session := self._store.get(name)) is None:
            return False
        managing = rest in ("", "reward")
        return session.private and (session.agent_rewards if managing else rest[:3] == "v1/")


class SessionMiddleware:
    """Finds the session of each request, and answers its chats.

    The path or, without one in it, the header X-Session-ID names the session. A path and another
    header name a session under that of the path.

    Args:
        app: vLLM's application.
        chats: Answers the chats that it can plan; all other requests are the application's.
        store: The server's sessions.
        counts: Counts answers, by their status.
    """

    def __init__(
        self, app: ASGIApp, chats: "ChatService", store: SessionStore, counts: Counter[str]
    ) -> None:
        self._app = app
        self._chats = chats
        self._store = store
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        name, path = split_path(scope["path"])
        if path == OPENING and name is not None:  # its route needs the session's name
            await self._app(scope, receive, send)
            return
        if path in (BATCH, INVOCATIONS) and scope["method"] == "POST":
            await self._unwrap(path, scope, receive, send)
            return
        own = headers[b"x-session-id"].decode("latin-1") if b"x-session-id" in headers else None
        if name is None:
            name, own = own, None
        elif own == name:
            own = None
        scope = {**scope, "path": path, "raw_path": path.encode(), SESSION_NAME: name}
        if path not in GENERATING or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        previous = headers.pop(b"x-request-id", b"").decode("latin-1")
        headers.pop(b"x-session-id", None)

        context: RequestContext | None = None
        refused = gone = False

        async def noticed() -> Message:
            nonlocal gone
            message = await receive()
            gone = gone or message["type"] == "http.disconnect"
            return message

        async def counted(message: Message) -> None:
            nonlocal refused
            if message["type"] == "http.response.start":
                self._counts[str(message["status"])] += 1
                refused = message["status"] >= 400
            if context is not None and not (refused or gone):
                context.deliver()
            await send(message)

        with ExitStack() as held:
            try:
                context = held.enter_context(serving(self._store, name, previous, own))
            except InputError as error:  # 409: it has too many sessions under it
                await refuse(send, getattr(error, "status", 409), str(error))
                return
            headers[b"x-session-id"] = context.session.id.encode()
            scope["headers"] = list(headers.items())
            held.enter_context(joined(_trace(headers) or context.session.trace))
            await self._answer(context, scope, noticed, counted)

    async def _answer(
        self, context: RequestContext, scope: Scope, receive: Receive, send: Send
    ) -> None:
        headers = dict(scope["headers"])
        kind: bytes = headers.get(b"content-type", b"")
        readable = kind.startswith(b"application/json") and _OWN_HEADERS not in headers
        if scope["path"] == _CHAT and readable:
            body = await read_body(receive)
            if body is None:
                return
            body, planned = await self._chats.plan_body(body, context)
            if planned is not None:
                answered = await unless_gone(self._chats.respond(planned, context), receive)
                if answered is not None:
                    await send_json(send, *answered)
                return
            receive = replaying(body, receive)
        await self._app(scope, receive, send)

    async def _unwrap(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a batch of chats, or a request to the one path for every API.

        The answer to a batch is that of one chat, with a choice for each conversation, in their
        order. If one conversation cannot be answered, its error is the answer.
        """
        body = await read_body(receive)
        if body is None:
            return
        try:
            tree = msgspec.json.decode(body)
            if not isinstance(tree, dict):
                raise ValueError("the body is no object")
        except (ValueError, RecursionError) as error:
            await refuse(send, 400, f"the body is not valid JSON: {error}")
            return
        if path == INVOCATIONS:
            api = next((api for key, api in _APIS.items() if key in tree), None)
            if api is None:
                await refuse(send, 400, f"the body has none of {', '.join(_APIS)}")
            else:
                await self(_at(scope, api), replaying(body, receive), send)
        elif (wrong := _wrong_batch(tree)) is not None:
            await refuse(send, 400, wrong)
        else:
            answered = await unless_gone(self._ask_all(tree, scope), receive)
            if answered is not None:
                await send_json(send, *answered)

    async def _ask_all(self, tree: JsonObject, scope: Scope) -> tuple[int, bytes]:
        """Ask for each chat of a batch; return the status and the body of the answer."""
        scope = _at(scope, scope["path"].removesuffix("/batch"))
        async with asyncio.TaskGroup() as group:
            asked = [
                group.create_task(self._ask({**tree, "messages": messages}, scope))
                for messages in tree["messages"]
            ]
        answers = [task.result() for task in asked]
        for status, body in answers:
            if status >= 400:
                return status, body
        return 200, msgspec.json.encode(_joined([msgspec.json.decode(b) for _, b in answers]))

    async def _ask(self, tree: JsonObject, scope: Scope) -> tuple[int, bytes]:
        """Ask for one chat, until cancelled."""
        status, pieces = 500, list[bytes]()

        async def never() -> Message:
            await asyncio.Event().wait()
            raise AssertionError

        async def keep(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                pieces.append(message.get("body", b""))

        await self(dict(scope), replaying(msgspec.json.encode(tree), never), keep)
        return status, b"".join(pieces)


def _wrong_batch(tree: JsonObject) -> str | None:
    """Return what is wrong with a batch as a whole; None if nothing is."""
    conversations = tree.get("messages")
    if not isinstance(conversations, list) or not conversations:
        return "messages: a batch needs a list of conversations, each a list of messages"
    if not all(isinstance(messages, list) for messages in conversations):
        return "messages: each conversation of a batch is a list of messages"
    if len(conversations) > MAX_COMPLETIONS:
        return f"messages: a batch has at most {MAX_COMPLETIONS:,} conversations"
    if tree.get("stream"):
        return "stream: a batch is not streamed"
    if tree.get("n") not in (None, 1):
        return "n: a batch has one completion of each conversation"
    return None


def _joined(answers: Sequence[JsonObject]) -> JsonObject:
    choices = [
        {**choice, "index": index}
        for index, answer in enumerate(answers)
        for choice in answer["choices"]
    ]
    usage = dict(answers[0]["usage"])
    for name, value in usage.items():
        if isinstance(value, int):
            usage[name] = sum(answer["usage"][name] for answer in answers)
    return {**answers[0], "choices": choices, "usage": usage}


def _at(scope: Scope, path: str) -> Scope:
    return {**scope, "path": path, "raw_path": path.encode()}


def _trace(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    """Return the headers that name a client's span."""
    sent = {name: headers.get(name.encode(), b"").decode("latin-1") for name in TRACE_HEADERS}
    return {name: value for name, value in sent.items() if value}


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()


async def http_error(_: Request, error: Exception) -> Response:
    """Answer an error of the framework, such as an unknown path, in OpenAI's format."""
    assert isinstance(error, HTTPException)
    return Response(
        error_body(error.status_code, str(error.detail)),
        error.status_code,
        dict(error.headers or {}),
        "application/json",
    )


def error_body(status: int, message: str, param: str | None = None) -> bytes:
    """Return an error as JSON in OpenAI's format.

    Args:
        param: Name or path of the value that is wrong.
    """
    kind = HTTPStatus(status).phrase
    error = {"message": message, "type": kind, "param": param, "code": status}
    return json.dumps({"error": error}).encode()


async def refuse(send: Send, status: int, message: str) -> None:
    """Answer with an error in OpenAI's format."""
    await send_json(send, status, error_body(status, message))


async def send_json(send: Send, status: int, body: bytes) -> None:
    """Answer with JSON."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
