"""The layer between the gate and vLLM's application: finds the session of each request.

The chat service answers chats; all other requests go to the application. A request whose session
another process serves is redirected to that process. A client's retry gets the answer of the
request that it repeats. Each chat of a batch is answered like a chat that is sent alone.
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable
from contextlib import ExitStack, aclosing, suppress
from typing import TYPE_CHECKING, TypeVar

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from turnwise.core.aio import task_group
from turnwise.core.json_types import JsonObject
from turnwise.core.spans import TRACE_HEADERS, within_trace
from turnwise.errors import InputError
from turnwise.serving.openai.bodies import TREE, Tree, decoded
from turnwise.serving.openai.errors import refusal
from turnwise.serving.openai.protection import TICKET, ticket
from turnwise.serving.openai.request_sampling import MAX_COMPLETIONS

if TYPE_CHECKING:
    from turnwise.chat.session import Session
    from turnwise.serving.front_processes import FrontProcesses
    from turnwise.serving.openai.chat_service import ChatService

_T = TypeVar("_T")
SESSION_NAME = "turnwise.session"
"""Key of the ASGI scope that holds the name of the request's session; None if the request does not
name a session."""
_REPEATABLE = "turnwise.repeatable"
"""Key of the ASGI scope of a request that may be a retry or may be retried. The value is a tuple: a
hash of the request, whether it may be a retry, and its `_Running` (the request in flight)."""
_CHAT = "/v1/chat/completions"
IN_SESSIONS = (_CHAT, "/v1/completions", "/v1/responses", "/v1/messages")
"""Paths of requests that are served within a session, with their `RequestContext` as `CURRENT`.
Their answers are counted, and their bodies are read before the application gets them."""
_BATCH = "/v1/chat/completions/batch"
"""Path of a request with several chats; `messages` is a list of conversations."""
_INVOCATIONS = "/invocations"
_OBJECTS = {_CHAT: "messages", "/v1/messages": "messages", "/v1/responses": "input"}
"""Key of the list of objects in each API's body. vLLM would read the entries before it refuses an
entry that is not an object."""
_APIS = {"messages": _CHAT, "prompt": "/v1/completions", "input": "/v1/responses"}
"""Path of each API, by a key that only the bodies of this API's requests have."""
_READ = b"{}"
"""Body that is passed on for a request whose scope has the `Tree`, because the framework would not
read an empty body as JSON."""
_OPENING = "/v1/sessions"  # path, within a session, that opens a session under it
_OWN_HEADERS = "endpoint-load-metrics-format"
"""Header of a request that wants additional headers in the answer."""


