"""Training through the protocol: targets, losses, memory and turns, without engines."""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from tests.tinker.bench import KEY, Client, logprobs_of, loss_of, message
from tests.vision import vision_config
from turnwise.config import AlgorithmConfig
from turnwise.errors import InputError, TurnwiseError
from turnwise.tinker import requests
from turnwise.tinker.images import ChunkReader
from turnwise.tinker.service import TinkerService
from turnwise.tinker.trainer import AdapterTrainer
from turnwise.tinker.wire import PROTOBUF, message_classes, read_training_request
from turnwise.training.adapters import AdapterSpec
from turnwise.training.model import Models

IDS = [5, 6, 7, 8, 9, 10]


def shapes_of(reply: bytes) -> list[tuple[int, list[int]]]:
    """Return the number of data and the trailing shape of each record of a reply."""
    read = message_classes()["ForwardBackwardOutput"]()
    read.ParseFromString(reply)
    found = [(each.num_datums, each.fields["logprobs"]) for each in read.loss_fn_outputs]
    return [(number, list(tensor.trailing_shape)) for number, tensor in found]


def gradient_of(client: Client) -> list[torch.Tensor]:
    adapter = client.rank._adapters._held[client.model]
    found = [parameter.grad.clone() for parameter in adapter.parameters]
    adapter.learner.optimizer.zero_grad()
    return found


def assert_same_gradients(client: Client, expected: list[torch.Tensor]) -> None:
    """Compare with gradients of other micro-batches, whose sums round differently."""
    for own, wanted in zip(gradient_of(client), expected, strict=True):
        # A sum of large terms of both signs errs by their size, not by its own.
        torch.testing.assert_close(own, wanted, atol=1e-5 * float(wanted.abs().max()), rtol=0)


async def test_several_targets_for_a_token_are_scored_at_once(client: Client) -> None:
    await client.open()
    other = [11, 12, 13, 14, 15]
    one, two, three = [0.5] * 5, [0.25] * 5, [0.0, 1.0, 1.0, 1.0, 1.0]
    apart = [
        {"tokens": IDS[:-1], "target_tokens": IDS[1:], "weights": one},
        {"tokens": IDS[:-1], "target_tokens": other, "weights": two},
        {"tokens": IDS[:3], "target_tokens": IDS[1:4], "weights": three[:3]},
    ]
    first = await client.trained(1, apart, "cross_entropy")
    expected = gradient_of(client)
    together = {
        "tokens": IDS[:-1],
        "target_tokens": np.stack([IDS[1:], other], 1),
        "weights": np.stack([one, two], 1),
    }
    reply = await client.trained(2, [together, apart[2]], "cross_entropy")
    assert shapes_of(reply) == [(1, [2]), (1, [])]  # a record has arrays of one shape
    assert loss_of(reply) == pytest.approx(loss_of(first), rel=1e-5)
    assert_same_gradients(client, expected)
    read = message_classes()["ForwardBackwardOutput"]()
    read.ParseFromString(reply)
    scored = np.frombuffer(read.loss_fn_outputs[0].fields["logprobs"].data, np.float32)
    alone = logprobs_of(first)
    np.testing.assert_allclose(scored.reshape(5, 2), np.stack(alone[:2], 1), atol=1e-5)


async def test_tokens_without_weight_are_scored_and_teach_nothing(client: Client) -> None:
    await client.open()
    prompt = [[0.0, 0.0, 1.0, 1.0, 1.0], [1e-30, 1e-30, 1.0, 1.0, 1.0]]  # the same in float32
    found = []
    for seq, weights in enumerate(prompt, 1):
        datum = {"tokens": IDS[:-1], "target_tokens": IDS[1:], "weights": weights}
        scored = logprobs_of(await client.trained(seq, [datum, datum], "cross_entropy"))
        found.append((np.concatenate(scored), gradient_of(client)))
    np.testing.assert_allclose(found[0][0], found[1][0], atol=1e-6)
    for own, wanted in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(own, wanted, atol=1e-6, rtol=1e-4)
    silent = {"tokens": IDS[:-1], "target_tokens": IDS[1:], "weights": [0.0] * 5}
    assert loss_of(await client.trained(3, [silent], "cross_entropy")) == 0
    assert not any(each.any() for each in gradient_of(client))


