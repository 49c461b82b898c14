"""Clients with a pool, and connections that the server closes when idle (rLLM 592 and 505)."""

import asyncio
import inspect
import random
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import httpx
import openai
import pytest

from tests.serving.openai.test_http_limits import HELLO, QUICK
from tests.simulated import SimulatedEngine
from turnwise.config import Config
from turnwise.serving.openai import server as server_module
from turnwise.serving.openai.protection import HttpConnection
from turnwise.serving.openai.server import OpenAIServer

POOL = 0.2
"""Seconds for which the pools of the test's clients keep a connection."""
AGENTS, TURNS = 8, 6
Ask = Callable[[str], Awaitable[int]]


@pytest.fixture(scope="module")
async def server(make_config: Callable[..., Config], tokenizer: Any) -> AsyncIterator[OpenAIServer]:
    engine = SimulatedEngine(vocab_size=len(tokenizer), latency=QUICK)
    server = OpenAIServer(make_config(serving={"port": 0}), engine)
    await server.start()
    yield server
    await server.stop()


def test_pools_give_a_connection_up_before_the_server_does() -> None:
    """A request can cross the close of its connection; so the client has to close first."""
    kept = (
        httpx.Limits().keepalive_expiry,
        openai.DEFAULT_CONNECTION_LIMITS.keepalive_expiry,
        inspect.signature(aiohttp.TCPConnector).parameters["keepalive_timeout"].default,
    )
    for seconds in kept:
        assert not isinstance(seconds, float | int) or seconds < server_module._KEEP_ALIVE_SECONDS
    assert any(isinstance(seconds, float | int) for seconds in kept)


async def test_a_request_that_came_before_the_close_is_answered(server: OpenAIServer) -> None:
    url = httpx.URL(server.base_url)
    loop = asyncio.get_running_loop()
    with socket.create_connection((url.host, url.port)) as client:
        for _ in range(3):
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert server._server is not None
            for connection in list(server._server.server_state.connections):
                if connection.client == client.getsockname()[:2]:  # type: ignore[union-attr]
                    assert isinstance(connection, HttpConnection)
                    connection.timeout_keep_alive_handler()  # its time is over just now
            client.setblocking(False)
            async with asyncio.timeout(60):
                said = await loop.sock_recv(client, 65_536)
            client.setblocking(True)
            assert said.startswith(b"HTTP/1.1 200")


async def test_a_pause_as_long_as_the_pools_expiry_fails_no_turn(
    server: OpenAIServer,
) -> None:
    body = {"model": "any", "messages": HELLO, "max_tokens": 2}
    limits = httpx.Limits(keepalive_expiry=POOL)
    async with (
        httpx.AsyncClient(timeout=60, limits=limits) as pool,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(keepalive_timeout=POOL)) as session,
        httpx.AsyncClient(timeout=60, limits=limits) as beneath,
    ):
        sdk = openai.AsyncOpenAI(
            base_url="http://unused", api_key="none", max_retries=0, http_client=beneath
        )

        async def by_httpx(url: str) -> int:
            return (await pool.post(f"{url}/chat/completions", json=body)).status_code

        async def by_aiohttp(url: str) -> int:
            async with session.post(f"{url}/chat/completions", json=body) as answer:
                await answer.read()
                return answer.status

        async def by_sdk(url: str) -> int:
            own = sdk.with_options(base_url=url)
            await own.post("/chat/completions", body=body, cast_to=httpx.Response)
            return 200

        async def agent(ask: Ask, name: str, pauses: random.Random) -> None:
            for _ in range(TURNS):
                assert await ask(server.session_url(name)) == 200
                await asyncio.sleep(POOL * pauses.uniform(0.9, 1.1))

        names = [
            (ask, f"{ask.__name__}-{n}")
            for ask in (by_httpx, by_aiohttp, by_sdk)
            for n in range(AGENTS)
        ]
        await asyncio.gather(*(agent(ask, name, random.Random(name)) for ask, name in names))
    turns = [len(session.trajectory.turns) for session in server.sessions]
    assert turns == [TURNS] * len(names)


async def test_a_connection_that_was_reset_ends_without_a_word(
    server: OpenAIServer, caplog: pytest.LogCaptureFixture
) -> None:
    url, loop = httpx.URL(server.base_url), asyncio.get_running_loop()
    reset = struct.pack("ii", 1, 0)  # linger for no time
    with socket.create_connection((url.host, url.port)) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        client.setblocking(False)
        assert b"200 OK" in await loop.sock_recv(client, 4096)
        assert server._server is not None
        name = client.getsockname()[:2]
        kept = [c for c in server._server.server_state.connections if c.client == name]  # type: ignore[union-attr]
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
    (connection,) = kept
    assert isinstance(connection, HttpConnection)
    while not connection.transport.is_closing():
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.01)
    connection.timeout_keep_alive_handler()  # the timer of its idle time is still running
    assert not caplog.records