class SessionMiddleware:
    """Answers each request in its session.

    The path names the session; if it has no session, the header X-Session-ID names the session. If
    both have a name, and the names differ, the header names a session under the path's session.

    A retry gets the answer of the request that it repeats, so nothing is sampled again. A retry has
    the session, path and body of exactly one request, which is in flight or among the last requests
    that the session answered. `x-stainless-retry-count` (OpenAI's and Anthropic's clients) or an
    `Idempotency-Key` seen before marks a request as a retry. Without an `Idempotency-Key`, the
    request must also name its session, or the completion before it. A request is aborted when its
    last waiting client disconnects.
    """

    def __init__(
        self,
        app: ASGIApp,
        chats: "ChatService",
        counts: Counter[str],
        processes: "FrontProcesses | None",
        key: str | None,
    ) -> None:
        self._app = app
        self._chats = chats
        self._counts = counts
        """Answers by status; retries that joined a request in flight as `joined`, and those that
        got a finished answer again as `repeated`."""
        self._processes = processes
        self._key = key
        self._running: dict[bytes, _Running] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        elsewhere = self._url_elsewhere(scope, headers.get("x-session-id", ""))
        name, path = _split_path(scope["path"])
        idempotent, count = headers.get("idempotency-key"), headers.get("x-stainless-retry-count")
        conversation = headers.get("x-session-id")
        if not conversation and not name:
            conversation = headers.get("x-request-id") or None
        # Equal requests without these names may come from two clients that each want a sample.
        named = bool(name) or conversation is not None
        shared = idempotent is not None or (count is not None and named)
        whole = shared or path in (*IN_SESSIONS, _BATCH, _INVOCATIONS)
        # The body of a redirected request is read, too. If the body came after the answer, the
        # connection would have no deadline from then on.
        body: bytes | None = None
        if elsewhere is not None or (whole and scope["method"] == "POST"):
            try:
                body = await Request(scope, receive).body()
            except ClientDisconnect:
                return
        if elsewhere is not None:
            await Response(None, 307, {"location": elsewhere})(scope, receive, send)
        elif body is None or not shared:
            await self._handle(scope, body, receive, send)
        else:
            parts = [scope["path"], conversation or "", idempotent or "", ""]
            key = hashlib.sha256("\0".join(parts).encode() + body).digest()
            running = self._join(key, idempotent is not None or count != "0", scope, body)
            await running.relay(receive, send)

    def _join(self, key: bytes, is_retry: bool, scope: Scope, body: bytes) -> "_Running":
        """Return the request in flight that a retry repeats, or begin one."""
        known = self._running.get(key)
        if known is not None and known.abandoned.is_set():
            known = None
        if is_retry and known is not None and known.alone:
            self._counts["joined"] += 1
            return known
        running = self._running[key] = _Running(alone=known is None)
        if known is not None:
            known.alone = False

        def end(_: object) -> None:
            if self._running.get(key) is running:
                del self._running[key]
            running.wake()

        scope = {**scope, _REPEATABLE: (key, is_retry, running)}
        work = self._handle(scope, body, running.receive, running.send)
        running.task = asyncio.ensure_future(work)
        running.task.add_done_callback(end)
        return running

    def _url_elsewhere(self, scope: Scope, name: str) -> str | None:
        """Return the URL of a request whose session another process serves; None for other
        requests.

        The session in the path counts; if the path has no session, the `name` from a header counts.
        """
        path, begin = str(scope["path"]), ""
        if path.startswith("/sessions/"):
            name = path.removeprefix("/sessions/").partition("/")[0]
        elif path.startswith("/v1/"):
            begin = f"/sessions/{name}"
        else:
            return None
        if self._processes is None or (base_url := self._processes.base_url_of(name)) is None:
            return None
        query = [scope["query_string"].decode("latin-1")] if scope["query_string"] else []
        if self._key is not None:
            query.append(f"{TICKET}={ticket(self._key, name)}")
        url = base_url.removesuffix("/v1") + begin + scope["raw_path"].decode("latin-1")
        return f"{url}?{'&'.join(query)}" if query else url

    async def _handle(self, scope: Scope, body: bytes | None, receive: Receive, send: Send) -> None:
        """Answer a request in its session; its body is None if it was not read."""
        name, path = _split_path(scope["path"])
        if path in (_BATCH, _INVOCATIONS) and body is not None:
            await self._unwrap(path, scope, body, receive, send)
            return
        # The route that opens a session under another needs the session's name in its path.
        scope = _at(scope, scope["path"] if path == _OPENING else path)
        headers = MutableHeaders(scope=scope)
        own = headers.get("x-session-id")
        if name is None:
            name, own = own, None
        elif own == name:
            own = None
        scope[SESSION_NAME] = name
        if path not in IN_SESSIONS or body is None:
            await self._app(scope, receive if body is None else _replaying(body, receive), send)
            return
        with ExitStack() as held:
            try:
                serving = self._chats.serving(name, headers.get("x-request-id"), own)
                context = held.enter_context(serving)
            except InputError as error:  # 409: the session has too many sessions under it
                refused = refusal(getattr(error, "status", 409), str(error))
                await refused(scope, receive, send)
                return
            if await self._repeat(scope, context.session, send):
                return
            failed = gone = False
            sent = list[Message]()

            async def noticed() -> Message:
                nonlocal gone
                message = await receive()
                gone = gone or message["type"] == "http.disconnect"
                return message

            async def counted(message: Message) -> None:
                nonlocal failed
                if message["type"] == "http.response.start":
                    self._counts[str(message["status"])] += 1
                    failed = message["status"] >= 400
                if not (failed or gone):
                    await context.deliver()
                    sent.append(message)
                    if context.finished and _is_last(message):
                        _keep(scope, context.session, sent)
                await send(message)

            del headers["x-request-id"]
            headers["x-session-id"] = context.session.id
            trace = {each: headers[each] for each in TRACE_HEADERS if headers.get(each)}
            held.enter_context(within_trace(trace or context.session.trace))
            is_json = headers.get("content-type", "").lower().startswith("application/json")
            if TREE not in scope:
                with suppress(ValueError):  # the application refuses a body that is not JSON
                    scope[TREE] = decoded(body)
                await asyncio.sleep(0)  # let other requests run between reading and checking
            tree: Tree = scope.get(TREE, Tree(None, standard=False))
            if isinstance(tree.value, dict):
                # A client's `request_id` would become the name of the answer, although another
                # answer may have that name.
                own_keys = {k: v for k, v in tree.value.items() if k != "request_id"}
                tree = scope[TREE] = tree._replace(value=own_keys)
                name = _OBJECTS.get(path)
                entries = None if name is None else own_keys.get(name)
                for index, entry in enumerate(entries if isinstance(entries, list) else ()):
                    if not isinstance(entry, dict):
                        place = f"{name}[{index}]"
                        refused = refusal(400, f"{place}: should be a valid dictionary", place)
                        await refused(scope, noticed, counted)
                        return
            # All other chats are read by vLLM's route, and arrive at `ChatService.answer_for_vllm`.
            if (
                path == _CHAT
                and is_json
                and tree.standard
                and isinstance(tree.value, dict)
                and _OWN_HEADERS not in headers
            ):
                answer = await _unless_gone(self._chats.answer_http(tree.value, context), noticed)
                if isinstance(answer, AsyncGenerator):
                    await _unless_gone(_send_events(answer, counted), noticed)
                elif answer is not None:
                    await answer(scope, noticed, counted)
                return
            await self._app(scope, _replaying(body, noticed), counted)

    async def _repeat(self, scope: Scope, session: "Session", send: Send) -> bool:
        """Send a retry the finished answer of the request that it repeats, if the session still has
        it; return whether the answer was sent."""
        messages = None
        if (repeatable := scope.get(_REPEATABLE)) is not None:
            key, is_retry, running = repeatable
            messages = session.answers.get(key) if is_retry and running.alone else None
        for message in messages or ():
            await send(message)
        if messages:
            self._counts["repeated"] += 1
            session.trajectory.events["repeated_answer"] += 1
        return bool(messages)

    async def _unwrap(
        self, path: str, scope: Scope, body: bytes, receive: Receive, send: Send
    ) -> None:
        """Answer a batch of chats, or a request to the path that all APIs share."""
        answer: Response | None
        try:
            tree = decoded(body)
        except ValueError as error:
            answer = refusal(400, f"the body is not valid JSON: {error}")
        else:
            if not isinstance(tree.value, dict):
                answer = refusal(400, "the body is no JSON object")
            elif path == _BATCH:
                answer = await _unless_gone(self._ask_all(tree, scope), receive)
            elif api := next((api for key, api in _APIS.items() if key in tree.value), None):
                await self._handle({**_at(scope, api), TREE: tree}, body, receive, send)
                return
            else:
                answer = refusal(400, f"the body has none of {', '.join(_APIS)}")
        if answer is not None:
            await answer(scope, receive, send)

    async def _ask_all(self, batch: Tree, scope: Scope) -> Response:
        """Answer each chat of a batch; return a single answer with the choices of all chats in
        their order, or the first error."""
        tree: JsonObject = batch.value
        conversations, wrong = tree.get("messages"), ""
        if not isinstance(conversations, list) or not conversations:
            wrong = "messages: a batch needs a list of conversations, each a list of messages"
        elif not all(isinstance(messages, list) for messages in conversations):
            wrong = "messages: each conversation of a batch is a list of messages"
        elif len(conversations) > MAX_COMPLETIONS:
            wrong = f"messages: a batch has at most {MAX_COMPLETIONS:,} conversations"
        elif tree.get("stream"):
            wrong = "stream: a batch is not streamed"
        elif tree.get("n") not in (None, 1):
            wrong = "n: a batch has one completion of each conversation"
        if wrong:
            return refusal(400, wrong)
        chat = _at(scope, scope["path"].removesuffix("/batch"))

        async def ask(messages: object) -> tuple[int, bytes]:
            status, pieces = 500, list[bytes]()

            async def never() -> Message:
                await asyncio.Event().wait()
                raise AssertionError

            async def keep(message: Message) -> None:
                nonlocal status
                status = message.get("status", status)
                pieces.append(message.get("body", b""))

            # All chats share the other keys, because copies would take up to 1,024 times the body.
            own = {**chat, TREE: batch._replace(value={**tree, "messages": messages})}
            await self._handle(own, _READ, never, keep)
            return status, b"".join(pieces)

        async with task_group() as tasks:
            asking = []
            for messages in conversations or ():
                asking.append(tasks.create_task(ask(messages)))
                await asyncio.sleep(0)  # let other requests run in between
        trees = list[JsonObject]()
        for task in asking:
            status, body = task.result()
            if status >= 400:
                return Response(body, status, media_type="application/json")
            trees.append(msgspec.json.decode(body))
            await asyncio.sleep(0)
        choices = [
            {**choice, "index": index}
            for index, answer in enumerate(trees)
            for choice in answer["choices"]
        ]
        usage = {
            name: sum(answer["usage"][name] for answer in trees)
            if isinstance(value, int)
            else value
            for name, value in trees[0]["usage"].items()
        }
        body = msgspec.json.encode({**trees[0], "choices": choices, "usage": usage})
        return Response(body, media_type="application/json")


