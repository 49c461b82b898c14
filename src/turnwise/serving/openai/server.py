"""The OpenAI server: one address for one engine or a whole fleet, and its own routes.

A request passes CORS, where it is configured, the gate (`protection`) and the sessions
(`middleware`). The chat service (`chat_service`), vLLM's application (`vllm_app`) and the routes
here answer it. The server runs on the event loop of the engine that it serves.

To add an HTTP route: write it here. A route under `/sessions/{id}` (but not its `/v1`) that agents
may call needs an entry in `managing` of `serving/openai/protection.py`. A route of a session's
requests needs one in `IN_SESSIONS` of `serving/openai/middleware.py` (and, for a list of messages,
in `_OBJECTS`), a route of vLLM's one in `VLLM_ROUTES` of `serving/openai/vllm_app.py`.
"""

import asyncio
import ipaddress
import json
import logging
import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from turnwise.chat.session import NAME_PATTERN, Session, StoredResponse
from turnwise.chat.session_store import SessionStore
from turnwise.config import Config
from turnwise.core.aio import freeze_gc, run_in_thread
from turnwise.core.json_types import JsonObject
from turnwise.core.optional import Foreign
from turnwise.core.user_code import call_user_code
from turnwise.engine.protocol import Generator
from turnwise.errors import InputError, TurnwiseError
from turnwise.serving.openai.address import QUEUE, listen, reachable
from turnwise.serving.openai.bodies import read_once
from turnwise.serving.openai.errors import answer_error
from turnwise.serving.openai.metrics import EngineMetrics, metrics_text
from turnwise.serving.openai.middleware import IN_SESSIONS, SESSION_NAME, SessionMiddleware
from turnwise.serving.openai.protection import Access, HttpConnection, guarded, max_connections
from turnwise.serving.openai.vllm_app import build
from turnwise.trajectory import MAX_REWARD

if TYPE_CHECKING:
    from turnwise.serving.front_processes import FrontProcesses

logger = logging.getLogger(__name__)

_STOP_SECONDS = 5.0
_KEEP_ALIVE_SECONDS = 120
"""Time that an idle connection stays open. It is longer than the time for which clients keep
connections open (OpenAI 5 s, aiohttp 15 s, Go 90 s); otherwise a request can arrive on a connection
that is being closed."""


