"""The server's own routes: index, sessions, stored responses and Prometheus metrics."""

from typing import TYPE_CHECKING, Annotated, Literal

from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field, ValidationError
from starlette.exceptions import HTTPException

from turnwise.chat.session import NAME_PATTERN, Session
from turnwise.core.json_types import JsonObject
from turnwise.core.optional import Foreign
from turnwise.errors import InputError, TurnwiseError
from turnwise.serving.openai.errors import answer_error
from turnwise.serving.openai.metrics import metrics_text
from turnwise.serving.openai.middleware import GENERATING, SESSION_NAME
from turnwise.trajectory import MAX_REWARD

if TYPE_CHECKING:
    from turnwise.serving.openai import OpenAIServer


class _OpeningUnder(BaseModel):
    """The body of POST /sessions/{id}/v1/sessions."""

    id: str | None = Field(default=None, pattern=NAME_PATTERN)
    """Name of the new session, among those under its parent; a random one by default."""


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


def add_routes(app: FastAPI) -> None:
    """Add the routes to vLLM's application, and remove its own middleware and metrics.

    Its `state.server` is the `OpenAIServer`.
    """
    routes = app.router.routes
    routes[:] = [route for route in routes if getattr(route, "path", "") != "/metrics"]
    app.include_router(router)
    app.router.redirect_slashes = False  # a redirect would lose the session in the path
    app.add_exception_handler(HTTPException, answer_error)
    app.add_exception_handler(RequestValidationError, answer_error)
    app.add_exception_handler(ValidationError, answer_error)  # raised after the body was read
    # vLLM's middleware handles scaling, browsers and its own metrics.
    app.user_middleware.clear()
    app.middleware_stack = FastAPI.build_middleware_stack(app)


def _server(request: Request) -> "OpenAIServer":
    server: OpenAIServer = request.app.state.server
    return server


def _opened(request: Request, session_id: str) -> Session:
    store = _server(request).sessions
    session = store.get(session_id)
    if session is None:
        why = store.gone(session_id)
        missing = f"there is no session {session_id}"
        raise HTTPException(404, f"the session {session_id} {why}" if why else missing)
    return session


def _managed(request: Request, session_id: str) -> Session:
    session = _opened(request, session_id)
    if session.private and not session.agent_rewards:
        raise HTTPException(
            403,
            "this session belongs to a rollout: its agent may read, reward or close it only "
            "if rollout.agent_rewards is true",
        )
    return session


def _keeping(request: Request, response_id: str) -> Session:
    """Return the session that keeps a response."""
    name: str | None = request.scope[SESSION_NAME]
    named = None if name is None else _opened(request, name)
    if (session := _server(request).sessions.of_response(named, response_id)) is None:
        raise HTTPException(404, f"there is no response {response_id} in this session")
    return session


@router.get("/")
async def get_index(request: Request) -> JsonObject:
    """Addresses and routes of the server."""
    server = _server(request)
    return {
        "server": "turnwise",
        "model": server.model_name,
        "openai_base_url": server.base_url,
        "anthropic_base_url": server.base_url.removesuffix("/v1"),
        "workers": server.workers(),
        "session_processes": {} if server.processes is None else server.processes.base_urls,
        "routes": [*GENERATING, "/v1/models", "/sessions", "/health", "/metrics", "/docs"],
        "reference": "/docs",
    }


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
async def get_metrics(request: Request) -> Response:
    """Return the metrics in Prometheus' text format."""
    server = _server(request)
    elsewhere = 0 if server.processes is None else server.processes.count
    count = len(server.sessions) + elsewhere
    text = await metrics_text(server.engines, count, server.requests)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/sessions")
async def list_sessions(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=1_000)] = 500,
    after: str | None = None,
) -> JsonObject:
    """List the sessions that clients opened, without their tokens, the oldest first; `next` is
    the `after` of the next page, null on the last."""
    server = _server(request)
    created, _, name = (after or "").partition(":")
    try:
        place = None if after is None else (float(created), name)
    except ValueError:
        raise HTTPException(400, "after must be the next of the page before") from None
    listed = server.sessions.page(place, limit + 1)
    if server.processes is not None:
        listed += await server.processes.list_sessions(place, limit + 1)
    listed.sort(key=lambda each: each[0])
    shown = listed[:limit]
    last = f"{shown[-1][0][0]!r}:{shown[-1][0][1]}" if len(listed) > limit else None
    return {"sessions": [summary for _, summary in shown], "next": last}


@router.post("/sessions", status_code=201)
async def open_session(request: Request, opening: _Opening | None = None) -> JsonObject:
    """Open a session; the response contains its base URLs. The body is optional."""
    server, opening = _server(request), opening or _Opening()
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
    session_id: str, request: Request, opening: _OpeningUnder | None = None
) -> JsonObject:
    """Open a session for a sub-agent, whose turns belong to the same trajectory; the response
    contains its id and base URLs. The body is optional."""
    server, parent = _server(request), _opened(request, session_id)
    try:
        session = server.sessions.open_under(parent, opening.id if opening is not None else None)
    except InputError as error:
        raise HTTPException(409, str(error)) from None
    return {"id": session.id, **server.urls(session.id)}


@router.get("/sessions/{session_id}")
async def get_session(session_id: str, request: Request) -> JsonObject:
    """Return the session's trajectory: every token, log-prob and weight version."""
    session = _managed(request, session_id)
    session.finish()
    return session.describe()


@router.post("/sessions/{session_id}/reward")
async def give_reward(session_id: str, request: Request, reward: _Reward) -> JsonObject:
    """Set the session's reward."""
    _managed(request, session_id).trajectory.reward = reward.reward
    return {"id": session_id, "reward": reward.reward}


@router.delete("/sessions/{session_id}")
async def close_session(session_id: str, request: Request) -> JsonObject:
    """Close the session; the response describes it one last time."""
    session = _managed(request, session_id)
    _server(request).sessions.close(session_id)
    session.finish()
    return session.describe()


@router.get("/v1/responses/{response_id}")
async def get_response(response_id: str, request: Request) -> JsonObject:
    """Return a response that its session keeps."""
    return _keeping(request, response_id).responses[response_id].body


@router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, request: Request) -> JsonObject:
    """Delete a response that its session keeps; those that continue it stay."""
    del _keeping(request, response_id).responses[response_id]
    return {"id": response_id, "object": "response", "deleted": True}


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(
    response_id: str,
    request: Request,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> JsonObject:
    """List the input items of a response, with the conversation that it continues."""
    items: list[JsonObject] = []
    for index, item in enumerate(_keeping(request, response_id).responses[response_id].given):
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


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(response_id: str, request: Request) -> JsonObject:
    """Refused: only background responses, which are not served, can be cancelled."""
    _keeping(request, response_id)
    raise HTTPException(
        400,
        f"the response {response_id} is complete: only background responses, which are not "
        "served, can be cancelled",
    )