class _Running:
    """A request in flight, shared by all clients that wait for its answer."""

    task: "asyncio.Future[None]"

    def __init__(self, alone: bool) -> None:
        self.alone = alone  # whether no equal request is in flight, so that a retry is unambiguous
        self.abandoned = asyncio.Event()  # set when the last client has disconnected
        self._sent: list[Message] = []
        self._changed = asyncio.Event()
        """Set, and replaced, when the answer grows or ends, or a client disconnects."""
        self._clients = 0

    def wake(self, _: object = None) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def receive(self) -> Message:
        await self.abandoned.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self._sent.append(message)
        self.wake()

    async def relay(self, receive: Receive, send: Send) -> None:
        """Send the answer so far, then the rest as it arrives, until the client disconnects."""
        self._clients += 1
        left, done = asyncio.ensure_future(receive()), 0
        left.add_done_callback(self.wake)
        try:
            while not left.done():
                while done < len(self._sent):
                    message = self._sent[done]
                    await send(message)
                    done += 1
                    if _is_last(message):
                        return
                if self.task.done():
                    self.task.result()
                    return
                await self._changed.wait()
        finally:
            left.cancel()
            self._clients -= 1
            if not self._clients:
                self.abandoned.set()


def _is_last(message: Message) -> bool:
    return message["type"] == "http.response.body" and not message.get("more_body")


