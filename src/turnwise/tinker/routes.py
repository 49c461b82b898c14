"""The HTTP routes of the protocol, below /api/v1, and the verbs of `RestClient`. The verbs for
sessions, models and samplers are methods of `TinkerService`.

The statuses follow the SDK's behaviour: it repeats a request after 408, 409, 429 and 5xx, starts
over after 410, and raises all other errors. If a request fails while it runs, the body of its
result is the error.
"""

import hashlib
import hmac
import json
import secrets
import time
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, JSONResponse
from starlette.types import Receive, Scope, Send

from turnwise.core.aio import run_in_thread
from turnwise.core.json_types import JsonObject
from turnwise.core.optional import Foreign
from turnwise.errors import InputError, TurnwiseError, visible
from turnwise.serving.openai.bodies import decoded, is_protobuf
from turnwise.tinker import requests
from turnwise.tinker.access import FILES, key_in
from turnwise.tinker.checkpoints import Checkpoint, expiry
from turnwise.tinker.futures import Busy, Gone, Missing
from turnwise.tinker.requests import CreateSamplingSession, Named, OfSession, Page, parsed
from turnwise.tinker.service import TinkerService
from turnwise.tinker.wire import PROTOBUF, read_training_request

_USER = "tml:organization_user:"  # beginning of the protocol's names of owners
_Item = TypeVar("_Item")
_LINK_SECONDS = 3600
_LINKS = secrets.token_bytes(32)  # the secret of this server's links
CONSTANT: Mapping[str, JsonObject] = {
    "client/config": {
        "pjwt_auth_enabled": True,  # the SDK reads `whoami` from its token
        "parallel_fwdbwd_chunks": False,  # sent in order, a chunk that must wait leaves no gap
        "sample_max_concurrent_requests": 400,  # per client: each holds a connection
    },
    "client/dynamic_config": {"sample_cancel_enabled": True},
    "telemetry": {"status": "accepted"},  # the data are dropped
}
"""Answers that are always the same, such as the SDK's flags as this server needs them."""
ROOT: Final = "/api/v1"
_TOKEN_SECONDS = 10 * 365 * 86_400  # the SDK renews its token after half of this time
_MAX_BYTES = 2**18
"""Maximum size in bytes of the body of a request, except for sampling and forward-backward passes;
it is small because the server keeps the metadata of such a request."""


def status_of(error: TurnwiseError) -> int:
    """Return the HTTP status of an error that a route itself raises."""
    known = {Missing: 404, Gone: 410, Busy: 429}
    return known.get(type(error), 400 if isinstance(error, InputError) else 503)


def owner_of(request: Request) -> str:
    """Return the owner of a request: a digest of its key, whether or not the server checks keys."""
    return hashlib.sha256(_key_of(request).encode("utf-8", "replace")).hexdigest()[:32]


def _key_of(request: Request) -> str:
    return key_in(request.headers.get("x-api-key") or request.headers.get("authorization", ""))


def _token(request: Request) -> str:
    """Return a token with the caller's key, which tells the SDK who the caller is (`whoami`)."""
    owner, now = owner_of(request), int(time.time())
    who = {"sub": f"{_USER}{owner}", "org_id": owner, "iat": now, "exp": now + _TOKEN_SECONDS}
    claims = urlsafe_b64encode(json.dumps(who).encode()).decode().rstrip("=")
    return f"eyJhbGciOiJub25lIn0.{claims}.{_key_of(request)}"  # begins with {"alg":"none"}


async def list_checkpoints(service: TinkerService, owner: str, asked: Page) -> JsonObject:
    """Return an owner's checkpoints, of all runs or of one run, the newest first."""
    kept = service.checkpoints
    shown, cursor = _part(await run_in_thread(kept.of, owner, asked.run), asked)
    described = await run_in_thread(lambda: [kept.describe(each) for each in shown])
    return {"checkpoints": described, "cursor": cursor}


