"""The protocol's routes below /api/v1, and the verbs that answer them: those of sessions, models
and samplers are methods of `TinkerService`, those of `RestClient` are here."""

import asyncio
import secrets
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from turnwise.core.aio import run_in_thread
from turnwise.core.json_types import JsonObject
from turnwise.serving.openai.protection import FILES
from turnwise.tinker import requests
from turnwise.tinker.checkpoints import Checkpoint, expiry
from turnwise.tinker.futures import Missing
from turnwise.tinker.service import TinkerService, parsed

USER = "tml:organization_user:"
"""Beginning of the protocol's names of owners."""
_Item = TypeVar("_Item")
_LINK_SECONDS = 3600
CONSTANT: Mapping[str, JsonObject] = {
    "client/config": {
        "pjwt_auth_enabled": True,  # the SDK reads `whoami` from its token
        "parallel_fwdbwd_chunks": False,  # in their order, so that one that must wait fills no gap
        "proto_compress_fwdbwd": False,
        # Its polls could not tell a client which samples a server that was killed has lost.
        "sample_use_retrieve_futures": False,
        "sample_max_concurrent_requests": 400,  # of a client: each holds a connection
        "sample_join_sampling_session": False,
        "custom_loss_server_side": False,  # the SDK computes them from the log-probs
    },
    "client/dynamic_config": {"sample_cancel_enabled": True},
    "telemetry": {"status": "accepted"},  # and dropped
}
"""Answers of routes that are always the same: flags of the SDK, as this server needs them."""


async def list_checkpoints(service: TinkerService, owner: str, tree: JsonObject) -> JsonObject:
    """Return an owner's checkpoints, of all runs or of one, the newest first."""
    kept = service.checkpoints
    found = await run_in_thread(kept.of, owner, tree.get("run", "*"))
    shown, cursor = _page(found, tree)
    described = await run_in_thread(lambda: [kept.describe(each) for each in shown])
    return {"checkpoints": described, "cursor": cursor}


async def list_runs(service: TinkerService, owner: str, tree: JsonObject) -> JsonObject:
    """Return the runs of an owner's models, and those that have checkpoints, the newest first."""
    shown, cursor = _page(await _runs(service, owner), tree)
    described = await run_in_thread(lambda: [_run(service, *each) for each in shown])
    return {"training_runs": described, "cursor": cursor}


async def get_run(service: TinkerService, owner: str, tree: JsonObject) -> JsonObject:
    found = await _runs(service, owner, tree["run"])
    if tree["run"] == "*" or not found:
        raise Missing(f"there is no training run {tree['run'][:100]} of yours")
    return await run_in_thread(_run, service, *found[0])


async def _runs(
    service: TinkerService, owner: str, run: str = "*"
) -> list[tuple[Checkpoint, list[Checkpoint]]]:
    """Return the newest state of each run, of all or of one, and its checkpoints."""
    models = (service.state_of(each) for each in service.models_of(owner))
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
        "model_owner": f"{USER}{state.owner}",
        "is_lora": True,
        "lora_rank": state.spec["rank"],
        "last_request_time": state.created,
        "last_checkpoint": last.get("weights"),
        "last_sampler_checkpoint": last.get("sampler_weights"),
        "user_metadata": state.run_metadata,
    }


async def list_sessions(service: TinkerService, owner: str, tree: JsonObject) -> JsonObject:
    return {"sessions": _page(service.sessions_of(owner), tree)[0]}


async def get_session(service: TinkerService, owner: str, tree: JsonObject) -> JsonObject:
    if tree["session"] not in service.sessions_of(owner):
        raise Missing(f"there is no session {tree['session'][:100]} of yours")
    return service.held_by(tree["session"])


async def weights_info(service: TinkerService, owner: str, tree: JsonObject) -> JsonObject:
    found = await run_in_thread(service.checkpoints.find, str(tree.get("tinker_path")), owner)
    spec = requests.AdapterSpec.model_validate(found.spec)
    trained = {"train_unembed": False, "train_mlp": spec.train_mlp, "train_attn": spec.train_attn}
    return {"base_model": found.base_model, "is_lora": True, "lora_rank": spec.rank} | trained