async def test_sparse_targets_are_those_that_are_listed(client: Client) -> None:
    await client.open()
    targets = [[6, 0], [7, 3], [0, 0]]
    weights = [[1.0, 0.0], [0.5, 0.5], [0.0, 0.0]]
    datum = {"tokens": IDS[:3], "target_tokens": targets, "weights": weights}
    dense = await client.trained(1, [datum], "cross_entropy")
    made = message_classes()["ForwardBackwardRequest"]()
    made.ParseFromString(message(client.model, 2, [datum], "cross_entropy"))
    for name, values in (("target_tokens", [6, 7, 3]), ("weights", [1.0, 0.5, 0.5])):
        tensor = made.data[0].loss_fn_inputs[name]
        kind = np.int64 if name == "target_tokens" else np.float32
        tensor.sparse_csr.values = np.asarray(values, kind).tobytes()
        tensor.sparse_csr.crow_indices = np.asarray([0, 1, 3, 3], np.int64).tobytes()
        tensor.sparse_csr.col_indices = np.asarray([0, 0, 1], np.int64).tobytes()
    promise = await client.http.post(
        "/api/v1/forward_backward",
        content=made.SerializeToString(),
        headers=KEY | {"Content-Type": PROTOBUF},
    )
    assert loss_of(await client.result(promise.json())) == loss_of(dense)


async def test_a_loss_of_the_clients_own_trains_by_its_gradient(client: Client) -> None:
    """As the SDK does it: log-probs, the client's loss, and weights that are minus its gradient."""
    await client.open()
    datum = {"tokens": IDS[:-1], "target_tokens": IDS[1:]}
    silent = datum | {"weights": [0.0] * 5}
    scored = await client.result(
        (await client.train(1, [silent], "cross_entropy", forward_only=True)).json()
    )
    logprobs = torch.tensor(logprobs_of(scored)[0], requires_grad=True)
    (logprobs**2).sum().backward()
    assert logprobs.grad is not None
    weights = (-logprobs.grad).tolist()
    before = float((logprobs**2).sum())
    await client.trained(2, [datum | {"weights": weights}], "cross_entropy")
    await client.step(3, learning_rate=1e-3)
    after = logprobs_of(await client.trained(4, [datum], "cross_entropy"))[0]
    assert float((after**2).sum()) < before


@pytest.mark.parametrize("loss", ["ppo", "cispo", "dro", "gspo"])
async def test_thresholds_may_differ_between_tokens(client: Client, loss: str) -> None:
    await client.open()
    datum = {
        "tokens": IDS[:-1],
        "target_tokens": IDS[1:],
        "logprobs": [-1.0, -9.0, -0.5, -3.0, -1.5],
        "advantages": [1.0, -1.0, 0.5, -2.0, 0.0],
        "sequence_ratio_mask": [0.0, 1.0, 1.0, 1.0, 1.0],
    }
    plain = loss_of(await client.trained(1, [datum, datum], loss))
    name = "beta" if loss == "dro" else "clip_high_threshold"
    own = datum | {name: [0.1, 0.2, 0.3, 0.4, 0.5]}
    assert loss_of(await client.trained(2, [own, datum], loss)) != plain
    failed = await client.trained(3, [datum | {name: [1.0]}], loss)
    assert failed["error"] == f"datum 0: {name} is [1], and the 5 tokens need [5]"


@pytest.mark.parametrize(
    ("changes", "loss", "said"),
    [
        ({"target_tokens": np.ones((5, 2))}, "cross_entropy", "weights is [5], and the 5 tokens"),
        ({"target_tokens": np.ones((5, 0))}, "cross_entropy", "target_tokens is [5, 0]"),
        ({"target_tokens": np.ones((5, 2))}, "importance_sampling", "target_tokens is [5, 2]"),
        ({"target_tokens": [1, 2, -1, 3, 4]}, "cross_entropy", "datum 1: target_tokens must have"),
        ({"tokens": [5, 6, 7, 8, 10**6]}, "cross_entropy", "datum 1: model_input must have ids"),
    ],
)
async def test_targets_that_cannot_be_scored_have_a_sentence(
    client: Client, changes: dict[str, Any], loss: str, said: str
) -> None:
    await client.open()
    more = {"weights": [1.0] * 5, "logprobs": [0.0] * 5, "advantages": [0.0] * 5}
    good = {"tokens": IDS[:-1], "target_tokens": IDS[1:]} | more
    failed = await client.trained(1, [good, good | changes], loss)
    assert failed["category"] == "user"
    assert said in failed["error"]