class OpenAIServer:
    """Serves a generator over HTTP: one engine, or the scheduler of several.

    The `port` is serving.port by default; 0 takes a free port. `processes` serve the sessions that
    clients open; they are started and stopped with the server. `extend` gets the application, may
    add routes and middleware to it, and returns it. `access` finds the key in requests.
    """

    def __init__(
        self,
        config: Config,
        generator: Generator,
        port: int | None = None,
        processes: "FrontProcesses | None" = None,
        extend: Callable[[FastAPI], FastAPI] | None = None,
        access: Access | None = None,
    ) -> None:
        serving = config.serving
        own = SessionStore.of(config.sampling, serving) if processes is None else processes.store
        self.sessions = own
        self.base_url = ""  # including /v1
        path = config.model.adapter or config.model.path
        self.model_name = serving.served_model_name or Path(path).name or Path(path).resolve().name
        """Model name in responses; requests may use any name if there are no adapters."""
        self.workers: Callable[[], Mapping[str, str]] = dict
        """Returns the base URLs of workers' own servers, by name; set by the owner of a fleet."""
        self.requests: Counter[str] = Counter() if processes is None else processes.requests
        """HTTP requests by status or event, including those that `processes` answer."""
        self.processes = processes
        self.ended = threading.Event()
        """Set once the server has stopped serving."""
        self._config = config
        self._generator = generator
        self._extend, self._access = extend, access
        self.engines = EngineMetrics(generator)
        self._port = serving.port if port is None else port
        self._listening: socket.socket | None = None
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Listen, and return the base URL; raise InputError when the address cannot be used, or
        vLLM refuses the model."""
        self.listen()
        await self.serve()
        return self.base_url

    def listen(self) -> uvicorn.Server:
        """Listen, so that the base URL is known, and return uvicorn's server; requests wait for
        `serve`. Raise InputError when the address cannot be used."""
        serving = self._config.serving
        self._listening = listening = listen(serving.host, self._port, serving.ports)
        host, port = listening.getsockname()[:2]
        if self._config.serving.key is None and not ipaddress.ip_address(host).is_loopback:
            logger.warning(
                "the OpenAI server at %s:%d is open to everybody who can reach this address: set "
                "serving.api_key, or leave serving.host at 127.0.0.1",
                *(host, port),
            )
        address = reachable(host)
        self.base_url = f"http://{f'[{address}]' if ':' in address else address}:{port}/v1"
        HttpConnection.max_open = max_connections()
        options = uvicorn.Config(
            "",  # `serve` makes the application
            http=HttpConnection,
            ws="none",
            log_level="error",  # invalid requests would fill the log with warnings
            access_log=False,
            proxy_headers=False,  # nothing asks for the client's address
            lifespan="off",
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            backlog=HttpConnection.max_open // 2,  # connections that asyncio accepts at once
        )
        self._server = uvicorn.Server(options)
        return self._server

    async def serve(self) -> None:
        """Answer requests from now on; raise InputError when vLLM refuses the model."""
        server, listening = self._server, self._listening
        assert server is not None
        assert listening is not None
        options = server.config
        try:
            options.app = await self.application()
            if self.processes is not None:
                await self.processes.start()
            options.load()
            # The steps of `uvicorn.Server.serve`, which would also handle signals.
            server.lifespan = options.lifespan_class(options)
            await server.startup(sockets=[listening])
        except BaseException:
            listening.close()
            self.ended.set()
            raise
        listening.listen(QUEUE)  # asyncio sets a shorter queue

        async def run() -> None:
            try:
                await server.main_loop()
                await server.shutdown(sockets=[listening])
            finally:
                self.ended.set()

        self._serving = asyncio.create_task(run())
        freeze_gc()

    def session_url(self, session_id: str) -> str:
        return f"{self.base_url.removesuffix('/v1')}/sessions/{session_id}/v1"

    def urls(self, session_id: str) -> JsonObject:
        """Return a session's base URL as OpenAI's and Anthropic's clients take it."""
        url = self.session_url(session_id)
        return {"base_url": url, "anthropic_base_url": url.removesuffix("/v1")}

    async def application(self) -> ASGIApp:
        """Return the ASGI application with its layers."""
        serving, key = self._config.serving, self._config.serving.key
        # Requests may also name the model by model.path, unless a name is configured.
        names = [self.model_name]
        if not serving.served_model_name and self._config.model.path != self.model_name:
            names.append(self._config.model.path)
        app = await build(self._config, self._generator, self.sessions, names)
        app.state.server = self  # for the routes, and vLLM's error handler
        app.include_router(router)
        app.router.redirect_slashes = False  # a redirect would lose the session in the path
        app.add_exception_handler(HTTPException, answer_error)
        app.add_exception_handler(RequestValidationError, answer_error)
        app.add_exception_handler(ValidationError, answer_error)  # raised after the body was read
        # Remove vLLM's middleware, which handles scaling, browsers and its own metrics.
        app.user_middleware.clear()
        app.middleware_stack = None  # no middleware can be added once it is built
        extended = app
        if self._extend is not None:
            hook, timeout = self._extend.__name__, "engine.start_timeout"
            seconds = self._config.engine.start_timeout
            returned: object = await call_user_code(
                self._extend, app, name=hook, seconds=seconds, key=timeout
            )
            if not isinstance(returned, FastAPI):
                given = type(returned).__name__
                raise InputError(f"{hook} must return the application, not {given}")
            extended = returned
        for each in {id(one): one for one in (app, extended)}.values():
            read_once(each)
        # Middleware of `extend` goes around the session middleware, which answers most chats, so
        # that they never reach the application.
        added = list(extended.user_middleware)
        extended.user_middleware.clear()
        app.middleware_stack = FastAPI.build_middleware_stack(app)
        chats = app.state.chats
        layers: ASGIApp = SessionMiddleware(extended, chats, self.requests, self.processes, key)
        for kind, arguments, options in reversed(added):
            layers = kind(layers, *arguments, **options)
        return guarded(layers, serving, key, self.sessions, self._access)

    async def stop(self) -> None:
        """Close the connections and stop listening; end the processes."""
        if self.processes is not None:
            await self.processes.stop()
        if self._server is None or self._serving is None:
            return
        self._server.should_exit = True
        with suppress(TimeoutError):
            async with asyncio.timeout(_STOP_SECONDS):
                await self._serving