async def copy_weights(service: TinkerService, owner: str, tree: JsonObject) -> JsonObject:
    """Copy a checkpoint into a run of its own, which stays when the source goes."""
    asked, kept = parsed(requests.CopyWeights, tree), service.checkpoints
    source = await run_in_thread(kept.find, asked.source_path, owner)
    key = f"{owner} {asked.idempotency_key or uuid.uuid4()}"
    run = f"{uuid.uuid5(uuid.NAMESPACE_URL, key)}:train:0"
    expires = expiry(asked.ttl_seconds)
    copied = replace(source, run=run, created=str(expiry(0)), expires=expires)
    await run_in_thread(kept.copy, source, copied)
    return {"tinker_path": copied.address}


async def weights_urls(service: TinkerService, owner: str, tree: JsonObject) -> JsonObject:
    """Return a link to each file of a checkpoint, which needs no key, for an hour."""
    found = await run_in_thread(_own, service, owner, tree)
    urls, loop = dict[str, str](), asyncio.get_running_loop()
    for file in service.checkpoints.folder(found).glob("adapter_*"):
        secret = secrets.token_urlsafe(24)
        service.links[secret] = file
        loop.call_later(_LINK_SECONDS, service.links.pop, secret)
        urls[file.name] = f"{tree['base_url'].rstrip('/')}{FILES}{secret}"
    return {"urls": urls, "expires": expiry(_LINK_SECONDS)}


def _own(service: TinkerService, owner: str, tree: JsonObject) -> Checkpoint:
    address = f"tinker://{tree['run']}/{tree['kind']}/{tree['name']}"
    return service.checkpoints.find(address, owner)


async def set_ttl(service: TinkerService, owner: str, tree: JsonObject) -> JsonObject:
    expires = expiry(parsed(requests.Expiring, tree).ttl_seconds)

    def update() -> None:
        service.checkpoints.update(replace(_own(service, owner, tree), expires=expires))

    await run_in_thread(update)
    return {}


async def delete(service: TinkerService, owner: str, tree: JsonObject) -> JsonObject:
    await run_in_thread(lambda: service.checkpoints.remove(_own(service, owner, tree)))
    return {}


def _page(items: Sequence[_Item], tree: JsonObject) -> tuple[Sequence[_Item], JsonObject]:
    """Return a part of a list, and its cursor."""
    asked = parsed(requests.Page, tree)
    cursor = {"offset": asked.offset, "limit": asked.limit, "total_count": len(items)}
    return items[asked.offset :][: asked.limit], cursor


_CHECKPOINT = "training_runs/{run}/checkpoints/{kind}/{name}"
_external = partial(TinkerService.save_weights, kind="external_weights")
Verb = Callable[[TinkerService, str, JsonObject], Awaitable[JsonObject]]
VERBS: Mapping[tuple[str, str], Verb] = {
    ("POST", "create_session"): TinkerService.create_session,
    ("POST", "session_heartbeat"): TinkerService.heartbeat,
    ("POST", "sessions/{session_id}/finish"): TinkerService.finish,
    ("POST", "create_model"): TinkerService.create_model,
    ("POST", "get_info"): TinkerService.get_info,
    ("POST", "optim_step"): partial(TinkerService.in_turn, work=TinkerService.step),
    ("POST", "save_weights_for_sampler"): partial(
        TinkerService.in_turn, work=TinkerService.save_for_sampler
    ),
    ("POST", "save_weights"): partial(TinkerService.in_turn, work=TinkerService.save_weights),
    ("POST", "save_weights_external"): partial(TinkerService.in_turn, work=_external),
    ("POST", "load_weights"): TinkerService.load_weights,
    ("POST", "create_sampling_session"): TinkerService.create_sampler,
    ("POST", "asample"): TinkerService.sample,
    ("POST", "cancel_future"): TinkerService.cancel,
    ("GET", "get_server_capabilities"): TinkerService.capabilities,
    ("GET", "samplers/{sampler_id}"): TinkerService.get_sampler,
    ("GET", "sessions"): list_sessions,
    ("GET", "sessions/{session}"): get_session,
    ("GET", "checkpoints"): list_checkpoints,
    ("GET", "training_runs"): list_runs,
    ("GET", "training_runs/{run}"): get_run,
    ("GET", "training_runs/{run}/checkpoints"): list_checkpoints,
    ("POST", "weights_info"): weights_info,
    ("POST", "copy_weights"): copy_weights,
    ("GET", f"{_CHECKPOINT}/external_weights_urls"): weights_urls,
    ("DELETE", _CHECKPOINT): delete,
    ("PUT", f"{_CHECKPOINT}/ttl"): set_ttl,
}
"""Verbs by method and route, which get the body's values and those of the path."""
