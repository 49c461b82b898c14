"""The HTTP routes of the protocol, below /api/v1.

Statuses are those that the SDK acts on: it repeats a request after 408, 409, 429 and 5xx, begins
again after 410, and raises everything else. The result of a request is in its body, errors too.
"""

import hashlib
import json
import time
from base64 import urlsafe_b64encode
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Final

from fastapi import APIRouter, FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, JSONResponse

from turnwise.core.aio import run_in_thread
from turnwise.core.json_types import JsonObject
from turnwise.errors import InputError, TurnwiseError, visible
from turnwise.serving.openai.protection import key_in
from turnwise.tinker.futures import WAIT_SECONDS, Busy, Gone, Missing
from turnwise.tinker.service import TinkerService
from turnwise.tinker.verbs import CONSTANT, USER, VERBS, Verb
from turnwise.tinker.wire import PROTOBUF, read_training_request

ROOT: Final = "/api/v1"
_TOKEN_SECONDS = 10 * 365 * 86_400  # the SDK asks for another one after half of it
_MOST_BYTES = 2**18
"""Largest body, but for samples and passes: its metadata are kept."""


def status_of(error: TurnwiseError) -> int:
    """Return the status of an error that is known at once."""
    known = {Missing: 404, Gone: 410, Busy: 429}
    return known.get(type(error), 400 if isinstance(error, InputError) else 503)


def owner_of(request: Request) -> str:
    """Return the owner of a request: a digest of its key, whether the server checks keys or not."""
    return hashlib.sha256(_key_of(request).encode("utf-8", "replace")).hexdigest()[:32]


def _key_of(request: Request) -> str:
    return key_in(request.headers.get("x-api-key") or request.headers.get("authorization", ""))


def _token(request: Request) -> str:
    """Return a token with the caller's key, which tells the SDK who the caller is (`whoami`)."""
    owner, now = owner_of(request), int(time.time())
    who = {"sub": f"{USER}{owner}", "org_id": owner, "iat": now, "exp": now + _TOKEN_SECONDS}
    parts = (json.dumps({"alg": "none"}), json.dumps(who), _key_of(request))
    return ".".join(urlsafe_b64encode(each.encode()).decode().rstrip("=") for each in parts)


def add_routes(app: FastAPI, service: TinkerService) -> FastAPI:
    """Add the protocol's routes to an application, and return it."""
    router = APIRouter(prefix=ROOT)
    for path, answer in CONSTANT.items():
        router.add_api_route(f"/{path}", _constant(answer), methods=["POST"])
    for (method, path), verb in VERBS.items():
        router.add_api_route(f"/{path}", _answering(service, verb), methods=[method])

    @router.post("/auth/token")
    async def token(request: Request) -> JsonObject:
        return {"jwt": _token(request)}

    @router.get("/files/{link}")
    async def file(link: str) -> Response:
        if (found := service.links.get(link)) is None or not found.is_file():
            return _refused(Missing("there is no such file, or its link has expired"))
        return FileResponse(found)

    @router.post("/forward_backward")
    async def forward_backward(request: Request) -> Response:
        try:
            asked = await run_in_thread(read_training_request, await request.body())
            return JSONResponse(await service.train(owner_of(request), asked))
        except TurnwiseError as error:
            return _refused(error)

    @router.post("/retrieve_future")
    async def retrieve_future(request: Request) -> Response:
        tree = await _values(request)
        name = str(tree.get("request_id", ""))
        try:
            outcome = await service.futures.retrieve(name, owner_of(request), WAIT_SECONDS)
        except TurnwiseError as error:
            return _refused(error)
        if outcome is None:  # the SDK asks again after this status, without a warning to its user
            waiting = {"type": "try_again", "request_id": name, "queue_state": "active"}
            return JSONResponse(waiting, 408)
        if isinstance(outcome, bytes):
            return Response(outcome, media_type=PROTOBUF)
        return JSONResponse(outcome)

    @router.api_route("/{path:path}", methods=["GET", "POST", "PUT", "DELETE", "PATCH"])
    async def unknown(path: str) -> Response:
        return _refused(Missing(f"this server does not answer {ROOT}/{visible(path)[:100]}"))

    app.include_router(router)
    return app


def _constant(tree: JsonObject) -> Callable[[], Coroutine[None, None, JsonObject]]:
    async def answer() -> JsonObject:
        return tree

    return answer


def _answering(
    service: TinkerService, verb: Verb
) -> Callable[[Request], Coroutine[None, None, Response]]:
    async def answer(request: Request) -> Response:
        tree = await _values(request) if request.method in ("POST", "PUT") else {}
        known = {"idempotency_key": request.headers.get("x-idempotency-key", "")}
        known["base_url"] = str(request.base_url)
        try:
            given = {**request.query_params, **tree, **known, **request.path_params}
            return JSONResponse(await verb(service, owner_of(request), given))
        except TurnwiseError as error:
            return _refused(error)

    return answer


async def _values(request: Request) -> JsonObject:
    body, read = await request.body() or b"{}", partial(json.loads, parse_constant=str)
    is_long = len(body) > _MOST_BYTES
    if is_long and not request.url.path.endswith("/asample"):
        raise HTTPException(413, f"the body is larger than {_MOST_BYTES:,} bytes")
    try:  # NaN is read as text: numbers must be finite, and no answer could repeat it
        tree = await run_in_thread(read, body) if is_long else read(body)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"the body is no JSON: {error}") from None
    if not isinstance(tree, dict):
        raise HTTPException(400, "the body must be a JSON object")
    return tree


def _refused(error: TurnwiseError) -> Response:
    return JSONResponse({"detail": visible(str(error))}, status_of(error))