class _OpeningUnder(BaseModel):
    """The body of POST /sessions/{id}/v1/sessions."""

    id: str | None = Field(default=None, pattern=NAME_PATTERN)
    """Name of the new session, within its parent; random by default."""


class _Opening(_OpeningUnder):
    """The body of POST /sessions."""

    training: bool = False
    """Refuse sampling parameters other than the configured ones."""
    group: str = Field(default="", max_length=200)
    """Sessions of one group begin with the same prompt and share its cache."""


class _Reward(BaseModel):
    """The body of POST /sessions/{id}/reward."""

    reward: float = Field(allow_inf_nan=False, ge=-MAX_REWARD, le=MAX_REWARD)


router = APIRouter()


async def _server(request: Request) -> OpenAIServer:
    server: OpenAIServer = request.app.state.server
    return server


_Server = Annotated[OpenAIServer, Depends(_server)]


def _opened(server: OpenAIServer, session_id: str) -> Session:
    session = server.sessions.get(session_id)
    if session is None:
        why = server.sessions.gone(session_id)
        missing = f"there is no session {session_id}"
        raise HTTPException(404, f"the session {session_id} {why}" if why else missing)
    return session


def _managed(server: OpenAIServer, session_id: str) -> Session:
    session = _opened(server, session_id)
    if session.private and not session.agent_rewards:
        raise HTTPException(
            403,
            "this session belongs to a rollout: its agent may read, reward or close it only "
            "if rollout.agent_rewards is true",
        )
    return session


async def _kept(request: Request, server: _Server, response_id: str) -> dict[str, StoredResponse]:
    """Return all responses of the session that keeps this response."""
    name = request.scope[SESSION_NAME]
    named = None if name is None else _opened(server, name)
    if (session := server.sessions.of_response(named, response_id)) is None:
        raise HTTPException(404, f"there is no response {response_id} in this session")
    return session.responses


_Kept = Annotated[dict[str, StoredResponse], Depends(_kept)]


@router.get("/")
async def get_index(server: _Server) -> JsonObject:
    """Addresses and routes of the server."""
    return {
        "server": "turnwise",
        "model": server.model_name,
        "openai_base_url": server.base_url,
        "anthropic_base_url": server.base_url.removesuffix("/v1"),
        "workers": server.workers(),
        "session_processes": {} if server.processes is None else server.processes.base_urls,
        "routes": [*IN_SESSIONS, "/v1/models", "/sessions", "/health", "/metrics", "/docs"],
        "reference": "/docs",
    }


@router.get("/v1", include_in_schema=False)
@router.get("/v1/", include_in_schema=False)
async def get_base(server: _Server) -> JsonObject:
    """Answer a request for the base URL, which some clients send before all other requests."""
    return {"server": "turnwise", "model": server.model_name}


@router.get("/openapi.json", include_in_schema=False)
async def get_schema(request: Request) -> Response:
    """Return the description of all routes; making it takes most of a second."""

    def describe() -> str:
        return json.dumps(request.app.openapi())

    text = await run_in_thread(describe)
    return Response(text, media_type="application/json")


@router.get("/v1/models/{name:path}")
async def get_model(name: str, request: Request) -> JsonObject:
    """Return one of the models that /v1/models lists."""
    listed = await request.app.state.openai_serving_models.show_available_models()
    for card in listed.data:
        if card.id == name:
            described: JsonObject = card.model_dump()
            return described
    raise HTTPException(404, f"there is no model {name}: GET /v1/models lists them")


@router.get("/metrics")
async def get_metrics(server: _Server) -> Response:
    """Return the metrics in Prometheus' text format."""
    elsewhere = 0 if server.processes is None else server.processes.count
    count = len(server.sessions) + elsewhere
    text = await metrics_text(server.engines, count, server.requests)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/sessions")
