"""A rank's side of the transports: what it holds, and what it does when something fails."""

import asyncio
import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.weights.carrier import CarrierTransport
from tests.weights.links import CPU, assert_same, some_tensors, state_dict_info
from tests.weights.ranks import Ranks
from tests.weights.trainer import OneRank
from turnwise.config import parse_config
from turnwise.config.schema import stream_mistake
from turnwise.errors import InputError, WeightUpdateError
from turnwise.serving.worker_handle import WorkerHandle
from turnwise.training.trainer_group import TrainerGroup
from turnwise.weights.disk import DiskTransport
from turnwise.weights.ipc import IpcReceiver
from turnwise.weights.manifest import Manifest
from turnwise.weights.sync import Updated, WeightSync, check_canary, check_transport
from turnwise.weights.transport import (
    TRANSPORTS,
    Receiver,
    ReceiverOptions,
    find_transport,
    make_sender,
    refit_sender,
)

LAYERS, WIDTH = 15, 2000
FULL = 4 * LAYERS * WIDTH**2


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_manifest_tells_its_transport_and_every_tensor(transport: str, tmp_path: Path) -> None:
    tensors = some_tensors()
    sender = make_sender(transport, tensors, folder=tmp_path)
    manifest = sender.publish(4, tensors)
    assert (manifest.transport, manifest.version) == (transport, 4)
    told = {entry.name: (entry.shape, entry.dtype) for entry in manifest.tensors}
    assert told == state_dict_info(tensors)
    assert list(told) == [name for name, _ in tensors]
    assert Manifest.from_dict(json.loads(json.dumps(manifest.to_dict()))) == manifest
    sender.close()


def test_a_transport_that_cannot_be_done_here_is_a_sentence() -> None:
    with pytest.raises(InputError, match="pigeon is none of shm, ipc"):
        make_sender("pigeon", some_tensors())
    with pytest.raises(InputError, match="refit_sender sends by ipc or collective, not by shm"):
        refit_sender("shm", some_tensors(), torch.float32)
    for transport in ("ipc", "collective"):
        with pytest.raises(InputError, match=f"{transport} works between CPUs or GPUs, not mps"):
            make_sender(transport, some_tensors(), device=torch.device("mps"))
    huge = [("weight", torch.empty(2**50, device="meta"))]
    for transport in ("shm", "ipc"):
        with pytest.raises(InputError, match="/dev/shm has"):
            make_sender(transport, huge)


def test_a_missing_group_is_reported_after_taking_all_tensors() -> None:
    source = iter(some_tensors())
    with pytest.raises(WeightUpdateError, match="call join first"):
        make_sender("collective", some_tensors()).send(1, source, ["cpu"])
    assert next(source, None) is None


def test_ipc_serves_all_workers_at_once_despite_one_that_fails() -> None:
    tensors = some_tensors()
    sender = make_sender("ipc", tensors, buffer_bytes=4000, timeout=240)
    address = sender.publish(1, tensors).path
    expected = state_dict_info(tensors)

    def receive(fails: bool) -> list[tuple[str, torch.Tensor]]:
        receiver: Receiver = IpcReceiver(address, expected, CPU, 240)
        received: list[tuple[str, torch.Tensor]] = []
        while receiver.poll() is None:
            time.sleep(0.001)
        for tensors in receiver.chunks():
            received += [(name, tensor.clone()) for name, tensor in tensors]
            if fails:
                receiver.end("its memory is full")
                return []
        receiver.end()
        return received

    async def work() -> list[Any]:
        return await asyncio.gather(
            *(asyncio.to_thread(receive, fails) for fails in (False, True, False)),
            asyncio.to_thread(sender.send, 1, iter(tensors), [socket.gethostname()] * 3),
            return_exceptions=True,
        )

    first, _, third, sent = asyncio.run(work())
    assert_same(first, tensors)
    assert_same(third, tensors)
    assert "its memory is full" in str(sent)
    sender.close()


