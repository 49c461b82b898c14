"""From a trainer of two ranks, each with its shards of the model, to the real engine."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.weights.links import free_port
from tests.weights.ranks import Ranks
from tests.weights.trainer import PROMPT, Model
from turnwise.config import SamplingConfig
from turnwise.errors import DeadlineError, WeightUpdateError
from turnwise.serving.remote_worker import RemoteWorker
from turnwise.weights.canary import check_canary
from turnwise.weights.collective import CollectiveSender
from turnwise.weights.delivery import Delivery
from turnwise.weights.ipc import IpcSender
from turnwise.weights.outlet import make_outlet
from turnwise.weights.shm import ShmSender


@pytest.fixture
async def ready(engine: RemoteWorker, model_path: str) -> AsyncIterator[RemoteWorker]:
    """The engine; afterwards with its original weights."""
    yield engine
    model = Model(model_path)
    await engine.prepare_refit_info({n: (tuple(t.shape), "float32") for n, t in model.tensors})
    sender = ShmSender(model.tensors)
    await engine.update_weights(sender.write(0, model.tensors).to_dict())
    sender.close()


@pytest.fixture(scope="module")
async def ranks(
    ray_started: None, model_path: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Ranks]:
    ranks = Ranks(model_path, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.kill()


async def assert_serves(engine: RemoteWorker, ranks: Ranks, version: int) -> None:
    """The weights of the ranks, under this version."""
    (prompt, expected), _ = await ranks.all("canary")
    await check_canary(engine, prompt, expected, 1e-4, version)
    completion = await engine.generate(PROMPT, SamplingConfig(max_tokens=4), f"v{version}")
    assert set(completion.weight_versions) == {version}


@pytest.mark.parametrize("transport", ["shm", "ipc", "collective", "disk"])
async def test_shards_of_two_ranks_become_the_engines_weights(
    ready: RemoteWorker, ranks: Ranks, tmp_path: Path, transport: str
) -> None:
    await ranks.all("open", transport, str(tmp_path))
    delivery = Delivery(ranks, timeout=60, patience=60)
    for _ in range(2):
        await ranks.all("train", 0.05)
        version = (await delivery.publish())["version"]
        assert await delivery.check([ready]) == [None]
        assert await delivery.deliver([ready], "keep") == [version]
        await assert_serves(ready, ranks, version)
    await ranks.all("train", 0.05)  # what must be sent anew is the trainer's newest
    served = await delivery.catch_up(ready, "keep")
    assert served == version + (transport in ("ipc", "collective"))
    if served > version:
        await assert_serves(ready, ranks, served)
    await ready.prepare_refit_info({"weight": ((2, 2), "float32")})
    await delivery.publish()
    (refused,) = await delivery.check([ready])
    with pytest.raises(WeightUpdateError, match=r"worker-0: refused .* was not expected"):
        raise refused or AssertionError("it fits")
    completion = await ready.generate(PROMPT, SamplingConfig(max_tokens=4), "after")
    assert set(completion.weight_versions) == {served}


class Silent:
    """A trainer that publishes, and never answers again."""

    def __init__(self, manifest: dict[str, Any]) -> None:
        self._manifest = manifest

    async def publish(self) -> dict[str, Any]:
        return self._manifest

    async def send(self, devices: Any) -> None:
        await self.rendezvous()

    async def rendezvous(self) -> tuple[str, int]:
        await asyncio.sleep(60)
        raise AssertionError

    async def join(self, ip: str, port: int, engine_workers: int, timeout: float) -> None:
        await self.rendezvous()


@pytest.mark.parametrize(
    ("transport", "who"),
    [
        ("collective", "the trainer did not tell where to meet within 1 s"),
        ("ipc", "worker-0: the trainer at "),
    ],
)
async def test_a_trainer_that_does_not_answer_is_named_in_time(
    ready: RemoteWorker, model_path: str, tmp_path: Path, transport: str, who: str
) -> None:
    tensors = Model(model_path).tensors
    outlet = make_outlet(transport, tensors)
    delivery = Delivery(Silent(outlet.publish(1, tensors)), timeout=1, patience=1)
    await delivery.publish()
    assert await delivery.check([ready]) == [None]
    (outcome,) = await delivery.deliver([ready], "keep")
    assert isinstance(outcome, DeadlineError)
    assert str(outcome).startswith(who)
    completion = await ready.generate(PROMPT, SamplingConfig(max_tokens=4), "after")
    assert set(completion.weight_versions) == {0}
    outlet.close()


@pytest.mark.parametrize("transport", ["ipc", "collective"])
async def test_refit_by_the_actors_methods_alone(
    ready: RemoteWorker, model_path: str, transport: str
) -> None:
    """B14, B23 to B25: the calls of a trainer that knows the worker's names only."""
    actor, model = ready.actor, Model(model_path)
    info = {name: (tensor.shape, tensor.dtype) for name, tensor in model.tensors}
    await actor.prepare_refit_info_async.remote(info)
    if transport == "ipc":
        sender: IpcSender | CollectiveSender = IpcSender(model.tensors)
        update = actor.update_weights_via_ipc_zmq_async
    else:
        port = free_port()
        making = asyncio.to_thread(
            CollectiveSender, model.tensors, ip="127.0.0.1", port=port, world_size=2
        )
        joining = actor.init_collective_async.remote(0, "127.0.0.1", port, 2, 1)
        sender, _ = await asyncio.gather(making, joining)
        update = actor.update_weights_from_collective_async
    for version in (1, 2):
        model.perturb(0.05)
        loading = update.remote()
        await asyncio.to_thread(sender.send, version, model.tensors)
        assert await loading is True
        data = {"input_ids": torch.tensor([PROMPT]), "input_lengths": torch.tensor([len(PROMPT)])}
        ((_, output),) = [await reply async for reply in actor.generate_async.remote(data)]
        end = int(output["unpadded_sequence_lengths"])
        ids, start = output["output_ids"][0, :end].tolist(), len(PROMPT)
        assert output["logprobs"][0, start:end].tolist() == pytest.approx(
            model.logprobs(ids, start), abs=1e-4
        )
        assert set(output["weight_versions"][0, start:end].tolist()) == {version}
    sender.close()
