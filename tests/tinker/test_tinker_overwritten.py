"""Checkpoints that are overwritten, removed or copied twice while somebody reads them: what was
found by its name is what is used. Without engines: see `bench`."""

import asyncio
import json
import shutil
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.tinker.bench import KEY, Client
from tests.tinker.test_tinker_state import IDS, get, save, train
from turnwise.engine.adapters import WEIGHTS
from turnwise.engine.protocol import Chunk, Request
from turnwise.errors import InputError
from turnwise.tinker.checkpoints import Checkpoint, Checkpoints
from turnwise.tinker.service import TinkerService

STATE = Checkpoint("run:train:0", "weights", "state", "me", "model", 1, {"rank": 4})


def saved(kept: Checkpoints, content: bytes, new: Checkpoint = STATE) -> Checkpoint:
    """Save a checkpoint of two files, in the place of an earlier one."""
    begun = kept.begin(new, overwrite=True)
    for name in (WEIGHTS, "optimizer.pt"):
        (begun / name).write_bytes(content)
    kept.commit(new, begun, overwrite=True)
    return new


def versions(kept: Checkpoints) -> int:
    return len(list(kept.root.glob("*/versions/*")))


class SlowEngine:
    """An engine that loads the adapter of a request once it has a slot for it."""

    def __init__(self) -> None:
        self.asked, self.has_slot = asyncio.Event(), asyncio.Event()
        self.loaded = b""

    async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        self.asked.set()
        await self.has_slot.wait()
        self.loaded = (Path(request.route.folder) / WEIGHTS).read_bytes()
        yield Chunk([9], [-0.5], [0], "stop")


@pytest.mark.parametrize("change", ["overwritten", "removed", "saved anew"])
async def test_a_sample_waiting_for_a_slot_gets_the_weights_it_named(
    served: tuple[Client, TinkerService], change: str
) -> None:
    client, service = served
    await client.open()
    path = (await save(client, 1, "latest", "save_weights_for_sampler"))["path"]
    kept = service.checkpoints
    [found] = kept.of(owner_of(service))
    before = (kept.folder(found) / WEIGHTS).read_bytes()
    body = {"session_id": client.session, "sampling_session_seq_id": 0, "model_path": path}
    sampler = (await client.tree("create_sampling_session", body))["sampling_session_id"]
    engine: Any = SlowEngine()
    service._generator = engine
    ask = {
        "sampling_session_id": sampler,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": IDS}]},
        "sampling_params": {"max_tokens": 1},
    }
    waiting = await client.tree("asample", ask | {"seq_id": 0})
    await engine.asked.wait()
    await train(client, 2, 1)
    if change != "overwritten":
        await client.http.delete(
            f"/api/v1/training_runs/{client.model}/checkpoints/sampler_weights/latest", headers=KEY
        )
    if change != "removed":
        await save(client, 4, "latest", "save_weights_for_sampler", overwrite=True)
        [newer] = kept.of(owner_of(service))
        assert (kept.folder(newer) / WEIGHTS).read_bytes() != before
        assert versions(kept) == 2
    engine.has_slot.set()
    assert isinstance(await client.result(waiting), bytes)
    assert engine.loaded == before
    said = (await client.result(await client.tree("asample", ask | {"seq_id": 1})))["error"]
    assert "there is no checkpoint" in said if change == "removed" else "was overwritten" in said
    assert versions(kept) == (change != "removed"), "the one that was read is gone"


def owner_of(service: TinkerService) -> str:
    return next(iter(service._sessions.values())).owner


