"""Limits of what clients of a Tinker server leave behind or send wrong, without engines."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.responses import PlainTextResponse

from tests.tinker.bench import KEY, Client, logprobs_of, message
from tests.vision import vision_config
from turnwise.chat.session_store import SessionStore
from turnwise.config import SamplingConfig
from turnwise.config.serving import ServingConfig
from turnwise.errors import EngineError, InputError
from turnwise.serving.openai.protection import guarded
from turnwise.tinker import futures, queue, routes, service
from turnwise.tinker.access import TinkerAccess
from turnwise.tinker.futures import Busy, Futures, Gone, Reply
from turnwise.tinker.images import ChunkReader
from turnwise.tinker.queue import ModelOrder
from turnwise.tinker.requests import check_training
from turnwise.tinker.service import TinkerService
from turnwise.tinker.wire import (
    PROTOBUF,
    Datum,
    TrainingRequest,
    message_classes,
    read_training_request,
)
from turnwise.trajectory import Prompt

IDS = [5, 6, 7, 8]
_CONFIG = vision_config("none")
joined = ChunkReader(_CONFIG.model, _CONFIG.engine.images_per_prompt).join


def row(ids: list[int] = IDS) -> dict[str, Any]:
    return {"tokens": ids[:-1], "target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)}


async def sampler_of(client: Client) -> str:
    session = (await client.tree("create_session", {}))["session_id"]
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "model"}
    made: str = (await client.tree("create_sampling_session", body))["sampling_session_id"]
    return made


def asked(sampler: str, seq: int, **more: Any) -> dict[str, Any]:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": IDS}]}
    body = {"sampling_session_id": sampler, "seq_id": seq, "prompt": prompt}
    return body | {"sampling_params": {"max_tokens": 4, "seed": 1}} | more


async def test_a_client_with_too_much_in_progress_is_asked_to_wait(
    served: tuple[Client, TinkerService], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, _ = served
    sampler = await sampler_of(client)
    monkeypatch.setattr(futures, "_MAX_HELD", 80_000)
    monkeypatch.setattr(futures, "_SENT_SECONDS", 0.0)
    first = [await client.post("asample", asked(sampler, n, num_samples=4)) for n in range(6)]
    accepted = [each.json() for each in first if each.status_code == 200]
    assert {each.status_code for each in first} == {200, 429}
    assert "wait for some of them" in first[-1].json()["detail"]
    for promise in accepted:
        await client.result(promise)
    assert (await client.post("asample", asked(sampler, 9))).status_code == 200


async def test_a_client_below_its_share_gets_in_when_all_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(futures, "_MAX_HELD", 100_000)
    held: dict[str, int] = {}
    sessions = [Futures("one", held) for _ in range(3)]
    other = Futures("other", held)
    ends = asyncio.Event()

    async def reply() -> Reply:
        await ends.wait()
        return {}

    for number, each in enumerate((*sessions, *sessions)):  # all of it, by three sessions
        each.begin(str(number), reply, 12_000)
    for each in sessions:
        with pytest.raises(Busy):
            each.begin("more", reply, 12_000)
    for name in ("a", "b"):
        other.begin(name, reply, 10**9)  # counted as a quarter of all: half of it is its part
    with pytest.raises(Busy):
        other.begin("c", reply)
    assert sum(held.values()) > 100_000
    ends.set()
    for each in (*sessions, other):
        each.drop(*each.entries)
    assert not held


async def test_an_error_of_an_engine_is_the_result_of_its_sample(
    served: tuple[Client, TinkerService], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, own = served
    sampler = await sampler_of(client)

    async def failing(*_: object) -> Any:
        await asyncio.sleep(0.01)
        raise error

    monkeypatch.setattr(service, "generate", failing)
    for number, (error, category) in enumerate(
        [(EngineError("engine 0 died"), "server"), (InputError("k is too large"), "user")]
    ):
        promise = await client.tree("asample", asked(sampler, number, num_samples=2))
        assert await client.result(promise) == {"error": str(error), "category": category}
    held = sum(own._held.values())
    assert held == 2 * futures.SMALLEST
    large = asked(sampler, 2, topk_prompt_logprobs=2**40)  # which is refused, but not for ever
    assert "error" in await client.result(await client.tree("asample", large))


async def test_what_a_request_takes_is_counted(served: tuple[Client, TinkerService]) -> None:
    client, own = served
    sampler = await sampler_of(client)

    async def counted(number: int, **more: Any) -> int:
        before = sum(own._held.values())
        await client.tree("asample", asked(sampler, number, **more))
        return sum(own._held.values()) - before

    plain = await counted(0)
    assert await counted(1, unknown="x" * 100_000) - plain > 100_000
    params = {"max_tokens": 2000}
    assert await counted(2, sampling_params=params, num_samples=8) - plain > 8 * 2000 * 80
    await client.open()
    before = sum(own._held.values())
    late = {"model_id": client.model, "seq_id": 9, "unknown": "x" * 100_000}
    await client.tree("optim_step", late)  # which waits for eight others
    assert sum(own._held.values()) - before > 100_000


async def test_a_cancelled_sample_leaves_nothing(served: tuple[Client, TinkerService]) -> None:
    client, own = served
    promise = await client.tree("asample", asked(await sampler_of(client), 0, num_samples=8))
    await client.tree("cancel_future", {"request_id": promise["request_id"]})
    assert not any(each.futures.entries for each in own._sessions.values())
    gone = await client.post("retrieve_future", {"request_id": promise["request_id"]})
    assert gone.status_code == 410


async def test_results_that_were_sent_are_kept_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures, "_SENT_SECONDS", 0.02)
    own = Futures("one", {})

    async def reply() -> Reply:
        return bytes(5000)

    for name in ("a", "b", "c"):
        own.begin(name, reply)
    for _ in range(2):
        assert await own.retrieve("a", 1)
    await asyncio.sleep(0.05)
    with pytest.raises(Gone):
        await own.retrieve("a", 1)
    assert await own.retrieve("b", 1)
    await asyncio.sleep(0.05)
    assert [*own.entries] == ["c"]


async def test_requests_after_one_that_never_comes_fail_in_words(
    monkeypatch: pytest.MonkeyPatch, served: tuple[Client, TinkerService]
) -> None:
    client, _ = served
    monkeypatch.setattr(queue, "GAP_SECONDS", 0.2)
    await client.open()
    await client.trained(1, [row()], "cross_entropy")
    late = [(await client.train(n, [row()], "cross_entropy")).json() for n in (4, 3)]
    for promise in late:
        failed = await client.result(promise)
        assert failed["category"] == "user"
        assert "the model's earlier request 2" in failed["error"]
    assert logprobs_of(await client.trained(5, [row()], "cross_entropy"))
    assert (await client.train(2, [row()], "cross_entropy")).status_code == 410


async def test_turns_wait_for_a_gap_as_long_as_others_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "GAP_SECONDS", 5.0)
    turns, ran = ModelOrder(), list[int]()

    async def note(number: int) -> None:
        async with turns.turn(number):
            ran.append(number)

    await asyncio.gather(*map(note, (2, 4, 1, 3)))
    assert ran == [1, 2, 3, 4]


async def test_turns_go_on_when_those_who_run_or_wait_are_cancelled() -> None:
    turns, ran = ModelOrder(), list[int]()

    async def note(number: int, seconds: float = 0) -> None:
        async with turns.turn(number):
            await asyncio.sleep(seconds)
            ran.append(number)

    tasks = [asyncio.create_task(note(1, 60)), *(asyncio.create_task(note(n)) for n in (2, 3))]
    await asyncio.sleep(0)
    for task in tasks[:2]:
        task.cancel()
    await asyncio.wait(tasks, timeout=5)
    assert ran == [3]


async def test_a_session_that_ends_answers_those_who_wait(
    served: tuple[Client, TinkerService],
) -> None:
    client, _ = served
    await client.open()
    late = (await client.train(2, [row()], "cross_entropy")).json()
    waiting = asyncio.create_task(
        client.post("retrieve_future", {"request_id": late["request_id"]})
    )
    await asyncio.sleep(0.01)
    await client.tree(f"sessions/{client.session}/finish", {})
    assert (await waiting).status_code == 410


async def test_silent_sessions_make_room_for_new_ones(
    served: tuple[Client, TinkerService], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, own = served
    monkeypatch.setattr(service, "_MAX_SESSIONS", 3)
    names = [(await client.tree("create_session", {}))["session_id"] for _ in range(3)]
    refused = await client.post("create_session", {})
    assert (refused.status_code, "3 sessions" in refused.text) == (429, True)
    own._sessions[names[1]].seen -= 1000
    await client.tree("create_session", {})
    assert list(own._sessions)[:2] == [names[0], names[2]]


async def test_a_thousand_clients_that_vanish_leave_nothing(
    served: tuple[Client, TinkerService],
) -> None:
    client, own = served
    for number in range(1000):
        key = {"X-API-Key": f"tml-{number}"}
        session = (await client.post("create_session", {}, **key)).json()["session_id"]
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "model"}
        opened_here = await client.post("create_sampling_session", body, **key)
        sampler = opened_here.json()["sampling_session_id"]
        await client.post("asample", asked(sampler, 0, num_samples=4), **key)
    assert len(own._sessions) == 1000
    ended = list(own._sessions.values())
    await own._end_silent(0.0)
    await asyncio.sleep(0)
    assert not own._sessions
    assert not any(each.samplers or each.futures.entries for each in ended)


async def test_weights_without_a_name_go_once_there_are_newer_ones(
    served: tuple[Client, TinkerService], tmp_path: Path
) -> None:
    client, own = served
    await client.open()
    held = own._sessions[client.session].samplers
    for number in range(3):
        body = {"model_id": client.model, "seq_id": number + 1, "sampling_session_seq_id": number}
        await client.result(await client.tree("save_weights_for_sampler", body))
        if not number:
            held[f"{client.session}:sample:0"].seen -= 2 * service._UNUSED_SECONDS
    assert list(held) == [f"{client.session}:sample:{number}" for number in (1, 2)]
    kept = tmp_path / "tinker" / client.model / "snapshots"
    assert sorted(each.name for each in kept.iterdir()) == ["1", "2"]


async def test_numbers_that_are_none_are_refused_and_answers_are_json(
    served: tuple[Client, TinkerService],
) -> None:
    client, _ = served
    await client.open()

    async def send(path: str, text: str) -> Any:
        body = text.replace("MODEL", client.model).replace("SESSION", client.session)
        return await client.http.post(f"/api/v1/{path}", content=body, headers=KEY)

    step = '{"model_id": "MODEL", "seq_id": 1, "adam_params": {"learning_rate": NaN}}'
    failed = await client.result((await send("optim_step", step)).json())
    assert (failed["category"], "finite" in failed["error"]) == ("user", True)
    lora = '"base_model": "model", "lora_config": {"rank": 2}'
    made = f'{{"session_id": "SESSION", "model_seq_id": 9, {lora}, "user_metadata": {{"a": NaN}}}}'
    await client.result((await send("create_model", made)).json())
    runs = (await client.http.get("/api/v1/training_runs", headers=KEY)).json()["training_runs"]
    assert runs[0]["user_metadata"] == {"a": "NaN"}


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"a": ' * 100_000, b"\xff", b"1"])
async def test_bodies_that_are_no_requests_are_refused(
    served: tuple[Client, TinkerService], body: bytes
) -> None:
    client, _ = served
    for path in ("asample", "retrieve_future", "optim_step", "create_session"):
        answer = await client.http.post(f"/api/v1/{path}", content=body, headers=KEY)
        assert answer.status_code in (400, 413), (path, answer.text)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"prompt": {"chunks": [{}] * 5000}}, "chunks"),
        ({"prompt": {"chunks": [{"tokens": ["a"] * 100_000}]}}, "tokens"),
        ({"sampling_params": {"stop": [1.5] * 100_000}}, "stop"),
    ],
)
async def test_a_long_mistake_makes_a_short_error(
    served: tuple[Client, TinkerService], change: dict[str, Any], why: str
) -> None:
    client, _ = served
    refused = await client.post("asample", asked(await sampler_of(client), 0, **change))
    assert refused.status_code == 400
    assert why in refused.json()["detail"]
    assert len(refused.json()["detail"]) < 500


async def test_long_metadata_are_refused(served: tuple[Client, TinkerService]) -> None:
    client, _ = served
    long = {"user_metadata": {"a": "b" * routes._MAX_BYTES}}
    assert (await client.post("create_session", long)).status_code == 413


def test_a_small_body_cannot_stand_for_large_tensors() -> None:
    made = message_classes()["ForwardBackwardRequest"](model_id="m", seq_id=1, loss_fn="a")
    for _ in range(1000):
        datum = made.data.add()
        datum.model_input.add().encoded_text.tokens = np.asarray([1], np.int32).tobytes()
        tensor = datum.loss_fn_inputs["weights"]
        tensor.dtype = 1
        tensor.sparse_csr.crow_indices = np.zeros(2, np.int64).tobytes()
        tensor.shape.extend([1, 2**20])
    read = read_training_request(made.SerializeToString(), joined)
    assert "values in all" in read.mistake
    assert read.size == 0


def test_a_small_body_cannot_stand_for_many_data() -> None:
    made = message_classes()["ForwardBackwardRequest"](model_id="m", seq_id=1, loss_fn="a")
    for _ in range(2**19 + 1):
        made.data.add()
    read = read_training_request(made.SerializeToString(), joined)
    assert "data, chunks and tensors" in read.mistake
    assert not read.data
    del made.data[100_000:]
    assert read_training_request(made.SerializeToString(), joined).size > 20_000_000


def test_data_are_not_filled_up_without_a_bound() -> None:
    wide = Datum(Prompt([0]), {"target_tokens": np.zeros((1, 2**20), np.int64)})
    thin = Datum(Prompt([0]), {"target_tokens": np.zeros((1, 1), np.int64)})
    request = TrainingRequest("m", 1, [wide], "cross_entropy")
    check_training(request, 512, 64)
    with pytest.raises(InputError, match=r"with 1,048,576 targets for every token"):
        check_training(replace(request, data=[wide, *[thin] * 100]), 512, 64)


_WHOLE = message("model", 1, [row(), row([9, 8, 7])], "cross_entropy")


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, len(_WHOLE) - 1), st.integers(0, 255)), max_size=8),
    st.integers(0, len(_WHOLE)),
    st.binary(max_size=8),
)
def test_any_bytes_are_a_request_or_an_input_error(
    changes: list[tuple[int, int]], end: int, tail: bytes
) -> None:
    body = bytearray(_WHOLE)
    for place, value in changes:
        body[place] = value
    try:
        read = read_training_request(bytes(body[:end]) + tail, joined)
    except InputError:
        return
    assert read.model_id
    assert read.size >= 0


def test_who_must_wait_is_asked_to_send_again() -> None:
    assert routes.status_of(Busy("wait")) == 429


async def test_a_key_is_asked_for_in_the_sdks_ways() -> None:
    made = ServingConfig(api_key="tml-secret")
    store = SessionStore(SamplingConfig())
    app = guarded(PlainTextResponse("inside"), made, made.api_key, store, TinkerAccess())
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:

        async def status(path: str, kind: str = "application/json", **headers: str) -> int:
            sent = {"content-type": kind, **{k.replace("_", "-"): v for k, v in headers.items()}}
            return (await http.post(f"/api/v1/{path}", headers=sent)).status_code

        assert await status("auth/token") == 401
        assert await status("auth/token", x_api_key="tml-other") == 401
        assert await status("auth/token", x_api_key="tml-secret") == 200
        assert await status("get_info", x_api_key="eyJhIjoxfQ.e30.tml-secret") == 200
        assert await status("get_info", x_api_key="eyJhIjoxfQ.e30.tml-other") == 401
        assert await status("forward_backward", PROTOBUF, x_api_key="tml-secret") == 200
        assert await status("forward_backward", "text/plain", x_api_key="tml-secret") == 415
        assert (await http.get("/api/v1/files/a-secret")).status_code == 200
        assert (await http.get("/api/v1/samplers/a")).status_code == 401