async def run(client: Client, other: Client) -> list[np.ndarray]:
    """Train two adapters by turns; returns what each says at the end."""
    data = [{"tokens": IDS[:-1], "target_tokens": IDS[1:]}]
    for seq in (1, 3):
        for each in (client, other):
            await each.trained(seq, data, "cross_entropy")
        for each in (other, client):  # each is away between its pass and its step
            await each.step(seq + 1, learning_rate=1e-2)
    return [
        logprobs_of(await each.trained(5, data, "cross_entropy"))[0] for each in (client, other)
    ]


async def test_offloaded_adapters_train_as_if_they_had_stayed(
    client: Client,
) -> None:
    here = [client, Client(client.http)]
    for number, each in enumerate(here):
        await each.open(seed=number)
    expected = await run(*here)
    client.rank._adapters._near = 0
    moving = [Client(client.http), Client(client.http)]
    for number, each in enumerate(moving):
        await each.open(seed=number)
    away = client.rank._adapters._held[moving[0].model]
    assert away.offloaded
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in away.tensors())
    for own, wanted in zip(await run(*moving), expected, strict=True):
        np.testing.assert_array_equal(own, wanted)
    assert sum(not each.offloaded for each in client.rank._adapters._held.values()) == 1


async def test_an_adapter_loaded_with_its_optimizer_is_offloaded_too(
    client: Client,
) -> None:
    data = [{"tokens": IDS[:-1], "target_tokens": IDS[1:]}]
    await client.open()
    await client.trained(1, data, "cross_entropy")
    await client.step(2, learning_rate=1e-2)
    body = {"model_id": client.model, "seq_id": 3, "path": "state"}
    path = (await client.result(await client.tree("save_weights", body)))["path"]
    await client.trained(4, data, "cross_entropy")
    await client.step(5, learning_rate=1e-2)
    (expected,) = logprobs_of(await client.trained(6, data, "cross_entropy"))
    body = {"session_id": client.session, "model_seq_id": 1, "path": path, "optimizer": True}
    promise = await client.tree("load_weights", body)
    client.model = promise["model_id"]
    await client.result(promise)
    client.rank._adapters._near = 0
    await Client(client.http).open()
    assert client.rank._adapters._held[client.model].offloaded
    await client.trained(1, data, "cross_entropy")
    await client.step(2, learning_rate=1e-2)
    (own,) = logprobs_of(await client.trained(3, data, "cross_entropy"))
    np.testing.assert_array_equal(own, expected)


