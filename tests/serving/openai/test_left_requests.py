"""Clients that leave without their answer: by a socket, in sessions and without.

Before a simulated engine, which would take minutes to finish what they asked for.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from tests.serving.test_lost_channels import LocalActor, RemoteProcess
from tests.simulated import Latency, SimulatedEngine
from turnwise.config import Config
from turnwise.core.actor import ActorHandle
from turnwise.engine.protocol import Engine
from turnwise.errors import EngineError
from turnwise.serving.front_process import FrontProcess
from turnwise.serving.front_processes import FrontProcesses, Process
from turnwise.serving.openai.server import OpenAIServer
from turnwise.serving.scheduler import Scheduler

HELLO = [{"role": "user", "content": "12 plus 30?"}]
CLIENTS = 50
SECONDS = 60


class HereProcess(FrontProcess):
    """A process for sessions that lives in this one, before the same engine."""

    engine: SimulatedEngine

    async def start(self, port: int, lost: Any) -> tuple[str, str]:
        return await self.serve(OpenAIServer(self.config, self.scheduler, port), lost), ""

    def _attach(self, name: str, worker: Any) -> Engine:
        return self.engine


class HereProcesses(FrontProcesses):
    def create(self, process: Process) -> ActorHandle:
        return LocalActor(RemoteProcess(self._class(self.config)), process.name, EngineError)


@pytest.fixture(scope="module")
def engine(tokenizer: Any) -> SimulatedEngine:
    """Eight seconds for a hundred tokens."""
    latency = Latency(prefill_token=0.0, step=0.08, step_request=0.0)
    return SimulatedEngine(vocab_size=len(tokenizer), latency=latency, mean_tokens=10**9)


@pytest.fixture(scope="module")
async def server(
    engine: SimulatedEngine, make_config: Callable[..., Config], model_path: str
) -> AsyncIterator[OpenAIServer]:
    config = make_config(
        model={"path": model_path, "max_length": 4096},
        serving={"port": 0, "session_processes": 1},
    )
    HereProcess.engine = engine
    scheduler = Scheduler(config.serving, SECONDS)
    scheduler.add("worker-0", engine)
    processes = HereProcesses(config, scheduler, HereProcess)
    server = OpenAIServer(config, scheduler, processes=processes)
    await server.start()
    yield server
    await server.stop()


async def leave(url: str, stream: bool, running: asyncio.Event) -> None:
    """Send a request, and close the connection in the middle of its answer."""
    target = httpx.URL(f"{url}/chat/completions")
    body = json.dumps({"messages": HELLO, "max_tokens": 2000, "stream": stream}).encode()
    lines = [
        f"POST {target.path} HTTP/1.1",
        f"Host: {target.host}:{target.port}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    ]
    _, writer = await asyncio.open_connection(target.host, target.port)
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
    await running.wait()
    writer.close()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("way", ["plain", "session", "process"])
async def test_what_nobody_waits_for_is_neither_computed_nor_recorded(
    server: OpenAIServer, engine: SimulatedEngine, way: str, stream: bool
) -> None:
    root = server.base_url.removesuffix("/v1")
    async with httpx.AsyncClient(timeout=SECONDS, follow_redirects=True) as http:
        name, url = f"{way}-{stream}", server.base_url
        if way == "session":  # of the server's own process
            url = f"{root}/sessions/{name}/v1"
        elif way != "plain":
            opened = (await http.post(f"{root}/sessions", json={"id": name})).json()
            url = opened["base_url"]
            assert not url.startswith(root)
        running = asyncio.Event()
        async with asyncio.timeout(SECONDS), asyncio.TaskGroup() as clients:
            for _ in range(CLIENTS):
                clients.create_task(leave(url, stream, running))
            while await engine.num_in_flight() < CLIENTS:
                await asyncio.sleep(0.01)
            running.set()
        async with asyncio.timeout(SECONDS):  # 2,000 tokens would take 160 s
            while await engine.num_in_flight():
                await asyncio.sleep(0.01)
        body = {"messages": HELLO, "max_tokens": 3}
        async with asyncio.timeout(SECONDS):
            answer = await http.post(f"{url}/chat/completions", json=body)
        assert answer.status_code == 200
        if way != "plain":
            described = (await http.get(f"{root}/sessions/{name}")).json()
            (turn,) = described["trajectory"]["turns"]
            assert len(turn["completion_token_ids"]) == 3


async def test_a_server_that_everybody_can_reach_says_so(
    engine: SimulatedEngine, make_config: Callable[..., Config], caplog: pytest.LogCaptureFixture
) -> None:
    for serving in ({"host": "127.0.0.1"}, {"host": "0.0.0.0", "api_key": "k"}):
        server = OpenAIServer(make_config(serving=serving), engine, port=0)
        await server.start()
        await server.stop()
    assert "open to everybody" not in caplog.text
    server = OpenAIServer(make_config(serving={"host": "0.0.0.0"}), engine, port=0)
    with caplog.at_level(logging.WARNING):
        await server.start()
    await server.stop()
    assert "0.0.0.0" in caplog.text
    assert "is open to everybody who can reach this address: set serving.api_key" in caplog.text
