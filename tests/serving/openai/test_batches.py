"""Batches of chats, and SageMaker's path, as vLLM's own server answers them."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from tests.serving.openai.test_http_limits import HELLO, QUICK, Noting, told
from tests.simulated import Latency
from turnwise.config import Config
from turnwise.serving.openai.server import OpenAIServer
from turnwise.trajectory import Trajectory, audit

BATCH = "/v1/chat/completions/batch"


@pytest.fixture(scope="module")
def engine(tokenizer: Any) -> Noting:
    return Noting(vocab_size=len(tokenizer), latency=QUICK)


@pytest.fixture(scope="module")
async def http(make_config: Callable[..., Config], engine: Noting) -> AsyncIterator[Any]:
    config = make_config(sampling={"max_tokens": 8, "temperature": 0.5}, serving={"api_key": "k"})
    transport = httpx.ASGITransport(await OpenAIServer(config, engine).application())
    key = {"Authorization": "Bearer k"}
    async with httpx.AsyncClient(transport=transport, base_url="http://t", headers=key) as http:
        yield http


def asked(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{number} plus 30?"}]


@pytest.mark.parametrize("more", [{}, {"logprobs": True, "top_logprobs": 2}], ids=str)
async def test_a_batch_answers_its_chats_as_turns_of_its_session(
    http: httpx.AsyncClient, engine: Noting, more: dict[str, Any]
) -> None:
    body = {"model": "any", "messages": [asked(n) for n in range(5)], **more}
    name = f"batch-{len(more)}"
    made = await http.post(f"/sessions/{name}{BATCH}", json=body)
    assert made.status_code == 200, made.text
    choices = made.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(5))
    for number, choice in enumerate(choices):
        alone = {"messages": asked(number), "max_tokens": 8, **more}
        one = (await http.post("/v1/chat/completions", json=alone)).json()["choices"][0]
        assert choice == {**one, "index": number}
    assert engine.sampled[-1].temperature == 0.5
    described = (await http.get(f"/sessions/{name}")).json()
    trajectory = Trajectory.from_json(json.dumps(described["trajectory"]))
    assert len(trajectory.turns) == 5
    assert audit(trajectory).first_violation is None
    assert made.json()["usage"]["completion_tokens"] == trajectory.sampled_tokens


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"messages": HELLO}, "each conversation of a batch is a list"),
        ({"messages": []}, "a batch needs a list of conversations"),
        ({"messages": "x"}, "a batch needs a list of conversations"),
        ({"messages": [HELLO] * 1_025}, "at most 1,024 conversations"),
        ({"stream": True}, "not streamed"),
        ({"n": 2}, "one completion of each"),
        ({"messages": [HELLO, [{"role": "user", "content": None}]]}, "messages[0].content"),
        ({"temperature": "hot"}, "temperature"),
    ],
    ids=str,
)
async def test_a_batch_that_cannot_be_answered_is_refused(
    http: httpx.AsyncClient, more: dict[str, Any], said: str
) -> None:
    answer = await http.post(BATCH, json={"messages": [HELLO], **more})
    assert said in told(answer, 400)


async def test_a_batch_whose_client_leaves_ends(
    make_config: Callable[..., Config], tokenizer: Any
) -> None:
    slow = Latency(prefill_token=0, step=0.05, step_request=0)
    engine = Noting(vocab_size=len(tokenizer), latency=slow, mean_tokens=100_000)
    server = OpenAIServer(make_config(serving={"port": 0}), engine)
    root = (await server.start()).removesuffix("/v1")
    try:
        async with httpx.AsyncClient(base_url=root) as http, asyncio.timeout(60):
            body = {"messages": [HELLO] * 3, "max_tokens": 400}
            asking = asyncio.create_task(http.post(f"/sessions/gone{BATCH}", json=body))
            while await engine.num_in_flight() < 3:
                await asyncio.sleep(0.01)
            asking.cancel()
            while await engine.num_in_flight() > 0:
                await asyncio.sleep(0.01)
        session = server.sessions.get("gone")
        assert session is not None
        assert (len(session.trajectory.turns), session.lost_turns) == (0, 3)
    finally:
        await server.stop()


async def test_sagemakers_paths_lead_to_each_api(http: httpx.AsyncClient) -> None:
    chat = await http.post("/invocations", json={"model": "any", "messages": HELLO})
    assert chat.json()["object"] == "chat.completion"
    completion = await http.post("/invocations", json={"model": "any", "prompt": "12 plus"})
    assert completion.json()["object"] == "text_completion"
    response = await http.post("/invocations", json={"model": "any", "input": "12 plus"})
    assert response.json()["object"] == "response"
    assert "has none of messages, prompt, input" in told(
        await http.post("/invocations", json={"model": "any"}), 400
    )
    assert (await http.post("/invocations", content=b"{")).status_code == 400
    for method in ("GET", "POST"):
        assert (await http.request(method, "/ping", headers={"Authorization": ""})).is_success
    stranger = {"Authorization": "Bearer wrong"}
    told(await http.post("/invocations", json={"messages": HELLO}, headers=stranger), 401)