async def list_sessions(
    server: _Server,
    limit: Annotated[int, Query(ge=1, le=1_000)] = 500,
    after: str | None = None,
) -> JsonObject:
    """List the sessions that clients opened, oldest first, without their tokens. `next` is the
    value of `after` for the next page; it is null on the last page."""
    created, _, name = (after or "").partition(":")
    try:
        place = None if after is None else (float(created), name)
    except ValueError:
        raise HTTPException(400, "after must be the value of next on the page before") from None
    listed = server.sessions.page(place, limit + 1)
    if server.processes is not None:
        listed += await server.processes.list_sessions(place, limit + 1)
    listed.sort(key=lambda each: each[0])
    shown = listed[:limit]
    last = f"{shown[-1][0][0]!r}:{shown[-1][0][1]}" if len(listed) > limit else None
    return {"sessions": [summary for _, summary in shown], "next": last}


@router.post("/sessions", status_code=201)
async def open_session(server: _Server, opening: _Opening | None = None) -> JsonObject:
    """Open a session; the response contains its base URLs. The body is optional."""
    opening = opening or _Opening()
    options = opening.model_dump(exclude={"id"})
    store, processes, name = server.sessions, server.processes, opening.id
    try:
        if processes is not None and (name is None or store.get(name) is None):
            elsewhere = await processes.open(name, **options)
            if elsewhere is not None:
                return elsewhere
        session = store.open(name, **options)
    except InputError as error:
        raise HTTPException(409, str(error)) from None
    except TurnwiseError as error:
        raise HTTPException(503, str(error)) from None
    return {**session.describe(), **server.urls(session.id)}


@router.post("/sessions/{session_id}/v1/sessions", status_code=201)
async def open_session_under(
    session_id: str, server: _Server, opening: _OpeningUnder | None = None
) -> JsonObject:
    """Open a session for a sub-agent, whose turns belong to the same trajectory; the response
    contains its id and base URLs. The body is optional."""
    parent = _opened(server, session_id)
    try:
        session = server.sessions.open_under(parent, opening.id if opening is not None else None)
    except InputError as error:
        raise HTTPException(409, str(error)) from None
    return {"id": session.id, **server.urls(session.id)}


@router.get("/sessions/{session_id}")
async def get_session(session_id: str, server: _Server) -> JsonObject:
    """Return the session's trajectory: every token, log-prob and weight version."""
    session = _managed(server, session_id)
    session.finish()
    return session.describe()


@router.post("/sessions/{session_id}/reward")
async def give_reward(session_id: str, server: _Server, reward: _Reward) -> JsonObject:
    """Set the session's reward."""
    _managed(server, session_id).trajectory.set_outcome(reward=reward.reward)
    return {"id": session_id, "reward": reward.reward}


@router.delete("/sessions/{session_id}")
async def close_session(session_id: str, server: _Server) -> JsonObject:
    """Close the session; the response describes it one last time."""
    session = _managed(server, session_id)
    server.sessions.close(session_id)
    session.finish()
    return session.describe()


@router.get("/v1/responses/{response_id}")
async def get_response(response_id: str, kept: _Kept) -> JsonObject:
    """Return a response that its session keeps."""
    return kept[response_id].body


@router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, kept: _Kept) -> JsonObject:
    """Delete a response that its session keeps; responses that continue it stay."""
    del kept[response_id]
    return {"id": response_id, "object": "response", "deleted": True}


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(
    response_id: str,
    kept: _Kept,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> JsonObject:
    """List the input items of a response, with the conversation that it continues."""
    items: list[JsonObject] = []
    for index, item in enumerate(kept[response_id].whole_input):
        given: Foreign = item
        tree = given.model_dump(mode="json") if isinstance(item, BaseModel) else dict(given)
        if isinstance(tree.get("content"), str):
            tree["content"] = [{"type": "input_text", "text": tree["content"]}]
        name = tree.get("id") or f"{response_id}-{index}"
        items.append({"type": "message", **tree, "id": name})
    if order == "desc":
        items.reverse()
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise HTTPException(404, f"there is no item {after} in {response_id}")
    begin = 0 if after is None else ids.index(after) + 1
    page = items[begin : begin + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > begin + limit,
    }


@router.post("/v1/responses/{response_id}/cancel", dependencies=[Depends(_kept)])
async def cancel_response(response_id: str) -> JsonObject:
    """Refuse: only background responses can be cancelled, and they are not served."""
    raise HTTPException(
        400,
        f"the response {response_id} is complete: only background responses, which are not "
        "served, can be cancelled",
    )
