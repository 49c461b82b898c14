"""Sessions by the thousand: those of agents' trajectories, and those that clients never close.

Nothing may stay of them but what limits say. The numbers of each tenth are logged
(`--log-cli-level=INFO`): memory, lateness of the event loop, 99th percentile of answers to /health.
"""

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import httpx
import psutil
import pytest

from tests.simulated import Latency, SimulatedEngine
from turnwise.chat.session import Session
from turnwise.config import Config
from turnwise.rollouts import Problem, Runner
from turnwise.serving.openai.server import OpenAIServer

logger = logging.getLogger(__name__)

HERE = "tests.rollouts.test_many_sessions"
QUICK = Latency(prefill_token=0.0, step=1e-4, step_request=0.0)
HELLO = [{"role": "user", "content": "12 plus 30?"}]
COUNTS = [200, pytest.param(30_000, marks=pytest.mark.slow)]
N = 10


async def ask_once(base_url: str, row: dict[str, Any]) -> float:
    """An agent of one short turn."""
    async with aiohttp.ClientSession() as http:
        body = {"messages": HELLO, "max_tokens": 4}
        async with http.post(f"{base_url}/chat/completions", json=body) as answer:
            answer.raise_for_status()
            await answer.read()
    return 1.0


@asynccontextmanager
async def measured(name: str, health: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
    """Print the memory at the end of the block, and what was slowest during it."""
    clock = asyncio.get_running_loop().time
    late, answers = [0.0], [0.0]

    async def watch() -> None:
        while True:
            before = clock()
            await asyncio.sleep(0.05)
            late.append(clock() - before - 0.05)
            before = clock()
            await health()
            answers.append(clock() - before)

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    slow = sorted(answers)[int(0.99 * (len(answers) - 1))]
    logger.info("%s: %.0f MB, %.3f s late, /health %.3f s", name, memory() / 2**20, max(late), slow)


def sessions_alive() -> int:
    gc.collect()
    return sum(isinstance(thing, Session) for thing in gc.get_objects())


def memory() -> int:
    return int(psutil.Process().memory_info().rss)


@pytest.mark.parametrize("count", COUNTS)
async def test_the_sessions_of_trajectories_end_with_them(
    make_config: Callable[..., Config], tokenizer: Any, count: int
) -> None:
    engine = SimulatedEngine(vocab_size=len(tokenizer), latency=QUICK)
    rollout = {"loop": "agent", "agent": f"{HERE}:ask_once", "concurrency": 64}
    config = make_config(rollout=rollout, sampling={"n": N, "max_tokens": 8})
    runner = Runner(config, tokenizer)
    rows = asyncio.Semaphore(8)

    async def group(number: int) -> None:
        async with rows:
            problem = Problem(f"rows:{number}", {"question": "12 plus 30?", "answer": "42"})
            made = await runner.run_group(engine, problem, config.sampling, f"tag-{number}")
        assert len(made.trajectories) == N, made.causes

    used = list[int]()
    async with runner.opened(engine), aiohttp.ClientSession() as http:
        root = runner.loops["agent"].server.base_url.removesuffix("/v1")

        async def health() -> None:
            async with http.get(f"{root}/health") as answer:
                assert answer.status == 200

        for tenth in range(10):
            async with measured(f"trajectories, tenth {tenth + 1}", health):
                each = count // 10 // N
                numbers = range(tenth * each, (tenth + 1) * each)
                await asyncio.gather(*map(group, numbers))
            used.append(memory())
            assert len(runner.loops["agent"].server.sessions) == 0
            assert sessions_alive() <= 64
    if count > 1000:  # 15,000 trajectories: at most 4 KB of each
        assert used[-1] - used[4] < 60 * 2**20


@pytest.mark.parametrize("count", COUNTS)
async def test_sessions_that_clients_never_close_are_bounded(
    make_config: Callable[..., Config], tokenizer: Any, count: int
) -> None:
    engine = SimulatedEngine(vocab_size=len(tokenizer), latency=QUICK)
    most = count // 25  # megabytes, of a megabyte for each 1,000 sessions or so
    config = make_config(serving={"port": 0, "session_memory_mb": max(1, most // 100)})
    server = OpenAIServer(config, engine)
    await server.start()
    used, held = list[int](), list[int]()
    limits = httpx.Limits(max_connections=16)
    root = server.base_url.removesuffix("/v1")
    try:
        async with (
            httpx.AsyncClient(timeout=60, limits=limits, base_url=root) as http,
            httpx.AsyncClient(timeout=60, base_url=root) as other,
        ):

            async def client(number: int) -> None:
                opened = await http.post("/sessions", json={"id": f"client-{number}"})
                assert opened.status_code == 201
                body = {"messages": HELLO, "max_tokens": 4}
                path = f"/sessions/client-{number}/v1/chat/completions"
                assert (await http.post(path, json=body)).status_code == 200

            for tenth in range(10):
                async with measured(f"clients, tenth {tenth + 1}", lambda: other.get("/health")):
                    for start in range(tenth * count // 10, (tenth + 1) * count // 10, 20):
                        await asyncio.gather(*map(client, range(start, start + 20)))
                used.append(memory())
                held.append(len(server.sessions))
            assert server.sessions._bytes <= config.serving.session_memory_mb << 20
            logger.info("sessions held: %s", held)
            last = await http.get(f"/sessions/client-{count - 1}")
            assert last.status_code == 200
    finally:
        await server.stop()
    if count > 1000:
        assert held[-1] < count
        assert held[-1] <= 1.1 * held[4]
        assert used[-1] - used[4] < 60 * 2**20