async def list_runs(service: TinkerService, owner: str, asked: Page) -> JsonObject:
    """Return an owner's runs that have a model or a checkpoint, the newest first."""
    shown, cursor = _part(await _runs(service, owner), asked)
    described = await run_in_thread(lambda: [_run(service, *each) for each in shown])
    return {"training_runs": described, "cursor": cursor}


async def get_run(service: TinkerService, owner: str, asked: Page) -> JsonObject:
    found = await _runs(service, owner, asked.run)
    if asked.run == "*" or not found:
        raise Missing(f"there is no training run {asked.run[:100]} of yours")
    return await run_in_thread(_run, service, *found[0])


async def _runs(
    service: TinkerService, owner: str, run: str = "*"
) -> list[tuple[Checkpoint, list[Checkpoint]]]:
    """Return the newest state and the checkpoints of each run, for all runs or for one."""
    sessions = service.sessions_of(owner)
    models = (each.state for own in sessions for each in reversed(own.models.values()))
    found = {each.run: (each, list[Checkpoint]()) for each in models if run in ("*", each.run)}
    for saved in await run_in_thread(service.checkpoints.of, owner, run):
        found.setdefault(saved.run, (saved, []))[1].append(saved)
    return list(found.values())


def _run(service: TinkerService, state: Checkpoint, saved: Sequence[Checkpoint]) -> JsonObject:
    newest = {each.kind: each for each in reversed(saved)}
    last = {kind: service.checkpoints.describe(each) for kind, each in newest.items()}
    return {
        "training_run_id": state.run,
        "base_model": state.base_model,
        "model_owner": f"{_USER}{state.owner}",
        "is_lora": True,
        "lora_rank": state.spec["rank"],
        "last_request_time": state.created,
        "last_checkpoint": last.get("weights"),
        "last_sampler_checkpoint": last.get("sampler_weights"),
        "user_metadata": state.run_metadata,
    }


async def list_sessions(service: TinkerService, owner: str, asked: Page) -> JsonObject:
    return {"sessions": _part([each.id for each in service.sessions_of(owner)], asked)[0]}


def _part(items: Sequence[_Item], asked: Page) -> tuple[Sequence[_Item], JsonObject]:
    """Return the requested page of a list, and the page's cursor."""
    cursor = {"offset": asked.offset, "limit": asked.limit, "total_count": len(items)}
    return items[asked.offset :][: asked.limit], cursor


async def weights_info(service: TinkerService, owner: str, asked: Named) -> JsonObject:
    found = await run_in_thread(service.checkpoints.find, asked.tinker_path, owner)
    spec = requests.LoraSpec.model_validate(found.spec)
    trained = {"train_unembed": False, "train_mlp": spec.train_mlp, "train_attn": spec.train_attn}
    return {"base_model": found.base_model, "is_lora": True, "lora_rank": spec.rank} | trained


async def copy_weights(
    service: TinkerService, owner: str, asked: requests.CopyWeights
) -> JsonObject:
    """Copy a checkpoint into a new run, so that the copy outlives its source."""
    kept = service.checkpoints
    source = await run_in_thread(kept.find, asked.source_path, owner)
    key = f"{owner} {asked.idempotency_key or uuid.uuid4()}"
    run = f"{uuid.uuid5(uuid.NAMESPACE_URL, key)}:train:0"
    expires = expiry(asked.ttl_seconds)
    copied = replace(source, run=run, created=str(expiry(0)), expires=expires)
    await run_in_thread(kept.copy, source, copied)
    return {"tinker_path": copied.address}