def _keep(scope: Scope, session: "Session", sent: list[Message]) -> None:
    """Keep a finished answer for a retry, unless equal requests in flight make it ambiguous."""
    if (repeatable := scope.get(_REPEATABLE)) is not None:
        key, _, running = repeatable
        size = sum(len(message.get("body", b"")) for message in sent)
        session.keep_answer(key, sent if running.alone else [], size)


def _split_path(path: str) -> tuple[str | None, str]:
    """Return the session's name in a path (None if it has no name), and the path without the
    session."""
    name = None
    if path.startswith("/sessions/") and "/v1/" in f"{path}/":
        name, _, rest = f"{path}/".removeprefix("/sessions/").partition("/v1/")
        path = "/v1/" + rest.removesuffix("/")
    # Anthropic's clients add /v1 to a base URL that already ends with it.
    return name, path.removeprefix("/v1") if path.startswith("/v1/v1/") else path


def _at(scope: Scope, path: str) -> Scope:
    return {**scope, "path": path, "raw_path": path.encode()}


def _replaying(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that returns the body, which was read already, then later messages."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return waiting.pop() if waiting else await receive()

    return replay


async def _send_events(events: AsyncGenerator[str, None], send: Send) -> None:
    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    async with aclosing(events):
        async for event in events:
            await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _unless_gone(work: Awaitable[_T], receive: Receive) -> _T | None:
    """Return the result of `work`; if the client disconnects first, cancel the work and return
    None."""
    working: asyncio.Future[_T] = asyncio.ensure_future(work)
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
