"""A rank's side of the transports: what it holds, and what it does when something fails."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.weights.links import CPU, assert_same, some_tensors
from tests.weights.ranks import Ranks
from turnwise.errors import InputError, WeightUpdateError
from turnwise.weights import disk
from turnwise.weights.ipc import IpcReceiver
from turnwise.weights.manifest import Manifest
from turnwise.weights.outlet import TRANSPORTS, make_outlet
from turnwise.weights.stream import Receiver

LAYERS, WIDTH = 15, 2000
FULL = 4 * LAYERS * WIDTH**2


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_manifest_tells_its_transport_and_every_tensor(transport: str, tmp_path: Path) -> None:
    tensors = some_tensors()
    outlet = make_outlet(transport, tensors, folder=tmp_path)
    manifest = outlet.publish(4, tensors)
    assert (manifest["transport"], manifest["version"]) == (transport, 4)
    told = {entry["name"]: (entry["shape"], entry["dtype"]) for entry in manifest["tensors"]}
    assert told == outlet.state_dict_info()
    assert list(told) == [name for name, _ in tensors]
    outlet.close()


def test_a_transport_that_cannot_be_done_here_is_a_sentence() -> None:
    with pytest.raises(InputError, match="pigeon is none of shm, ipc"):
        make_outlet("pigeon", some_tensors())
    for transport in ("ipc", "collective"):
        with pytest.raises(InputError, match=f"{transport} works between CPUs or GPUs, not mps"):
            make_outlet(transport, some_tensors(), device=torch.device("mps"))
    huge = [("weight", torch.empty(2**50, device="meta"))]
    for transport in ("shm", "ipc"):
        with pytest.raises(InputError, match="/dev/shm has"):
            make_outlet(transport, huge)


def test_a_collective_without_a_group_is_told_after_all_tensors_were_taken() -> None:
    source = iter(some_tensors())
    with pytest.raises(WeightUpdateError, match="join comes first"):
        make_outlet("collective", some_tensors()).send(1, source, ["cpu"])
    assert next(source, None) is None


def test_ipc_serves_all_workers_at_once_and_goes_on_without_one_that_fails() -> None:
    tensors = some_tensors()
    outlet = make_outlet("ipc", tensors, buffer_bytes=4000, timeout=20)
    address = outlet.publish(1, tensors)["path"]
    expected = outlet.state_dict_info()

    def receive(fails: bool) -> list[tuple[str, torch.Tensor]]:
        receiver: Receiver = IpcReceiver(address, expected, CPU, 20)
        received: list[tuple[str, torch.Tensor]] = []
        while receiver.poll() is None:
            pass
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
            asyncio.to_thread(outlet.send, 1, iter(tensors), [socket.gethostname()] * 3),
            return_exceptions=True,
        )

    first, _, third, sent = asyncio.run(work())
    assert_same(first, tensors)
    assert_same(third, tensors)
    assert "its memory is full" in str(sent)
    outlet.close()


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
        assert "stranger came where 7.weight was due" in str(outcomes[0])
        assert outcomes[1] == {}
        await ranks.all("train", 0.1)
        manifest = (await ranks.all("publish"))[0]
        assert [entry["name"] for entry in manifest["tensors"]][7] == "7.weight"
    assert disk.refusal(Manifest.from_dict(manifest)) == ""
    ranks.kill()