async def weights_urls(service: TinkerService, owner: str, asked: Named) -> JsonObject:
    """Return a link to each file of a checkpoint; a link needs no key, and expires in an hour."""
    found = await run_in_thread(service.checkpoints.find, asked.tinker_path, owner)
    urls, now = dict[str, str](), time.monotonic()
    for secret in [each for each, (*_, ends) in service.links.items() if ends < now]:
        del service.links[secret]
    for file in service.checkpoints.folder(found).glob("adapter_*"):
        # A file always has the same secret, so that repeated requests add no links.
        secret = hmac.new(_LINKS, f"{file} {found.created}".encode(), "sha256").hexdigest()
        service.links[secret] = found, file.name, now + _LINK_SECONDS
        urls[file.name] = f"{asked.base_url.rstrip('/')}{FILES}{secret}"
    return {"urls": urls, "expires": expiry(_LINK_SECONDS)}


async def set_ttl(service: TinkerService, owner: str, asked: Named) -> JsonObject:
    found = await run_in_thread(service.checkpoints.find, asked.tinker_path, owner)
    changed = replace(found, expires=expiry(asked.ttl_seconds))
    await run_in_thread(service.checkpoints.update, changed)
    return {}


async def delete(service: TinkerService, owner: str, asked: Named) -> JsonObject:
    found = await run_in_thread(service.checkpoints.find, asked.tinker_path, owner)
    await run_in_thread(service.checkpoints.remove, found)
    return {}


_CHECKPOINT = "training_runs/{run}/checkpoints/{kind}/{name}"
Verb = Callable[[TinkerService, str, Foreign], Awaitable[JsonObject]]


def _in_turn(kind: type[requests.BaseRequest], work: Foreign) -> tuple[None, Verb]:
    return None, partial(TinkerService.in_turn, kind=kind, work=work)


async def load_weights(service: TinkerService, owner: str, tree: JsonObject) -> JsonObject:
    """Load a saved state into a model, or make a new model from it."""
    if tree.get("model_id") is None:
        return await service.new_model(owner, tree, requests.LoadWeights, TinkerService.create_from)
    return await service.in_turn(owner, tree, requests.LoadWeights, TinkerService.load)


_external = partial(TinkerService.save_weights, kind="external_weights")
_create = partial(TinkerService.new_model, kind=requests.CreateModel, work=TinkerService.create)
VERBS: Mapping[str, tuple[type[requests.BaseRequest] | None, Verb]] = {
    "POST create_session": (None, TinkerService.create_session),
    "POST session_heartbeat": (OfSession, TinkerService.heartbeat),
    "POST sessions/{session_id}/finish": (OfSession, TinkerService.finish),
    "POST create_model": (None, _create),
    "POST get_info": (requests.GetInfo, TinkerService.get_info),
    "POST optim_step": _in_turn(requests.OptimStep, TinkerService.step),
    "POST save_weights_for_sampler": _in_turn(
        requests.SaveForSampler, TinkerService.save_for_sampler
    ),
    "POST save_weights": _in_turn(requests.SaveWeights, TinkerService.save_weights),
    "POST save_weights_external": _in_turn(requests.SaveWeights, _external),
    "POST load_weights": (None, load_weights),
    "POST create_sampling_session": (CreateSamplingSession, TinkerService.create_sampler),
    "POST asample": (requests.SampleRequest, TinkerService.sample),
    "POST cancel_future": (Named, TinkerService.cancel),
    "GET get_server_capabilities": (None, TinkerService.capabilities),
    "GET samplers/{sampler_id}": (Named, TinkerService.get_sampler),
    "GET sessions": (Page, list_sessions),
    "GET sessions/{session_id}": (OfSession, TinkerService.get_session),
    "GET checkpoints": (Page, list_checkpoints),
    "GET training_runs": (Page, list_runs),
    "GET training_runs/{run}": (Page, get_run),
    "GET training_runs/{run}/checkpoints": (Page, list_checkpoints),
    "POST weights_info": (Named, weights_info),
    "POST copy_weights": (requests.CopyWeights, copy_weights),
    f"GET {_CHECKPOINT}/external_weights_urls": (Named, weights_urls),
    f"DELETE {_CHECKPOINT}": (Named, delete),
    f"PUT {_CHECKPOINT}/ttl": (Named, set_ttl),
}
"""Request class and verb by method and route; if the class is None, the verb gets plain values."""