async def test_a_state_that_waits_for_the_trainer_is_loaded_as_it_was(
    served: tuple[Client, TinkerService], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, service = served
    await client.open()
    path = (await save(client, 1, "state"))["path"]
    found = service.checkpoints.find(path, owner_of(service))
    before = (service.checkpoints.folder(found) / WEIGHTS).read_bytes()
    read, loaded = client.rank._adapters.read, list[bytes]()

    def note(name: str, folder: Path, optimizer: bool) -> None:
        loaded.append((folder / WEIGHTS).read_bytes())
        read(name, folder, optimizer)

    monkeypatch.setattr(client.rank._adapters, "read", note)
    over = asyncio.Event()
    another = asyncio.create_task(service._trainer.queue.call("another", 1, over.wait()))
    body = {"session_id": client.session, "model_seq_id": 1, "path": path, "optimizer": True}
    promise = await client.tree("load_weights", body)
    while not service.checkpoints._readers:
        await asyncio.sleep(0.01)
    saved(service.checkpoints, b"newer", replace(found, created="later"))
    over.set()
    await another
    assert (await client.result(promise))["path"] == path
    assert loaded == [before]


async def test_a_link_to_a_file_of_a_checkpoint_ends_with_it(
    served: tuple[Client, TinkerService],
) -> None:
    client, _ = served
    await client.open()
    await save(client, 1, "out", "save_weights_external")
    place = f"training_runs/{client.model}/checkpoints/external_weights/out"
    urls = (await get(client, f"{place}/external_weights_urls"))["urls"]
    await save(client, 2, "out", "save_weights_external", overwrite=True)
    answers = [await client.http.get(url) for url in urls.values()]
    assert [each.status_code for each in answers] == [400, 400]
    assert "was overwritten" in answers[0].text


def test_a_copy_has_the_files_of_one_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Checkpoints(tmp_path)
    old = saved(kept, b"old")
    copyfile, copied = shutil.copytree, replace(STATE, run="copy:train:0")

    def overwriting(source: Path, *arguments: Any, **keywords: Any) -> Any:
        saved(kept, b"new", replace(STATE, created="later"))
        return copyfile(source, *arguments, **keywords)

    monkeypatch.setattr(shutil, "copytree", overwriting)
    kept.copy(old, copied)
    folder = kept.folder(kept.find(copied.address, "me"))
    files = [folder / name for name in (WEIGHTS, "optimizer.pt")]
    assert [file.read_bytes() for file in files] == [b"old", b"old"]
    with pytest.raises(InputError, match="was overwritten"):
        kept.copy(old, replace(STATE, run="other:train:0"))
    assert not list(tmp_path.glob("other:train:0/*/*"))
    assert versions(kept) == 2, "the source's newer one, and the copy"


def test_several_copies_to_one_place_all_succeed_and_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Checkpoints(tmp_path)
    source, copied = saved(kept, b"whole"), replace(STATE, run="copy:train:0")
    copytree, all_begun = shutil.copytree, threading.Barrier(4, timeout=60)

    def together(*arguments: Any, **keywords: Any) -> Any:
        all_begun.wait()
        return copytree(*arguments, **keywords)

    monkeypatch.setattr(shutil, "copytree", together)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: kept.copy(source, copied), range(4)))
    found = kept.find(copied.address, "me")
    assert found == copied
    names = {file.name for file in kept.folder(found).iterdir()}
    assert names == {WEIGHTS, "optimizer.pt", "meta.json"}
    assert (kept.folder(found) / WEIGHTS).read_bytes() == b"whole"
    assert versions(kept) == 2


def test_a_name_taken_during_a_checkpoint_write_stays_taken(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path)
    first, second = kept.begin(STATE), kept.begin(STATE)
    assert first != second
    kept.commit(STATE, first)
    with pytest.raises(InputError, match="exists already"):
        kept.commit(replace(STATE, version=2), second)
    assert kept.find(STATE.address, "me").version == 1


async def test_a_download_serves_its_links_file_after_an_overwrite(
    served: tuple[Client, TinkerService],
) -> None:
    client, service = served
    await client.open()
    await save(client, 1, "out", "save_weights_external")
    [found], kept = service.checkpoints.of(owner_of(service)), service.checkpoints
    before = (kept.folder(found) / WEIGHTS).read_bytes()
    place = f"training_runs/{client.model}/checkpoints/external_weights/out"
    url = (await get(client, f"{place}/external_weights_urls"))["urls"][WEIGHTS]
    app: Any = client.http._transport
    answered = app.app

    async def overwriting(scope: Any, receive: Any, send: Any) -> None:
        async def begun(message: Any) -> None:
            if message["type"] == "http.response.start":
                saved(kept, b"other", replace(found, created="later"))
            await send(message)

        await answered(scope, receive, begun)

    app.app = overwriting
    assert (await client.http.get(url)).content == before
    assert versions(kept) == 1
    app.app = answered
    assert (await client.http.get(url)).status_code == 400  # its own has gone


def test_a_version_stays_until_its_last_reader_has_gone(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path)
    old = saved(kept, b"old")
    first, second = kept.hold(old), kept.hold(old)
    assert first == second
    kept.remove(old)
    kept.release(first)
    assert (first / WEIGHTS).read_bytes() == b"old"
    kept.release(second)
    assert not list(tmp_path.iterdir())
    left = saved(kept, b"read by a server that was killed")
    kept.hold(left)
    kept.remove(left)
    begun = kept.begin(STATE)
    Checkpoints(tmp_path).tidy(())
    assert versions(kept) == 0, "no name has them"
    assert not begun.exists()


def test_a_named_version_outlives_its_readers(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path)
    old = saved(kept, b"old")
    for _ in range(2):
        with kept._holding(old) as held:
            assert (held / WEIGHTS).read_bytes() == b"old"
    assert not kept._readers
    assert (kept.folder(old) / WEIGHTS).exists()


def test_states_of_earlier_servers_are_found(tmp_path: Path) -> None:
    """Their names are folders, with `meta.json`."""
    place = tmp_path / STATE.run / STATE.kind / STATE.name
    place.mkdir(parents=True)
    (place / WEIGHTS).write_bytes(b"earlier")
    (place / "meta.json").write_text(json.dumps(asdict(STATE)))
    kept = Checkpoints(tmp_path)
    kept.tidy(())
    found = kept.find(STATE.address, "me")
    assert found == STATE
    with kept._holding(found) as held:
        saved(kept, b"newer")
        assert (held / WEIGHTS).read_bytes() == b"earlier"
    assert (kept.folder(found) / WEIGHTS).read_bytes() == b"newer"
    assert versions(kept) == 1
