"""The protocol's routes, as Tinker's SDK uses them, without engines: see `bench`."""

import asyncio
import base64
import json
import re
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tinker.bench import KEY, Client, logprobs_of, loss_of
from turnwise.engine.adapters import read_adapter
from turnwise.tinker.access import key_in
from turnwise.tinker.backend import server_config
from turnwise.tinker.futures import Futures, Gone, Reply
from turnwise.tinker.queue import ModelOrder
from turnwise.tinker.service import TinkerService
from turnwise.tinker.wire import message_classes

IDS = [5, 6, 7, 8, 9, 10]


def datum(ids: list[int] = IDS, weight: float = 1.0) -> dict[str, Any]:
    weights = [weight] * (len(ids) - 1)
    return {"tokens": ids[:-1], "target_tokens": ids[1:], "weights": weights}


async def test_log_probs_of_a_new_adapter_are_those_of_the_model(
    client: Client, model_path: str
) -> None:
    assert await client.open() == {"model_id": client.model}
    data = [datum(), datum([5, 6, 7]), datum([11, 12, 13, 14])]
    reply = await client.trained(1, data, "cross_entropy")
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    for own, each in zip(logprobs_of(reply), data, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([each["tokens"]])).logits[0]
        expected = logits.log_softmax(-1)[range(len(own)), each["target_tokens"]]
        np.testing.assert_allclose(own, expected, atol=1e-5)
    total = -sum(float(own.sum()) for own in logprobs_of(reply))
    assert loss_of(reply) == pytest.approx(total, rel=1e-5)


async def test_a_step_raises_the_log_probs_of_what_was_trained(client: Client) -> None:
    await client.open()
    before = await client.trained(1, [datum()], "cross_entropy")
    taken = await client.step(2, learning_rate=1e-2)
    after = await client.trained(3, [datum()], "cross_entropy")
    assert taken["metrics"]["grad_norm"] > 0
    assert loss_of(after) < loss_of(before)


async def test_importance_sampling_is_the_ratio_times_the_advantage(client: Client) -> None:
    await client.open()
    sampled, advantages = [-1.0, -2.0, -0.5, -3.0, -1.5], [1.0, -1.0, 0.5, 2.0, 0.0]
    given = {"tokens": IDS[:-1], "target_tokens": IDS[1:], "logprobs": sampled}
    reply = await client.trained(1, [given | {"advantages": advantages}], "importance_sampling")
    (own,) = logprobs_of(reply)
    expected = -(np.exp(own - np.asarray(sampled)) * advantages)
    assert loss_of(reply) == pytest.approx(float(expected.sum()), rel=1e-4)
    (losses,) = logprobs_of(reply, "elementwise_loss")
    np.testing.assert_allclose(losses, expected, rtol=1e-4, atol=1e-6)


async def test_one_adapter_learns_nothing_of_another(
    served: tuple[Client, TinkerService],
) -> None:
    first, second = served[0], Client(served[0].http)
    await first.open(seed=1)
    await second.open(seed=2, rank=8)
    alone = logprobs_of(await second.trained(1, [datum()], "cross_entropy"))[0]
    await first.trained(1, [datum()], "cross_entropy")
    await first.step(2, learning_rate=0.1)
    again = logprobs_of(await second.trained(2, [datum()], "cross_entropy"))[0]
    np.testing.assert_array_equal(alone, again)


async def test_requests_of_a_model_run_in_the_order_of_their_positions(client: Client) -> None:
    await client.open()
    late = await client.train(2, [datum([5, 6, 7])], "cross_entropy")  # as the SDK's chunks come
    waiting = asyncio.create_task(client.result(late.json()))
    step = asyncio.create_task(client.step(3, learning_rate=1e-2))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    assert not step.done()
    await client.trained(1, [datum()], "cross_entropy")
    assert len(logprobs_of(await waiting)[0]) == 2
    assert (await step)["metrics"]["grad_norm"] > 0


async def test_a_request_that_is_sent_twice_runs_once(client: Client) -> None:
    await client.open()
    await client.trained(1, [datum()], "cross_entropy")
    first = await client.step(2, learning_rate=1e-2)
    assert await client.step(2, learning_rate=1e-2) == first
    reply = await client.trained(3, [datum()], "cross_entropy")
    assert await client.trained(3, [datum()], "cross_entropy") == reply


@pytest.mark.parametrize(
    ("given", "loss", "said"),
    [
        (datum() | {"weights": [float("nan")] * 5}, "cross_entropy", "no finite number"),
        (datum() | {"weights": [1.0]}, "cross_entropy", r"weights is \[1\]"),
        (datum([5, 99_999]), "cross_entropy", "target_tokens must have ids from 0"),
        (datum([5] * 65), "cross_entropy", "it has 64 tokens, and may have 1 to 63"),
        (datum(), "importance_sampling", "the loss needs loss_fn_inputs"),
        (datum(), "stable_reinforce", "does not compute stable_reinforce"),
        (datum(), "no_such", "this server computes cross_entropy, importance_sampling"),
    ],
)
async def test_a_wrong_datum_fails_its_request_alone(
    client: Client, given: dict[str, Any], loss: str, said: str
) -> None:
    await client.open()
    failed = await client.trained(1, [datum(), given], loss)
    assert failed["category"] == "user"
    assert re.search(said, failed["error"])
    assert logprobs_of(await client.trained(2, [datum()], "cross_entropy"))


