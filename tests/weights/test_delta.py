"""Deltas: only what changed is sent, and what arrives is the trainer's weights bit for bit."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file

from tests.simulated import SimulatedEngine
from tests.weights.links import (
    CPU,
    assert_same,
    free_port,
    receive_stream,
    some_tensors,
    state_dict_info,
)
from tests.weights.ranks import Ranks
from tests.weights.test_lora_updates import moved as trained
from tests.weights.trainer import JOIN_SECONDS, Named, Sparse
from turnwise.config import Config, parse_config
from turnwise.errors import InputError, WeightUpdateError
from turnwise.serving.worker_handle import WorkerHandle
from turnwise.training.rank import TrainerRank
from turnwise.weights.collective import CollectiveReceiver
from turnwise.weights.delta import WHOLE_EVERY, HeldWeights, with_deltas
from turnwise.weights.manifest import Delta, Manifest
from turnwise.weights.process_group import ProcessGroup
from turnwise.weights.sync import Updated, WeightSync, check_canary
from turnwise.weights.transport import ReceiverOptions, find_transport, make_sender

BF16 = torch.bfloat16
STORED = ("shm", "disk")


def layers() -> Named:
    """Two layers of a model, and what is above and below them."""
    generator = torch.Generator().manual_seed(0)
    parts = ("attn.q.weight", "attn.k.weight", "mlp.up.weight")
    named = [f"model.layers.{layer}.{part}" for layer in range(2) for part in parts]
    return [
        (name, torch.randn(40, 50, generator=generator).to(BF16))
        for name in ("model.embed.weight", *named, "model.norm.weight")
    ]


def moved(tensors: Named, name: str = "", places: int = 20) -> Named:
    """The tensors with a few other values, in one of them or in all."""
    new = [(each, tensor.clone()) for each, tensor in tensors]
    for each, tensor in new:
        if each.startswith(name):
            chosen = torch.randperm(tensor.numel())[:places]
            tensor.view(-1)[chosen] += 1
    return new


class Engine:
    """An engine's worker: its copy, and the weights that it has loaded."""

    def __init__(self) -> None:
        self.options = ReceiverOptions(CPU, 0)
        self.model: dict[str, torch.Tensor] = {}

    def update(self, manifest: Manifest, error: str = "") -> list[str]:
        """Load an update, unless an error comes in between; return the names that were loaded."""
        transport = find_transport(manifest.transport)
        manifest = Manifest.from_dict(json.loads(json.dumps(manifest.to_dict())))
        transport.validate(manifest, self.options)
        receiver = transport.receive(manifest, self.options, 60)
        while receiver.poll() is None:
            time.sleep(0.001)
        loaded = {name: t.clone() for chunk in receiver.chunks() for name, t in chunk}
        receiver.end(error)
        if not error:
            self.model |= loaded
        return list(loaded)

    def assert_has(self, tensors: Named) -> None:
        held = [(name, self.model[name]) for name, _ in tensors]
        assert_same(held, tensors, tensors[0][1].dtype)


