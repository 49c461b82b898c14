"""Answers that an update or a sleep of an engine cuts off, where no fleet is in front of it: they
go on afterwards, or fail, and are never taken for whole ones."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
import torch

from tests.simulated import Latency, SimulatedEngine
from turnwise.compat.nemo_rl import VllmAsyncGenerationWorker
from turnwise.config import Config
from turnwise.serving.openai.server import OpenAIServer

STEPS = Latency(prefill_token=0.0, step=1e-3, step_request=0.0)
MOST = 200
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": MOST}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/chat/completions", CHAT),
    "chat streamed": ("/chat/completions", CHAT | {"stream": True}),
    "two chats": ("/chat/completions", CHAT | {"n": 2}),
    "responses": ("/responses", {"input": "a", "max_output_tokens": MOST}),
    "responses streamed": (
        "/responses",
        {"input": "a", "max_output_tokens": MOST, "stream": True},
    ),
    "messages": ("/messages", CHAT | {"model": "m"}),
    "completions": ("/completions", {"prompt": [5, 6, 7], "max_tokens": MOST}),
}


@pytest.fixture
def engine(tokenizer: Any) -> SimulatedEngine:
    return SimulatedEngine(vocab_size=len(tokenizer), latency=STEPS, mean_tokens=10**9)


@pytest.fixture
def config(make_config: Callable[..., Config]) -> Config:
    return make_config(serving={"port": 0}, sampling={"max_tokens": MOST})


@pytest.fixture
async def server(engine: SimulatedEngine, config: Config) -> AsyncIterator[OpenAIServer]:
    server = OpenAIServer(config, engine)
    await server.start()
    yield server
    await server.stop()


async def cut(engine: SimulatedEngine, asked: "asyncio.Task[Any]") -> Any:
    """Return what a client gets whose answer an update cuts off, once it has begun."""
    while not any(each.delivered for each in engine._running):
        await asyncio.sleep(0.001)
    await engine.pause("abort")
    await engine.resume()
    return await asked


@pytest.mark.parametrize("kind", ASKED)
async def test_no_client_gets_a_part_of_an_answer_as_a_whole_one(
    server: OpenAIServer, engine: SimulatedEngine, kind: str
) -> None:
    path, body = ASKED[kind]
    where = "/v1" if kind == "completions" else "/sessions/cut/v1"
    async with httpx.AsyncClient(timeout=60) as http:
        url = server.base_url.removesuffix("/v1") + where + path
        answer = await cut(engine, asyncio.create_task(http.post(url, json=body)))
    assert "an update or a sleep of the engine ended" in answer.text
    assert 'finish_reason":"abort' not in answer.text.replace(" ", "")
    if "stream" not in body:
        assert answer.status_code == 503
    if kind != "completions":
        session = server.sessions.get("cut")
        assert session is not None
        assert not session.trajectory.turns


async def test_a_row_of_a_trainers_batch_goes_on_after_an_update(
    engine: SimulatedEngine, config: Config
) -> None:
    worker = VllmAsyncGenerationWorker(config)
    worker._engine = engine  # type: ignore[assignment]
    batch = {"input_ids": torch.tensor([[5, 6, 7]]), "input_lengths": torch.tensor([3])}

    async def rows() -> list[dict[str, torch.Tensor]]:
        return [row async for _, row in worker.generate_async(batch)]

    (row,) = await cut(engine, asyncio.create_task(rows()))
    assert row["generation_lengths"].tolist() == [MOST]
    assert row["output_ids"][0, 3:].tolist() == engine.expected([5, 6, 7], MOST)
