"""From a trainer of two ranks, each with its shards of the model, to the real engine."""

import asyncio
import importlib
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pages import run_program, write_files
from tests.weights.links import free_port
from tests.weights.ranks import Ranks
from tests.weights.trainer import PROMPT, Model, open_collective
from turnwise.config import SamplingConfig
from turnwise.engine import Request, generate
from turnwise.errors import DeadlineError, WeightUpdateError
from turnwise.serving.worker_handle import WorkerHandle
from turnwise.weights.collective import CollectiveSender
from turnwise.weights.ipc import IpcSender
from turnwise.weights.manifest import Manifest
from turnwise.weights.sync import Updated, WeightSync, check_canary
from turnwise.weights.transport import SenderOptions, make_sender


@pytest.fixture(scope="module")
async def ranks(
    ray_started: None, model_path: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Ranks]:
    ranks = Ranks(model_path, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.kill()


async def assert_serves(engine: WorkerHandle, ranks: Ranks, version: int) -> None:
    """The weights of the ranks, under this version."""
    (prompt, expected), _ = await ranks.all("canary")
    await check_canary(engine, prompt, expected, 1e-4, version)
    completion = await generate(
        engine, Request(PROMPT, SamplingConfig(max_tokens=4), f"v{version}")
    )
    assert set(completion.weight_versions) == {version}


@pytest.mark.parametrize("transport", ["shm", "ipc", "collective", "disk"])
async def test_shards_of_two_ranks_become_the_engines_weights(
    ready: WorkerHandle, ranks: Ranks, tmp_path: Path, transport: str
) -> None:
    await ranks.all("open", transport, str(tmp_path))
    lent = []

    async def lend() -> None:
        lent.append(True)

    sync = WeightSync(ranks, timeout=240, patience=240, published_again=lend)
    for _ in range(2):
        await ranks.all("train", 0.05)
        version = (await sync.publish()).version
        assert await sync.update([ready], "keep") == {ready: Updated(version)}
        await assert_serves(ready, ranks, version)
    await ranks.all("train", 0.05)  # what must be sent anew is the trainer's newest
    served = await sync.update_one(ready, "keep")
    assert served == version + (transport in ("ipc", "collective"))
    assert len(lent) == served - version  # what it brought back for this may go again
    if served > version:
        await assert_serves(ready, ranks, served)
    await ready._call("prepare_refit_info", {"weight": ((2, 2), "float32")})
    await sync.publish()
    with pytest.raises(WeightUpdateError, match=r"worker-0: refused .* was not expected"):
        await sync.update([ready], "keep")
    completion = await generate(ready, Request(PROMPT, SamplingConfig(max_tokens=4), "after"))
    assert set(completion.weight_versions) == {served}


class Silent:
    """A trainer that publishes, and never answers again."""

    def __init__(self, published: Manifest) -> None:
        self._published = published

    async def publish(self) -> Manifest:
        return self._published

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
        ("collective", "the trainer did not open a rendezvous address within 1 s"),
        ("ipc", "worker-0: the trainer at "),
    ],
)
async def test_a_trainer_that_does_not_answer_is_named_in_time(
    ready: WorkerHandle, model_path: str, tmp_path: Path, transport: str, who: str
) -> None:
    tensors = Model(model_path).tensors
    sender = make_sender(transport, tensors)
    sync = WeightSync(Silent(sender.publish(1, tensors)), timeout=240, patience=1)
    published = await sync.publish()
    fit, _ = await sync._check([ready], published, 240)
    outcome = (await sync._push(published, fit, "keep", 1))[ready]
    assert isinstance(outcome, DeadlineError)
    assert str(outcome).startswith(who)
    completion = await generate(ready, Request(PROMPT, SamplingConfig(max_tokens=4), "after"))
    assert set(completion.weight_versions) == {0}
    sender.close()


@pytest.mark.parametrize("transport", ["ipc", "collective"])
async def test_refit_by_the_actors_methods_alone(
    ready: WorkerHandle, model_path: str, transport: str
) -> None:
    """The calls of a trainer that knows the worker's names only."""
    actor, model = ready.actor, Model(model_path)
    info = {name: (tensor.shape, tensor.dtype) for name, tensor in model.tensors}
    await actor.prepare_refit_info_async.remote(info)
    if transport == "ipc":
        sender: IpcSender | CollectiveSender = IpcSender(SenderOptions(model.tensors))
        update = actor.update_weights_via_ipc_zmq_async
    else:
        port = free_port()
        making = asyncio.to_thread(open_collective, model.tensors, "127.0.0.1", port)
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


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module `my_trainer` of docs/how-to/your-trainer.md."""
    write_files("docs/how-to/your-trainer.md", tmp_path, {})
    lines = (tmp_path / "my_trainer.py").read_text().splitlines()
    assert sum(bool(line) for line in lines) <= 48, "the page promises a short loop"
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("my_trainer")
    sys.modules.pop("my_trainer")


@pytest.mark.parametrize("transport", ["ipc", "collective"])
async def test_the_pages_loop_trains_our_engine(
    ready: WorkerHandle, model_path: str, page: Any, transport: str
) -> None:
    """After each step the engine samples from the trainer's weights. By `refit_sender`."""
    trained = Model(model_path)
    before = trained.state()
    length = torch.full((4,), len(PROMPT))
    batch = {"input_ids": torch.tensor([PROMPT] * 4), "input_lengths": length}
    versions = []

    def reward(row: dict[str, torch.Tensor]) -> float:
        versions.append(int(row["weight_versions"].max()))
        return float(row["output_ids"][0, len(PROMPT)] % 2)

    address = ("127.0.0.1", free_port())
    await page.train(trained.model, ready.actor, batch, reward, 2, transport, address)
    assert versions == [0] * 4 + [1] * 4
    assert any(not torch.equal(before[name], tensor) for name, tensor in trained.tensors)
    ((_, row),) = [
        await reply
        async for reply in ready.actor.generate_async.remote(
            {name: values[:1] for name, values in batch.items()}
        )
    ]
    end, start = int(row["unpadded_sequence_lengths"]), len(PROMPT)
    ids = row["output_ids"][0, :end].tolist()
    assert row["logprobs"][0, start:end].tolist() == pytest.approx(
        trained.logprobs(ids, start), abs=1e-4
    )
    assert set(row["weight_versions"][0, start:end].tolist()) == {2}


@pytest.mark.parametrize("transport", ["ipc", "collective"])
async def test_ranks_of_fsdp_run_the_pages_loop(
    ready: WorkerHandle, ranks: Ranks, tmp_path: Path, transport: str
) -> None:
    """Each rank with its own rows; rank 0 alone sends."""
    write_files("docs/how-to/your-trainer.md", tmp_path, {})
    address = ("127.0.0.1", free_port())
    await ranks.all("run_loop", str(tmp_path), ready.actor, transport, address)
    await assert_serves(ready, ranks, 2)


@pytest.mark.slow
def test_the_pages_program_runs(model_path: str, tmp_path: Path) -> None:
    """From the actor's start on, with a Ray that the program starts itself."""
    changes = {
        "path: Qwen/Qwen3-0.6B": f"path: {model_path}, max_length: 512",
        "bfloat16": "float32",
        "steps=10": "steps=2",
    }
    write_files("docs/how-to/your-trainer.md", tmp_path, changes)
    run_program(tmp_path / "my_program.py")
