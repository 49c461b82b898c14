"""The OpenAI server: one address before one engine or a whole fleet.

vLLM's application answers (`vllm_server`); around it stand three doors of ours, plain ASGI: the
key, the session that a request belongs to, and retries that join the request that they repeat.
Runs in the event loop of the engine that it serves.
"""

import asyncio
import hashlib
import hmac
import json
import os
import socket
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import uvicorn
from fastapi import APIRouter, FastAPI, HTTPException, Response
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from turnwise.config import Config
from turnwise.engine.protocol import Generator
from turnwise.errors import DeadlineError, InputError
from turnwise.serving.scheduler import Scheduler
from turnwise.serving.sessions import SessionStore
from turnwise.serving.vllm_server import CALL, Call, build
from turnwise.tasks import settle_heap

_START_SECONDS = 30.0
_STOP_SECONDS = 5.0
_KEEP_ALIVE_SECONDS = 120
"""For a connection without a request: longer than clients keep theirs (OpenAI's 5 s, aiohttp 15,
Go 90), or a request can meet a connection that is just being closed."""
_GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
_NAME = r"^[A-Za-z0-9._:~-]{1,200}$"


class OpenAIServer:
    """Serves a generator over HTTP.

    Args:
        config: Model, sampling defaults, address and key.
        generator: One engine, or the scheduler before many.
    """

    def __init__(self, config: Config, generator: Generator) -> None:
        self.sessions = SessionStore(config.sampling)
        self.base_url = ""
        """Of the API, /v1 included; known once it is started."""
        self._config = config
        self._generator = generator
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Listen; returns the base URL.

        Raises:
            InputError: when the address cannot be had, or vLLM refuses the model.
            DeadlineError: when the server is not up in time.
        """
        serving = self._config.serving
        listening = _listen(serving.host, serving.port)
        host, port = listening.getsockname()[:2]
        try:
            app = await self.application()
        except BaseException:
            listening.close()
            raise
        options = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        )
        self._server = _Server(options)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))
        try:
            async with asyncio.timeout(_START_SECONDS):
                await self._server.ready.wait()
        except TimeoutError:
            raise DeadlineError(
                f"the OpenAI server at {host}:{port} was not up in {_START_SECONDS:g} s"
            ) from None
        settle_heap()
        self.base_url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
        return self.base_url

    def session_url(self, session_id: str) -> str:
        """The base URL of one session."""
        return f"{self.base_url.removesuffix('/v1')}/sessions/{session_id}/v1"

    async def application(self) -> ASGIApp:
        """The ASGI application, doors and all."""
        key = self._config.serving.api_key or os.environ.get("TURNWISE_API_KEY")
        app = await build(
            self._config, self._generator, self._healthy, self.sessions.remember_completion
        )
        counts: Counter[str] = Counter()
        _add_routes(app, self.sessions, _metrics(self.sessions, self._generator, counts))
        app.state.server = self  # vLLM's error handler looks for one
        return _Key(_Session(_Join(app, counts), self.sessions, counts), key)

    def _healthy(self) -> bool:
        scheduler = self._generator
        if isinstance(scheduler, Scheduler):
            return any(worker.usable for worker in scheduler.workers.values())
        return True

    async def stop(self) -> None:
        """End the connections, then listen no more."""
        if self._server is None or self._serving is None:
            return
        self._server.should_exit = True
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await self._serving
        except TimeoutError:
            self._server.force_exit = True
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)


class _Server(uvicorn.Server):
    """Tells when it listens, and leaves signals to the program that it runs in."""

    def __init__(self, options: uvicorn.Config) -> None:
        super().__init__(options)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # asyncio switches Nagle off only where the protocol is said to be TCP.
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(2048)
    except (OSError, OverflowError) as error:
        raise InputError(
            f"the server cannot listen on {host}:{port} ({error}); choose another serving.port "
            "(0 takes a free one) or serving.host"
        ) from error
    return listening


class _Opening(BaseModel):
    """What POST /sessions takes."""

    id: str | None = Field(default=None, pattern=_NAME)
    training: bool = False
    """Refuse sampling that the trainer would not know of."""
    group: str = Field(default="", max_length=200)
    """Sessions of one group begin with one prompt and share its cache."""


class _Reward(BaseModel):
    """What POST /sessions/{id}/reward takes."""

    reward: float = Field(allow_inf_nan=False)


def _add_routes(app: FastAPI, store: SessionStore, metrics: Callable[[], bytes]) -> None:
    router = APIRouter()

    def found(session_id: str) -> Any:
        session = store.get(session_id)
        if session is None:
            raise HTTPException(404, f"there is no session {session_id}")
        return session

    @router.post("/sessions", status_code=201)
    async def open_session(opening: _Opening) -> dict[str, Any]:
        """Begin a session; its base URL is /sessions/{id}/v1."""
        name = opening.id or uuid.uuid4().hex
        try:
            session = store.open(name, training=opening.training, group=opening.group)
        except InputError as error:
            raise HTTPException(409, str(error)) from None
        return session.describe()

    @router.get("/sessions/{session_id}")
    async def get_session(session_id: str) -> dict[str, Any]:
        """The session's trajectory: every token, log-prob and weight version."""
        session = found(session_id)
        session.finish()
        described: dict[str, Any] = session.describe()
        return described

    @router.post("/sessions/{session_id}/reward")
    async def give_reward(session_id: str, reward: _Reward) -> dict[str, Any]:
        """Say how well the session did."""
        session = found(session_id)
        session.trajectory.reward = reward.reward
        return {"id": session_id, "reward": reward.reward}

    @router.delete("/sessions/{session_id}")
    async def close_session(session_id: str) -> dict[str, Any]:
        """End the session and forget it; the answer is the last that is told of it."""
        session = found(session_id)
        store.close(session_id)
        session.finish()
        described: dict[str, Any] = session.describe()
        return described

    app.include_router(router)
    app.add_exception_handler(StarletteHTTPException, _told)
    # vLLM's middlewares are for scaling, browsers and metrics of its own.
    app.user_middleware.clear()
    app.middleware_stack = FastAPI.build_middleware_stack(app)
    routes = app.router.routes
    routes[:] = [route for route in routes if getattr(route, "path", "") != "/metrics"]

    @app.get("/metrics")
    async def get_metrics() -> Response:
        """Prometheus."""
        return Response(metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _metrics(
    store: SessionStore, generator: Generator, counts: Counter[str]
) -> Callable[[], bytes]:
    class Collector:
        def collect(self) -> Iterator[Any]:
            yield GaugeMetricFamily("turnwise_sessions_open", "Named sessions", len(store))
            requests = CounterMetricFamily("turnwise_requests", "HTTP requests", labels=["what"])
            for what, count in counts.items():
                requests.add_metric([what], count)
            yield requests
            if not isinstance(generator, Scheduler):
                return
            events = CounterMetricFamily("turnwise_turns", "What became of turns", labels=["event"])
            for event, count in generator.events.items():
                events.add_metric([event], count)
            yield events
            load = GaugeMetricFamily("turnwise_worker_load", "Weighted requests", labels=["worker"])
            up = GaugeMetricFamily("turnwise_worker_up", "1 if it takes turns", labels=["worker"])
            tokens = CounterMetricFamily("turnwise_worker_tokens", "Sampled", labels=["worker"])
            for worker in generator.workers.values():
                load.add_metric([worker.name], worker.load)
                up.add_metric([worker.name], float(worker.usable))
                tokens.add_metric([worker.name], worker.tokens)
            yield from (load, up, tokens)

    registry = CollectorRegistry()
    registry.register(Collector())
    return lambda: generate_latest(registry) + generate_latest(REGISTRY)


class _Key:
    """Asks for the key on every route but /health."""

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self._app = app
        self._digest = _digest(f"Bearer {key}".encode()) if key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._digest is not None and scope["type"] == "http" and scope["path"] != "/health":
            sent = dict(scope["headers"]).get(b"authorization", b"")
            if "/v1/messages" in scope["path"] and (
                own := dict(scope["headers"]).get(b"x-api-key")
            ):
                sent = b"Bearer " + own  # Anthropic's clients send it so
            if not hmac.compare_digest(_digest(sent), self._digest):
                await _refuse(send, 401, "this server wants its key as a bearer token")
                return
        await self._app(scope, receive, send)


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()


class _Session:
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
        path: str = scope["path"]
        name = headers.get(b"x-session-id", b"").decode("latin-1") or None
        if path.startswith("/sessions/") and "/v1/" in path:
            name, _, rest = path.removeprefix("/sessions/").partition("/v1/")
            path = "/v1/" + rest
        scope = {**scope, "path": path, "raw_path": path.encode()}
        if not path.startswith(_GENERATING):
            await self._app(scope, receive, send)
            return
        previous = headers.pop(b"x-request-id", b"").decode("latin-1")
        if name and self._store.is_closed(name):
            await _refuse(send, 410, f"the session {name} is closed")
            return
        try:
            session = self._store.of_request(name, previous)
        except InputError as error:
            await _refuse(send, 429, str(error))
            return
        headers.pop(b"x-session-id", None)
        if session.id:
            headers[b"x-session-id"] = session.id.encode("latin-1", "replace")
        scope["headers"] = list(headers.items())
        token = CALL.set(Call(session, previous))

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._counts[str(message["status"])] += 1
            await send(message)

        try:
            await self._app(scope, receive, counted)
        finally:
            CALL.reset(token)


@dataclass(slots=True, eq=False)
class _Running:
    """A request under way, and all who wait for its answer."""

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


class _Join:
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
            b"\0".join([scope["path"].encode(), _conversation(headers), idempotent or b"", body])
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


def _conversation(headers: dict[bytes, bytes]) -> bytes:
    """Whose request it is, as far as it says: its session, or the completion before it."""
    call = CALL.get()
    return headers.get(b"x-session-id") or (call.previous.encode() if call is not None else b"")


async def _body(receive: Receive) -> bytes | None:
    """A request's whole body; None if the client went away."""
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += bytes(message.get("body", b""))
        if not message.get("more_body"):
            return body


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


async def _told(_: Any, error: Any) -> Response:
    """What the framework itself refuses, such as a path that is not there."""
    return Response(
        _shape(error.status_code, str(error.detail), HTTPStatus(error.status_code).phrase),
        error.status_code,
        error.headers,
        "application/json",
    )


def _shape(status: int, message: str, kind: str) -> bytes:
    error = {"message": message, "type": kind, "param": None, "code": status}
    return json.dumps({"error": error}).encode()


async def _refuse(send: Send, status: int, message: str) -> None:
    """An error in OpenAI's shape."""
    body = _shape(status, message, HTTPStatus(status).phrase)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