async def test_adapters_start_equal_only_with_the_same_seed(client: Client) -> None:
    first = []
    for seed in (None, None, 7, 7):
        await client.open(seed=seed)
        adapter = client.rank._adapters._held[client.model]
        first.append(adapter.parameters[0].detach().clone())
    assert not torch.equal(first[0], first[1])
    assert torch.equal(first[2], first[3])


async def test_only_the_layers_that_are_asked_for_are_trained(client: Client) -> None:
    await client.open(train_mlp=False)
    label = client.rank._adapters._held[client.model].label
    named = [n for n, _ in client.rank._model.named_parameters() if f".{label}." in n]
    assert named
    assert all("self_attn" in name for name in named)


async def test_models_that_cannot_be_made_are_refused_in_words(client: Client) -> None:
    assert "not from 1 to 8" in (await client.open(rank=9))["error"]
    assert "leave no layer" in (await client.open(train_mlp=False, train_attn=False))["error"]
    session = {"session_id": client.session, "model_seq_id": 5}
    body = session | {"base_model": "another", "lora_config": {"rank": 1}}
    failed = await client.result(await client.tree("create_model", body))
    assert failed["category"] == "user"
    assert "not 'another'" in failed["error"]


async def test_saved_weights_are_sampled_by_their_path_or_at_once(
    served: tuple[Client, TinkerService], tmp_path: Path
) -> None:
    client, _ = served
    await client.open()
    body: dict[str, Any] = {"model_id": client.model, "seq_id": 1, "path": "first"}
    named = await client.result(await client.tree("save_weights_for_sampler", body))
    assert named["path"] == f"tinker://{client.model}/sampler_weights/first"
    folder, settings = read_adapter(
        str(tmp_path / "tinker" / client.model / "sampler_weights" / "first"), "it"
    )
    assert (settings["r"], settings["lora_alpha"]) == (4, 32)
    body = {"model_id": client.model, "seq_id": 2, "sampling_session_seq_id": 0}
    made = await client.result(await client.tree("save_weights_for_sampler", body))
    body = {"session_id": client.session, "sampling_session_seq_id": 1}
    opened = await client.tree("create_sampling_session", body | {"model_path": named["path"]})
    for sampler in (made["sampling_session_id"], opened["sampling_session_id"]):
        promise = await client.tree("asample", sample(sampler, 0))
        read = message_classes()["SampleResponse"]()
        read.ParseFromString(await client.result(promise))
        assert len(promise["sample_sequence_ids"]) == len(read.sequences) == 2
        assert len(np.frombuffer(read.sequences[0].tokens, np.int32)) <= 4
    found = await client.http.get(f"/api/v1/samplers/{sampler}", headers=KEY)
    assert found.json()["model_path"] == named["path"]
    assert folder.name == "first"


def sample(sampler: str, seq: int, **more: Any) -> dict[str, Any]:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": IDS}]}
    body = {"sampling_session_id": sampler, "seq_id": seq, "num_samples": 2, "prompt": prompt}
    return body | {"sampling_params": {"max_tokens": 4, "seed": 1}} | more


async def test_another_key_finds_nothing(served: tuple[Client, TinkerService]) -> None:
    client, _ = served
    await client.open()
    body: dict[str, Any] = {"model_id": client.model, "seq_id": 1, "path": "mine"}
    promise = await client.tree("save_weights_for_sampler", body)
    await client.result(promise)
    other = {"X-API-Key": "tml-two"}
    assert (await client.post("get_info", body, **other)).status_code == 404
    session = f"/api/v1/sessions/{client.session}"
    assert (await client.http.get(session, headers=other)).status_code == 404
    listed = await client.http.get("/api/v1/sessions", headers=other)
    assert listed.json() == {"sessions": []}
    asked = {"request_id": promise["request_id"]}
    assert (await client.post("retrieve_future", asked, **other)).status_code == 410
    opened = await client.post("create_session", {}, **other)
    wanted = {
        "session_id": opened.json()["session_id"],
        "sampling_session_seq_id": 0,
        "model_path": f"tinker://{client.model}/sampler_weights/mine",
    }
    refused = await client.post("create_sampling_session", wanted, **other)
    assert refused.status_code == 404
    for path in ("tinker://../sampler_weights/mine", "/etc/passwd", "tinker://a/b/../../c"):
        refused = await client.post("create_sampling_session", wanted | {"model_path": path})
        assert refused.status_code in (400, 410)


