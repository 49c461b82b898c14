"""The verbs of `RestClient`: lists of runs, checkpoints and sessions, and what is done with saved
states by their addresses."""

import asyncio
import secrets
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from turnwise.core.aio import run_in_thread
from turnwise.core.json_types import JsonObject
from turnwise.serving.openai.protection import FILES
from turnwise.tinker import requests
from turnwise.tinker.checkpoints import Checkpoint, expiry
from turnwise.tinker.futures import Missing
from turnwise.tinker.service import TinkerService, parsed
from turnwise.tinker.verbs import Verb

_LINK_SECONDS = 3600


async def list_checkpoints(service: TinkerService, owner: str, tree: JsonObject) -> JsonObject:
    """Return an owner's checkpoints, of all runs or of one, the newest first."""
    kept = service.checkpoints
    found = await run_in_thread(kept.of, owner, tree.get("run", "*"))
    shown, cursor = _page(found, tree)
    described = await run_in_thread(lambda: [kept.describe(each) for each in shown])
    return {"checkpoints": described, "cursor": cursor}


async def list_runs(service: TinkerService, owner: str, tree: JsonObject) -> JsonObject:
    runs, cursor = _page(await _runs(service, owner), tree)
    return {"training_runs": runs, "cursor": cursor}


async def get_run(service: TinkerService, owner: str, tree: JsonObject) -> JsonObject:
    for run in await _runs(service, owner, tree["run"]):
        if run["training_run_id"] == tree["run"]:
            return run
    raise Missing(f"there is no training run {tree['run'][:100]} of yours")


async def _runs(service: TinkerService, owner: str, only: str = "*") -> list[JsonObject]:
    """Return the runs of an owner's models, and those that have checkpoints, the newest first."""
    kept, now = service.checkpoints, expiry(0)
    saved = await run_in_thread(kept.of, owner, only)
    known = {m.id: (m.spec.rank, m.user_metadata, now) for m in reversed(service.owned(owner)[1])}
    for each in saved:
        known.setdefault(each.run, (each.spec["rank"], each.run_metadata, each.created))
    made = list[JsonObject]()
    for run, (rank, metadata, at) in known.items():
        own = {each.kind: each for each in reversed(saved) if each.run == run}
        last = {kind: kept.describe(each) for kind, each in own.items()}
        made.append(
            {
                "training_run_id": run,
                "base_model": next((c.base_model for c in own.values()), service.model_name),
                "model_owner": owner,
                "is_lora": True,
                "lora_rank": rank,
                "last_request_time": at,
                "last_checkpoint": last.get("weights"),
                "last_sampler_checkpoint": last.get("sampler_weights"),
                "user_metadata": metadata,
            }
        )
    return made


async def list_sessions(service: TinkerService, owner: str, tree: JsonObject) -> JsonObject:
    return {"sessions": _page([each.id for each in service.owned(owner)[0]][::-1], tree)[0]}


async def get_session(service: TinkerService, owner: str, tree: JsonObject) -> JsonObject:
    sessions, models, samplers = service.owned(owner)
    for session in (each for each in sessions if each.id == tree["session_id"]):
        return {
            "training_run_ids": [each.id for each in models if each.session is session],
            "sampler_ids": [each.id for each in samplers if each.session is session],
            "user_metadata": session.user_metadata,
            "display_name": session.display_name,
        }
    raise Missing(f"there is no session {tree['session_id'][:100]} of yours, or it has ended")


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
    times = {"created": expiry(0), "expires": expiry(asked.ttl_seconds)}
    copied = replace(source, run=run, owner=owner, public=False, **times)
    await run_in_thread(kept.copy, source, copied)
    return {"tinker_path": copied.address}


async def weights_urls(service: TinkerService, owner: str, tree: JsonObject) -> JsonObject:
    """Return a link to each file of a checkpoint, which needs no key, for an hour."""
    found = await run_in_thread(_own, service, owner, tree)
    urls, loop = dict[str, str](), asyncio.get_running_loop()
    for file in service.checkpoints.files(found):
        secret = secrets.token_urlsafe(24)
        service.links[secret] = file
        loop.call_later(_LINK_SECONDS, service.links.pop, secret)
        urls[file.name] = f"{tree['base_url'].rstrip('/')}{FILES}{secret}"
    return {"urls": urls, "expires": expiry(_LINK_SECONDS)}


def _own(service: TinkerService, owner: str, tree: JsonObject) -> Checkpoint:
    address = f"tinker://{tree['run']}/{tree['kind']}/{tree['name']}"
    return service.checkpoints.find(address, owner, own=True)


def _changing(change: Callable[[JsonObject], JsonObject]) -> Verb:
    async def answer(service: TinkerService, owner: str, tree: JsonObject) -> JsonObject:
        changed = change(tree)

        def update() -> None:
            service.checkpoints.update(replace(_own(service, owner, tree), **changed))

        await run_in_thread(update)
        return {}

    return answer


async def delete(service: TinkerService, owner: str, tree: JsonObject) -> JsonObject:
    await run_in_thread(lambda: service.checkpoints.remove(_own(service, owner, tree)))
    return {}


def _page(items: Sequence[object], tree: JsonObject) -> tuple[list[JsonObject], JsonObject]:
    """Return a part of a list, and its cursor."""
    asked = parsed(requests.Page, tree)
    cursor = {"offset": asked.offset, "limit": asked.limit, "total_count": len(items)}
    return list(items[asked.offset :][: asked.limit]), cursor


_CHECKPOINT = "training_runs/{run}/checkpoints/{kind}/{name}"
REST: Mapping[tuple[str, str], Verb] = {
    ("GET", "checkpoints"): list_checkpoints,
    ("GET", "training_runs"): list_runs,
    ("GET", "training_runs/{run}"): get_run,
    ("GET", "training_runs/{run}/checkpoints"): list_checkpoints,
    ("GET", "sessions"): list_sessions,
    ("GET", "sessions/{session_id}"): get_session,
    ("POST", "weights_info"): weights_info,
    ("POST", "copy_weights"): copy_weights,
    ("GET", f"{_CHECKPOINT}/external_weights_urls"): weights_urls,
    ("DELETE", _CHECKPOINT): delete,
    ("POST", f"{_CHECKPOINT}/publish"): _changing(lambda _: {"public": True}),
    ("DELETE", f"{_CHECKPOINT}/publish"): _changing(lambda _: {"public": False}),
    ("PUT", f"{_CHECKPOINT}/ttl"): _changing(
        lambda tree: {"expires": expiry(parsed(requests.Expiring, tree).ttl_seconds)}
    ),
}
"""Verbs by method and route below /api/v1."""