@pytest.fixture(params=STORED)
def sender(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    made = with_deltas(make_sender(request.param, layers(), BF16, folder=tmp_path))
    yield made
    made.close()


def test_a_version_is_sent_by_what_changed_since_the_one_before(sender: Any) -> None:
    """`weights.delta`, by the transports that store versions."""
    engine, tensors = Engine(), layers()
    first = sender.publish(1, tensors)
    assert (first.deltas, first.changed, first.sent_bytes) == ((), None, first.nbytes)
    assert engine.update(first) == [name for name, _ in tensors]
    for version in (2, 3, 4):
        tensors = moved(tensors)
        manifest = sender.publish(version, tensors)
        assert manifest.version == version
        assert manifest.changed == pytest.approx(20 / 2000)
        assert manifest.sent_bytes < first.nbytes / 4
        engine.update(manifest)
        engine.assert_has(tensors)


def test_only_layers_that_changed_are_loaded_and_each_as_a_whole(sender: Any) -> None:
    """vLLM fuses tensors of a layer, and can only load all of it."""
    engine, tensors = Engine(), layers()
    engine.update(sender.publish(1, tensors))
    tensors = moved(tensors, "model.layers.1.attn.q.weight")
    loaded = engine.update(sender.publish(2, tensors))
    assert loaded == [name for name, _ in tensors if name.startswith("model.layers.1.")]
    engine.assert_has(tensors)
    tensors = moved(tensors, "model.norm")
    engine.update(sender.publish(3, tensors))
    unchanged = sender.publish(4, tensors)
    assert unchanged.changed == 0
    assert engine.update(unchanged) == []
    engine.assert_has(tensors)


def test_a_late_engine_gets_all_tensors_and_the_deltas_since(sender: Any) -> None:
    first, late, tensors = Engine(), Engine(), layers()
    first.update(sender.publish(1, tensors))
    for version in (2, 3, 4):
        tensors = moved(tensors)
        manifest = sender.publish(version, tensors)
    assert len(manifest.deltas) == 3
    for engine in (late, first):  # one has nothing, one missed two versions
        engine.update(manifest)
        engine.assert_has(tensors)
    assert late.update(manifest) == []  # it has that version already


def test_an_update_that_failed_is_followed_by_all_tensors(sender: Any) -> None:
    engine, tensors = Engine(), layers()
    engine.update(sender.publish(1, tensors))
    tensors = moved(tensors, "model.norm")
    engine.update(sender.publish(2, tensors), error="its memory is full")
    tensors = moved(tensors, "model.norm")
    assert engine.update(sender.publish(3, tensors)) == [name for name, _ in tensors]
    engine.assert_has(tensors)


def test_a_wrong_copy_is_noticed_and_replaced_by_the_next_try(
    sender: Any,
) -> None:
    engine, tensors = Engine(), layers()
    engine.update(sender.publish(1, tensors))
    held = engine.options.held
    assert isinstance(held, HeldWeights)
    held._buffer[77] ^= 1  # a bit of a value that no delta touches
    tensors = moved(tensors, "model.norm")
    manifest = sender.publish(2, tensors)
    with pytest.raises(WeightUpdateError, match="version 2 arrived with another checksum"):
        engine.update(manifest)
    assert engine.update(manifest) == [name for name, _ in tensors]
    engine.assert_has(tensors)


def test_every_twentieth_version_is_whole_and_drops_old_deltas(sender: Any, tmp_path: Path) -> None:
    engine, tensors, whole = Engine(), layers(), []
    for version in range(2 * WHOLE_EVERY + 2):
        tensors = moved(tensors, "model.norm", 3)
        manifest = sender.publish(version, tensors)
        whole += [] if manifest.deltas else [version]
        engine.update(manifest)
    engine.assert_has(tensors)
    assert whole == [0, WHOLE_EVERY, 2 * WHOLE_EVERY]
    kept = [load_file(path) for path in tmp_path.rglob("delta-*.safetensors")]
    assert len(kept) in (0, WHOLE_EVERY)  # of shm; of the version before the last, and this one's
    assert all({name[:17] for name in one} == {"model.norm.weight"} for one in kept)


def test_tensors_outside_the_layers_are_loaded_together(sender: Any) -> None:
    """vLLM fills up what a module lacks of them, such as a bias, with whatever memory contains."""
    engine, tensors = Engine(), layers()
    engine.update(sender.publish(1, tensors))
    tensors = moved(tensors, "model.norm")
    assert engine.update(sender.publish(2, tensors)) == ["model.embed.weight", "model.norm.weight"]
    engine.assert_has(tensors)


def test_deltas_together_stay_smaller_than_their_whole_version(sender: Any) -> None:
    """They bound the reading of an engine that starts, and the contents of shared memory."""
    tensors, manifests = layers(), []
    for version in range(12):
        tensors = moved(tensors, places=250)
        manifests.append(sender.publish(version, tensors))
    assert {len(one.deltas) for one in manifests} == {0, 1, 2, 3}
    for one in manifests:
        assert sum(delta.nbytes for delta in one.deltas) < one.nbytes
    late = Engine()
    late.update(manifests[-1])
    late.assert_has(tensors)


def test_a_failed_write_never_reaches_the_engines_buffer() -> None:
    """An engine that starts later reads the last version that was offered in shared memory."""
    made = make_sender("shm", layers(), BF16)
    offered, late = made.publish(1, layers()), Engine()
    for _ in range(2):
        with pytest.raises(WeightUpdateError, match="got nothing instead of"):
            made.publish(2, moved(layers())[:-1])
    late.update(offered)
    late.assert_has(layers())
    made.close()


def test_what_changed_too_much_is_sent_whole(sender: Any) -> None:
    """In float32, and after a large step, each value changes."""
    engine, tensors = Engine(), layers()
    engine.update(sender.publish(1, tensors))
    tensors = [(name, tensor + 1) for name, tensor in tensors]
    manifest = sender.publish(2, tensors)
    assert manifest.deltas == ()
    assert manifest.changed == pytest.approx(1, abs=0.01)
    engine.update(manifest)
    engine.assert_has(tensors)
    tensors = moved(tensors)
    tensors[2][1].add_(1)  # one whole tensor, and a few values of the others
    manifest = sender.publish(3, tensors)
    assert len(manifest.deltas) == 1
    engine.update(manifest)
    engine.assert_has(tensors)


def test_versions_may_go_back_and_be_published_twice(sender: Any) -> None:
    """A pipeline that loads a checkpoint does, and an engine that restarts makes a trainer."""
    early, late, tensors = Engine(), Engine(), layers()
    for version in (5, 6, 6, 3, 4, 5, 6):
        tensors = moved(tensors)
        manifest = sender.publish(version, tensors)
        early.update(manifest)
        early.assert_has(tensors)
    late.update(manifest)
    late.assert_has(tensors)


def test_a_failed_publication_is_followed_by_all_tensors(sender: Any) -> None:
    engine, tensors = Engine(), layers()
    engine.update(sender.publish(1, tensors))
    with pytest.raises(WeightUpdateError, match=r"got nothing instead of model\.norm\.weight"):
        sender.publish(2, moved(tensors)[:-1])
    tensors = moved(tensors)
    manifest = sender.publish(3, tensors)
    assert manifest.deltas == ()
    engine.update(manifest)
    engine.assert_has(tensors)


def test_an_update_without_deltas_makes_the_copy_worthless(tmp_path: Path) -> None:
    """As one by `refit_sender`: a worker forgets its copy when it opens such an update."""
    held = HeldWeights(state_dict_info(layers(), BF16))
    held.checksum = held.sum()
    plain = make_sender("shm", layers(), BF16)
    assert held.deltas_to(plain.publish(1, layers())) is None
    plain.close()


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
def test_a_delta_is_exact_to_the_bit(dtype: torch.dtype) -> None:
    """Of any shape; a zero may change its sign, and a value may not be a number."""
    tensors = [*some_tensors(), ("wide", torch.zeros(70_000)), ("special", torch.zeros(64))]
    info = state_dict_info(tensors, dtype)
    ours, theirs = HeldWeights(info), HeldWeights(info)

    def take() -> bytes:
        delta, _ = ours.take(iter(tensors), ours.nbytes)
        return delta

    def manifest(version: int) -> Manifest:
        return Manifest(version, "shm", "", 0, (), checksum=ours.checksum)

    assert take() == b""
    assert list(theirs.apply(manifest(1), [list(ours.tensors())]))
    tensors[-2][1][[0, 69_999]] = 1.0  # further apart than 16 bits can tell
    tensors[-1][1][:4] = torch.tensor([-0.0, float("nan"), float("inf"), 1e-45])
    tensors[-4][1].fill_(2.0)  # a scalar
    delta = load(take())
    assert sorted({name.partition(":")[0] for name in delta}) == ["scalar", "special", "wide"]
    (changed,) = theirs.apply(manifest(2), [delta.items()])
    assert [name for name, _ in changed] == list(info)  # they are in no layer
    assert torch.equal(ours._buffer, theirs._buffer)
    assert theirs.checksum is None  # until the engine has loaded it
    assert theirs.sum() == ours.checksum


def test_a_checksum_notices_each_bit_and_each_exchange() -> None:
    held = HeldWeights({"weight": ((300, 300), "float32")})
    values = torch.randn(300, 300)
    held.take(iter([("weight", values)]), 0)
    before = held.sum()
    for place in (0, 5, 4096 * 8, 4096 * 8 + 3, 300 * 300 * 4 - 1):
        held._buffer[place] ^= 1
        assert held.sum() != before
        held._buffer[place] ^= 1
    words = held._buffer.view(torch.int64)
    for one, other in ((0, 1), (0, 4096), (1, 4096), (17, 8000)):
        exchanged = words[[other, one]].clone()
        original = words[[one, other]].clone()
        words[[one, other]] = exchanged
        assert held.sum() != before
        words[[one, other]] = original
    assert held.sum() == before


class Worker:
    """An engine's worker in a process group, for as long as a test."""

    def __init__(self, rank: int, port: int, world: int) -> None:
        self.options = ReceiverOptions(CPU, 0)
        self.model: dict[str, torch.Tensor] = {}
        self._place = rank, port, world

    def join(self) -> None:
        rank, port, world = self._place
        group = ProcessGroup(rank, "127.0.0.1", port, world, 1, CPU, JOIN_SECONDS)
        self.options.group = group

    def update(self, tensors: Named) -> None:
        assert self.options.group is not None
        info = state_dict_info(tensors, BF16)
        receiver = CollectiveReceiver(self.options, info, 60)
        _, received = receive_stream(receiver)
        self.model |= dict(received)


def test_a_stream_sends_a_delta_if_no_engine_needs_all_tensors() -> None:
    """By `collective`: `weights.delta`."""
    tensors, port = layers(), free_port()
    sender = with_deltas(make_sender("collective", tensors, BF16, buffer_bytes=9000))
    workers = [Worker(rank, port, 3) for rank in (1, 2)]

    def side_by_side(*calls: Callable[[], object]) -> None:
        async def work() -> None:
            await asyncio.gather(*(asyncio.to_thread(call) for call in calls))

        asyncio.run(work())

    side_by_side(
        lambda: sender.join("127.0.0.1", port, 2, JOIN_SECONDS), *(w.join for w in workers)
    )

    def send(version: int, expect: str = "") -> None:
        with pytest.raises(WeightUpdateError, match=expect) if expect else nullcontext():
            side_by_side(
                lambda: sender.send(version, iter(()), ["cpu"] * 2),
                *(lambda w=w: w.update(tensors) for w in workers),
            )

    def update(version: int) -> Manifest:
        manifest = sender.publish(version, iter(tensors))
        send(version)
        for worker in workers:
            assert_same([(name, worker.model[name]) for name, _ in tensors], tensors, BF16)
        return manifest

    assert update(1).deltas == ()
    tensors = moved(tensors)
    manifest = update(2)
    assert len(manifest.deltas) == 1
    assert manifest.sent_bytes < manifest.nbytes / 4
    tensors = moved(tensors, places=400)  # longer than a buffer
    manifest = update(3)
    assert 9000 < manifest.sent_bytes < manifest.nbytes / 2
    workers[1].options.held = None  # as after a restart
    tensors = moved(tensors)
    assert sender.publish(4, iter(tensors)).deltas
    send(4, "it does not have the version before")
    send(4)  # `WeightSync` asks once more
    for worker in workers:
        assert_same([(name, worker.model[name]) for name, _ in tensors], tensors, BF16)
    tensors = moved(tensors, "model.norm")
    assert update(5).deltas
    held = workers[0].options.held
    assert isinstance(held, HeldWeights)
    held._buffer[77] ^= 1  # a bit of a value that no delta touches
    tensors, before = moved(tensors, "model.norm"), dict(workers[0].model)
    assert sender.publish(6, iter(tensors)).deltas
    send(6, "another checksum")
    assert all(workers[0].model[name] is tensor for name, tensor in before.items())  # as before
    send(6)
    for worker in workers:
        assert_same([(name, worker.model[name]) for name, _ in tensors], tensors, BF16)
    sender.close()


def test_what_cannot_be_sent_by_deltas_is_a_sentence() -> None:
    plain = {"environment": "none", "data": {"path": "none"}, "model": {"path": "none"}}
    for name in ("ipc", "tests.weights.carrier:CarrierTransport"):
        weights = {"transport": name, "delta": True}
        with pytest.raises(InputError, match=rf"weights\.delta: {name} sends all tensors: use"):
            parse_config({**plain, "weights": weights})
    for more, why in (
        ({"training": {"colocated": True}}, "reads the trainer's own tensors"),
        ({"model": {"path": "none", "lora": {"rank": 4}}}, "all values of an adapter change"),
    ):
        lora = {"lora": "adapter"} if "model" in more else {}
        with pytest.raises(InputError, match=f"weights.delta: .*{why}"):
            parse_config({**plain, "weights": {"delta": True, **lora}, **more})


class Wanting(SimulatedEngine):
    """An engine that loads no delta: its copy is another one."""

    asked = 0

    async def update_weights(self, manifest: Manifest, *args: Any) -> int:
        self.asked += 1
        if manifest.deltas and self.asked == 1:
            raise WeightUpdateError("arrived with another checksum")
        return await super().update_weights(manifest, *args)


@pytest.mark.parametrize("deltas", [(Delta(1, 100, ""),), ()], ids=["delta", "whole"])
async def test_an_engine_that_failed_with_a_delta_is_asked_once_more(
    deltas: tuple[Delta, ...],
) -> None:
    class Trainer:
        async def publish(self) -> Manifest:
            checksum = 2 if deltas else None
            return Manifest(1, "shm", "", 0, (), checksum=checksum, deltas=deltas)

    engine: Any = Wanting()
    sync = WeightSync(Trainer(), timeout=60, patience=60)  # type: ignore[arg-type]
    await sync.publish()
    assert await sync.update([engine], "keep") == {engine: Updated(1)}
    assert engine.asked == 1 + len(deltas)


async def test_ranks_that_do_not_send_hold_no_copy(ray_started: None, tmp_path: Path) -> None:
    ranks = Ranks((4, 200), tmp_path)
    await ranks.all("open", "disk", str(tmp_path), True)
    for version in (1, 2):
        await ranks.all("train", 1e-3)
        first, other = await ranks.all("publish")
        assert (first.version, other.tensors) == (version, ())
        await ranks.all("send", [])  # nobody gathers again
    ranks.kill()


@pytest.mark.parametrize("transport", ["shm", "collective", "disk"])
async def test_an_engine_that_fuses_and_packs_tensors_gets_deltas(
    ready: WorkerHandle, model_path: str, tmp_path: Path, transport: str
) -> None:
    """Each version by its canary. By `weights.delta`."""
    trainer = Sparse(model_path, transport, tmp_path, delta=True)
    sync = WeightSync(trainer, timeout=240, patience=240)

    async def serves(version: int) -> None:
        expected = trainer.model.logprobs(trainer.model.canary, 1)
        await check_canary(ready, trainer.model.canary, expected, 1e-3, version)

    for version, part in enumerate(("", "", "q_proj", "down_proj", "embed", "norm", ""), start=1):
        trainer.train(version, part)
        with pytest.raises(WeightUpdateError, match="weights are not the trainer's"):
            await serves(version - 1)
        assert bool((await sync.publish()).deltas) == (version > 1)
        assert await sync.update([ready], "keep") == {ready: Updated(version)}
        await serves(version)
    assert await sync.update_one(ready, "keep") == version
    await serves(version)
    whole = make_sender("shm", trainer.model.tensors)  # after it the copy is out of date
    trainer.train(8)
    await ready.update_weights(whole.publish(8, trainer.model.tensors))
    whole.close()
    trainer.train(9)
    assert (await sync.publish()).deltas
    await sync.update([ready], "keep")
    await serves(9)
    trainer.sender.close()


@pytest.fixture
def lora_config(make_config: Callable[..., Config], model_path: str) -> Config:
    return make_config(
        model={"path": model_path, "lora": {"rank": 4, "target_modules": ["q_proj", "up_proj"]}},
        training={"threads": 1},
        weights={"delta": True},
    )


async def test_a_loras_merged_layers_are_sent_by_deltas(
    ready: WorkerHandle, lora_config: Config
) -> None:
    rank = TrainerRank(lora_config)
    await ready._call("prepare_refit_info", state_dict_info(list(rank._tensors())))
    for version in (1, 2, 3):
        trained(rank, 0.05)
        published = rank.publish()
        await ready.update_weights(published)
        prompt, expected = published.prompt, published.logprobs
        assert (await check_canary(ready, prompt, expected, 1e-3, version))[1] < 1e-4
    rank.close()