def test_a_transport_is_found_by_name_or_by_class(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, path in TRANSPORTS.items():
        assert type(find_transport(name)) is type(find_transport(path))
    with pytest.raises(InputError, match=r"pigeon is none of shm, ipc, .*, nor package"):
        find_transport("pigeon")
    with pytest.raises(InputError, match=r"weights\.carrier has no Pigeon"):
        find_transport("tests.weights.carrier:Pigeon")
    monkeypatch.setitem(TRANSPORTS, "carrier", "tests.weights.carrier:CarrierTransport")
    assert isinstance(find_transport("carrier"), CarrierTransport)


@pytest.mark.parametrize(
    ("transport", "ranks", "refused"),
    [
        ("turnwise.weights.ipc:IpcTransport", 2, True),
        ("turnwise.weights.ipc:IpcTransport", 1, False),
        ("tests.weights.carrier:CarrierTransport", 2, False),
    ],
)
def test_a_custom_stream_is_refused_where_ranks_host_engines(
    transport: str, ranks: int, refused: bool
) -> None:
    config = parse_config(
        {
            "environment": "none",
            "data": {"path": "none"},
            "model": {"path": "none"},
            "serving": {"workers": ranks},
            "training": {"colocated": True, "ranks": ranks},
            "weights": {"transport": transport},
        }
    )
    mistake = stream_mistake(config)
    if refused:
        with pytest.raises(InputError, match="IpcTransport sends while engines load"):
            check_transport(transport, mistake)
    else:
        check_transport(transport, mistake)


async def test_a_wrong_transport_name_is_an_error_before_ranks_start(
    tmp_path: Path,
) -> None:
    config = parse_config(
        {
            "environment": "none",
            "data": {"path": "none"},
            "model": {"path": "none"},
            "weights": {"transport": "lofts:Pigeon"},
        }
    )
    with pytest.raises(InputError, match=r"weights\.transport: lofts cannot be imported: .*lofts"):
        await TrainerGroup.start(config, tmp_path)


async def test_a_transport_from_outside_brings_weights_to_the_engine(
    ready: WorkerHandle, model_path: str, tmp_path: Path
) -> None:
    trainer = OneRank(model_path, "tests.weights.carrier:CarrierTransport", tmp_path)
    sync = WeightSync(trainer, timeout=240, patience=240)
    for version in (1, 2):
        trainer.train(version)
        assert (await sync.publish()).version == version
        assert (tmp_path / f"{version}.pt").exists()
        assert await sync.update([ready], "keep") == {ready: Updated(version)}
        expected = trainer.model.logprobs(trainer.model.canary, 1)
        await check_canary(ready, trainer.model.canary, expected, 1e-4, version)
    assert await sync.update_one(ready, "keep") == 2
    await sync.publish()
    (tmp_path / "2.pt").unlink()
    with pytest.raises(WeightUpdateError, match=r"refused a weight update: .*2\.pt is missing"):
        await sync.update([ready], "keep")


async def test_no_rank_holds_the_model_and_all_go_on_when_rank_0_fails(
    ray_started: None, tmp_path: Path
) -> None:
    ranks = Ranks((LAYERS, WIDTH), tmp_path)
    for transport in ("shm", "disk"):
        await ranks.all("open", transport, str(tmp_path))
        await ranks.all("publish")  # what torch needs itself is there afterwards
        await ranks.all("train", 0.1)
        leader, follower = await ranks.all("growth", "publish")
        assert follower < FULL / 2
        own = FULL if transport == "shm" else 0  # the buffer itself
        assert leader < own + FULL / 2
        outcomes = await asyncio.gather(
            *(actor.publish.remote("7.weight") for actor in ranks.actors), return_exceptions=True
        )
        assert "got stranger instead of 7.weight" in str(outcomes[0])
        assert outcomes[1].tensors == ()
        await ranks.all("train", 0.1)
        manifest = (await ranks.all("publish"))[0]
        assert [entry.name for entry in manifest.tensors][7] == "7.weight"
    DiskTransport().validate(manifest, ReceiverOptions(CPU, 0))
    ranks.kill()