async def test_a_step_fails_after_a_pass_that_failed_midway(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = [{"tokens": IDS[:-1], "target_tokens": IDS[1:]}]
    await client.open()
    await client.trained(1, data, "cross_entropy")
    score, calls = Models.score, list[int]()

    def second_fails(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise TurnwiseError("out of memory")
        return score(*given)

    monkeypatch.setattr(Models, "score", second_fails)
    monkeypatch.setattr(requests, "TURN_TOKENS", len(IDS) - 1)
    failed = await client.trained(2, data * 2, "cross_entropy")
    assert "out of memory" in failed["error"]
    failed = await client.step(3, learning_rate=1e-2)
    assert "a pass of this step failed (out of memory)" in failed["error"]
    (before,) = logprobs_of(await client.trained(4, data, "cross_entropy"))
    other = Client(client.http)
    await other.open()
    (fresh,) = logprobs_of(await other.trained(1, data, "cross_entropy"))
    np.testing.assert_array_equal(before, fresh)
    for seq, each in ((5, client), (2, other)):  # and both take the same step
        await each.step(seq, learning_rate=1e-2)
    (own,) = logprobs_of(await client.trained(6, data, "cross_entropy"))
    (theirs,) = logprobs_of(await other.trained(3, data, "cross_entropy"))
    np.testing.assert_array_equal(own, theirs)


@pytest.mark.parametrize("kind", ["first part", "second part", "reply"])
async def test_only_a_pass_that_has_run_fails_the_step_after_it(
    served: tuple[Client, TinkerService], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    client, service = served
    await client.open()
    data = [{"tokens": IDS[:-1], "target_tokens": IDS[1:]}] * 2
    await client.trained(1, data, "cross_entropy")
    run, passes = service._trainer.run, list[object]()

    async def refusing(*arguments: Any) -> Any:
        passes.append(arguments)
        if kind != "reply" and len(passes) == (kind == "second part") + 1:
            raise InputError("refused")
        return await run(*arguments)

    def failing(*_: object) -> bytes:
        raise MemoryError("refused")

    with monkeypatch.context() as patch:
        patch.setattr(requests, "TURN_TOKENS", 5)
        patch.setattr(service._trainer, "run", refusing)
        if kind == "reply":
            patch.setattr("turnwise.tinker.service.training_reply", failing)
        assert "refused" in (await client.trained(2, data, "cross_entropy"))["error"]
    stepped = await client.step(3, learning_rate=1e-2)
    assert ("metrics" in stepped) == (kind == "first part")
    assert "metrics" in await client.step(4, learning_rate=1e-2)


async def test_an_adapter_that_ends_while_offloaded_leaves_nothing(client: Client) -> None:
    client.rank._adapters._near = 0
    first, second = client, Client(client.http)
    await first.open()
    await second.open()
    assert first.model in client.rank._adapters._offload._away
    await first.tree(f"sessions/{first.session}/finish", {})
    assert not client.rank._adapters._offload._away
    assert (
        list(client.rank._adapters._tensors) == list(client.rank._adapters._held) == [second.model]
    )


async def test_a_model_without_room_is_refused_and_others_go_on(
    client: Client,
) -> None:
    await client.open()
    client.rank._adapters._capacity = client.rank._adapters._held[client.model].nbytes + 1
    second = Client(client.http)
    failed = await second.open()
    assert failed["category"] == "user"
    assert "no room for another adapter of rank 4" in failed["error"]
    data = [{"tokens": IDS[:-1], "target_tokens": IDS[1:]}]
    assert logprobs_of(await client.trained(1, data, "cross_entropy"))
    await client.tree(f"sessions/{client.session}/finish", {})
    assert "model_id" in await Client(client.http).open()


async def test_a_long_pass_lets_others_in_and_keeps_its_result(
    served: tuple[Client, TinkerService], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, service = served
    data = [{"tokens": IDS[:-1], "target_tokens": IDS[1:]} for _ in range(6)]
    other = Client(client.http)
    await client.open()
    await other.open()
    whole = await client.trained(1, data, "cross_entropy")
    expected = gradient_of(client)
    monkeypatch.setattr(requests, "TURN_TOKENS", 10)
    asked, run = list[str](), service._trainer.run

    async def noted(name: str, *arguments: Any) -> Any:
        asked.append(name)
        await asyncio.sleep(0.05)  # as the trainer's process
        return await run(name, *arguments)

    monkeypatch.setattr(service._trainer, "run", noted)
    results = await asyncio.gather(
        client.trained(2, data, "cross_entropy"), other.trained(1, data[:1], "cross_entropy")
    )
    assert asked.count(client.model) == 3
    assert asked[-1] == client.model  # the short pass did not wait for the end of the long one
    np.testing.assert_allclose(
        np.concatenate(logprobs_of(results[0])), np.concatenate(logprobs_of(whole)), atol=1e-6
    )
    assert loss_of(results[0]) == pytest.approx(loss_of(whole), rel=1e-6)
    assert_same_gradients(client, expected)


async def test_a_session_that_ends_during_creation_leaves_no_model(
    served: tuple[Client, TinkerService], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, service = served
    add, called, ends = service._trainer.add, asyncio.Event(), asyncio.Event()

    async def slow(*arguments: Any) -> None:
        await add(*arguments)
        called.set()
        await ends.wait()

    monkeypatch.setattr(service._trainer, "add", slow)
    opening = asyncio.create_task(client.open())
    await called.wait()
    finishing = asyncio.create_task(client.tree(f"sessions/{client.session}/finish", {}))
    await asyncio.gather(opening, return_exceptions=True)  # its result is gone
    ends.set()
    await finishing
    async with asyncio.timeout(5):
        while client.rank._adapters._held:
            await asyncio.sleep(0.01)
    assert not service._sessions


async def test_a_cancelled_call_keeps_the_trainer_until_it_has_ended() -> None:
    begun, ended = list[str](), list[str]()

    class Slow:
        async def drop(self, name: str) -> None:
            begun.append(name)
            await asyncio.sleep(0.05)
            ended.append(name)

    slow: Any = Slow()
    trainer = AdapterTrainer(slow, AlgorithmConfig())
    first = asyncio.create_task(trainer.drop("first"))
    second = asyncio.create_task(trainer.drop("second"))
    await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.sleep(0.01)
    assert begun == ["first"]
    await second
    assert first.cancelled()
    assert ended == ["first", "second"]


async def test_a_servers_seed_repeats_the_adapters_of_a_run() -> None:
    """Clients seldom give a seed; a deterministic server draws the same ones in each run."""

    class Keeps:
        def __init__(self) -> None:
            self.seeds: list[int] = []

        async def adapter(self, verb: str, name: str, spec: AdapterSpec) -> None:
            self.seeds.append(spec.seed)

    async def seeds(seed: int | None) -> list[int]:
        trainer: Any = Keeps()
        adapters = AdapterTrainer(trainer, AlgorithmConfig(), seed)
        for name, given in (("one", None), ("two", None), ("three", 7)):
            await adapters.add(name, requests.LoraSpec(rank=4, seed=given), "owner")
        return list(trainer.seeds)

    first, again, other = await seeds(0), await seeds(0), await seeds(None)
    assert first == again
    assert len(set(first[:2] + other[:2])) == 4
    assert first[2] == other[2] == 7


async def test_a_model_is_not_replaced_when_its_creation_is_sent_again(
    served: tuple[Client, TinkerService],
) -> None:
    client, service = served
    await client.open()
    adapter = client.rank._adapters._held[client.model]
    service._sessions[client.session].futures.drop(client.model)  # as old results are
    body = {"session_id": client.session, "model_seq_id": 0, "base_model": "model"}
    promise = await client.tree("create_model", body | {"lora_config": {"rank": 4}})
    assert "is not kept any more" in (await client.result(promise))["error"]
    assert client.rank._adapters._held[client.model] is adapter


async def test_a_session_that_ends_twice_at_once_ends_once(
    served: tuple[Client, TinkerService],
) -> None:
    client, service = served
    await client.open()
    session = service._sessions[client.session]
    await asyncio.gather(service._end(session), service._end(session))
    assert not client.rank._adapters._held
    assert (await client.train(1, [], "cross_entropy")).status_code == 404


async def test_no_sampler_is_added_to_a_session_that_has_ended(
    served: tuple[Client, TinkerService], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, service = served
    await client.open()
    session = service._sessions[client.session]
    note = service._note

    async def noted(*arguments: Any) -> None:
        await note(*arguments)
        await service._end(session)

    monkeypatch.setattr(service, "_note", noted)
    body = {"session_id": client.session, "sampling_session_seq_id": 0, "base_model": "model"}
    assert (await client.post("create_sampling_session", body)).status_code == 410
    assert not session.samplers


async def test_a_forward_pass_that_fails_leaves_the_gradient(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.open()
    data = [{"tokens": IDS[:-1], "target_tokens": IDS[1:]}]
    await client.trained(1, data, "cross_entropy")

    def failing(*arguments: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(Models, "score", failing)
        promise = (await client.train(2, data, "cross_entropy", forward_only=True)).json()
        assert "out of memory" in (await client.result(promise))["error"]
    assert all(each.abs().sum() >= 0 for each in gradient_of(client))


async def test_the_sizes_of_tensors_cannot_cancel_each_other_out(client: Client) -> None:
    made = message_classes()["ForwardBackwardRequest"](model_id="m", seq_id=1, loss_fn="a")
    for name, rows in (("a", 2**31), ("b", -(2**31))):
        tensor = made.data.add().loss_fn_inputs[name]
        tensor.dtype = 1
        tensor.shape.extend([rows, 2**10])
    config = vision_config("none")
    joined = ChunkReader(config.model, config.engine.images_per_prompt).join
    assert "values in all" in read_training_request(made.SerializeToString(), joined).mistake