class _Held(FileResponse):
    """A response that sends a checkpoint's file, and then releases the checkpoint."""

    def __init__(self, path: Path, release: Callable[[], None]) -> None:
        super().__init__(path)
        self._release = release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await run_in_thread(self._release)


class _Route(APIRoute):
    """Answers an error that the route itself raises with the error's HTTP status."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[None, None, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except TurnwiseError as error:
                return JSONResponse({"detail": visible(str(error))}, status_of(error))

        return answer


def add_routes(app: FastAPI, service: TinkerService) -> FastAPI:
    """Add the protocol's routes to an application, and return it."""
    router = APIRouter(prefix=ROOT, route_class=_Route)
    for route, (kind, verb) in VERBS.items():
        answer, (method, path) = partial(_answer, service, kind, verb), route.split()
        router.add_api_route(f"/{path}", answer, methods=[method])

    @router.post("/auth/token")
    async def token(request: Request) -> JsonObject:
        return {"jwt": _token(request)}

    @router.get("/files/{link}")
    async def file(link: str) -> Response:
        saved, name, ends = service.links.get(link, (None, "", 0.0))
        if saved is None or ends < time.monotonic():
            raise Missing("there is no such file, or its link has expired")
        held = await run_in_thread(service.checkpoints.hold, saved)
        return _Held(held / name, partial(service.checkpoints.release, held))

    @router.post("/forward_backward")
    async def forward_backward(request: Request) -> Response:
        body = await request.body()
        asked = await run_in_thread(read_training_request, body, service.join_chunks)
        return JSONResponse(await service.train(owner_of(request), asked))

    @router.post("/retrieve_future")
    async def retrieve_future(request: Request) -> Response:
        name = parsed(Named, await _values(request)).request_id
        found = await service.retrieve(owner_of(request), name)
        if found is None:  # the SDK asks again after this status, without a warning to its user
            waiting = {"type": "try_again", "request_id": name, "queue_state": "active"}
            return JSONResponse(waiting, 408)
        if isinstance(found, bytes):
            return Response(found, media_type=PROTOBUF)
        return JSONResponse(found)

    @router.api_route("/{path:path}", methods=["GET", "POST", "PUT", "DELETE", "PATCH"])
    async def other(path: str) -> JsonObject:
        if path not in CONSTANT:
            raise Missing(f"this server does not answer {ROOT}/{visible(path)[:100]}")
        return CONSTANT[path]

    app.include_router(router)
    return app


async def _answer(
    service: TinkerService, kind: type[requests.BaseRequest] | None, verb: Verb, request: Request
) -> Response:
    tree = await _values(request) if request.method in ("POST", "PUT") else {}
    known = {"idempotency_key": request.headers.get("x-idempotency-key", "")}
    known["base_url"] = str(request.base_url)
    if "name" in request.path_params:
        known["tinker_path"] = "tinker://{run}/{kind}/{name}".format(**request.path_params)
    given = {**request.query_params, **tree, **known, **request.path_params}
    asked = given if kind is None else parsed(kind, given)
    return JSONResponse(await verb(service, owner_of(request), asked))


async def _values(request: Request) -> JsonObject:
    body = await request.body() or b"{}"
    if len(body) > _MAX_BYTES and not request.url.path.endswith("/asample"):
        raise HTTPException(413, f"the body is larger than {_MAX_BYTES:,} bytes")
    if is_protobuf(request.scope, request.headers):
        raise HTTPException(415, "the content is protobuf: send JSON, as application/json")
    try:  # NaN is read as text: numbers must be finite, and a JSON answer cannot contain NaN
        tree = decoded(body, constant=str).value
    except ValueError as error:
        raise InputError(f"the body is no JSON: {error}") from None
    if not isinstance(tree, dict):
        raise InputError("the body must be a JSON object")
    return tree | {"body_bytes": len(body)}