async def test_a_session_that_ends_takes_its_models_with_it(client: Client) -> None:
    await client.open()
    assert (await client.post("session_heartbeat", {"session_id": client.session})).is_success
    await client.tree(f"sessions/{client.session}/finish", {"reason": {"type": "success"}})
    assert (await client.post("session_heartbeat", {"session_id": client.session})).status_code == (
        410
    )
    assert (await client.post("get_info", {"model_id": client.model})).status_code == 404
    assert not client.rank._adapters._held
    assert not any(".lora_" in name for name, _ in client.rank._model.named_parameters())


async def test_what_the_server_does_not_answer_has_a_sentence(client: Client) -> None:
    await client.open()
    unknown = await client.http.get("/api/v1/billing/usage/events", headers=KEY)
    assert unknown.status_code == 404
    assert "does not answer" in unknown.json()["detail"]
    wrong = await client.http.post("/api/v1/get_info", content=b"{", headers=KEY)
    assert wrong.status_code == 400


async def test_a_token_says_who_the_caller_is_and_counts_as_the_key(client: Client) -> None:
    """The SDK reads `whoami` from it."""
    await client.open()
    token = (await client.tree("auth/token"))["jwt"]
    claims = json.loads(base64.urlsafe_b64decode(token.split(".")[1] + "=="))
    assert claims["sub"].startswith("tml:organization_user:")
    assert claims["exp"] - claims["iat"] > 86_400
    info = await client.post("get_info", {"model_id": client.model}, **{"X-API-Key": token})
    assert info.json()["model_id"] == client.model
    again = await client.post("auth/token", {}, **{"X-API-Key": token})
    assert key_in(again.json()["jwt"]) == key_in(token) == KEY["X-API-Key"]
    for key in ("tml-a.b.c", "eyJ", "eyJ.a", ""):
        assert key_in(key) == key


async def test_sessions_are_listed_with_what_they_have(client: Client) -> None:
    await client.open()
    body = {"session_id": client.session, "sampling_session_seq_id": 0, "base_model": "model"}
    sampler = (await client.tree("create_sampling_session", body))["sampling_session_id"]
    listed = await client.http.get("/api/v1/sessions?limit=20&offset=0", headers=KEY)
    assert client.session in listed.json()["sessions"]
    held = await client.http.get(f"/api/v1/sessions/{client.session}", headers=KEY)
    assert held.json() == {"training_run_ids": [client.model], "sampler_ids": [sampler]}


async def test_what_the_sdk_asks_before_anything_else(client: Client) -> None:
    flags = await client.tree("client/config", {"sdk_version": "0.38.0"})
    assert flags["pjwt_auth_enabled"]
    assert "sample_cancel_enabled" in await client.tree("client/dynamic_config", {})
    assert await client.tree("telemetry", {"events": []}) == {"status": "accepted"}
    answer: httpx.Response = await client.http.get("/api/v1/get_server_capabilities", headers=KEY)
    (known,) = answer.json()["supported_models"]
    assert known["max_context_length"] == 64
    await client.open()
    info = await client.tree("get_info", {"model_id": client.model})
    assert info["lora_rank"] == 4
    assert info["model_data"]["tokenizer_id"]


async def test_positions_wait_for_those_before_them() -> None:
    turns, ran = ModelOrder(), list[int]()

    async def note(number: int) -> None:
        async with turns.turn(number):
            await asyncio.sleep(0)
            ran.append(number)

    tasks = [asyncio.create_task(note(number)) for number in (3, 2, 6, 5, 1)]
    await asyncio.wait([tasks[0]])
    assert ran == [1, 2, 3]
    assert turns.next == 4
    tasks[3].cancel()
    await note(4)
    last = asyncio.create_task(note(5))
    await tasks[2]
    assert ran == [1, 2, 3, 4, 5, 6]
    assert last.done()


async def test_results_that_are_errors_have_categories() -> None:
    futures = Futures("one", {})

    async def fail() -> Reply:
        raise RuntimeError("boom")

    futures.begin("a", fail)
    outcome = await futures.retrieve("a", 1)
    assert outcome == {"error": "the server has a fault: boom", "category": "unknown"}
    with pytest.raises(Gone):
        await futures.retrieve("b", 1)


def test_a_server_needs_adapters_and_a_key_that_the_sdk_sends(model_path: str) -> None:
    with pytest.raises(Exception, match=r"weights\.lora must be adapter"):
        server_config(model_path, None, ["weights.lora=merged"])
    with pytest.raises(Exception, match="must begin with tml-"):
        server_config(model_path, None, ["serving.api_key=secret"])
    assert server_config(model_path).model.lora.rank == 128


async def test_nothing_is_left_of_clients_that_vanish(
    served: tuple[Client, TinkerService],
) -> None:
    client, service = served
    for _ in range(20):
        await client.open()
        await client.train(2, [datum()], "cross_entropy")  # its first request never comes
        await client.train(1, [datum()], "cross_entropy")
    ended = list(service._sessions.values())
    for session in ended:
        await service._end(session)
    await asyncio.sleep(0)
    assert not service._sessions
    assert not any(each.models or each.samplers or each.futures.entries for each in ended)
    assert not client.rank._adapters._held
