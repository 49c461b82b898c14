"""Connections to the server: half-sent requests, pauses, deadlines, and how many there may be."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import httpx
import pytest

from tests.serving.openai.test_http_limits import HELLO, QUICK
from tests.simulated import SimulatedEngine
from turnwise.config import Config
from turnwise.serving.openai import protection
from turnwise.serving.openai import server as server_module
from turnwise.serving.openai.server import OpenAIServer


@pytest.fixture(scope="module")
def server(make_config: Callable[..., Config], tokenizer: Any) -> OpenAIServer:
    serving = {"port": 0, "api_key": "secret", "max_body_mb": 1, "host": "0.0.0.0"}
    engine = SimulatedEngine(vocab_size=len(tokenizer), latency=QUICK)
    return OpenAIServer(make_config(serving=serving, sampling={"max_tokens": 24}), engine)


@pytest.fixture
async def address(
    server: OpenAIServer, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[str, int]]:
    monkeypatch.setattr(server_module, "max_connections", lambda: 8)
    url = httpx.URL(await server.start())
    try:
        yield url.host, url.port or 0
    finally:
        await server.stop()


async def exchange(address: tuple[str, int], pieces: Iterable[bytes], pause: float = 0.0) -> bytes:
    """Return the answer to pieces of a request, until the server closes the connection."""
    reader, writer = await asyncio.open_connection(*address)
    answer = asyncio.create_task(reader.read(4_096))
    for piece in pieces:
        if answer.done():
            break
        writer.write(piece)
        await asyncio.sleep(pause)
    try:
        async with asyncio.timeout(120):
            return await answer
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_a_server_on_all_addresses_names_one_that_others_reach(
    address: tuple[str, int], server: OpenAIServer
) -> None:
    assert "0.0.0.0" not in server.base_url
    async with httpx.AsyncClient() as http:
        root = server.base_url.removesuffix("/v1")
        assert (await http.get(f"{root}/health")).status_code == 200


async def test_half_sent_requests_keep_nobody_out_and_end(
    address: tuple[str, int], server: OpenAIServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    health = server.base_url.removesuffix("/v1") + "/health"
    clock = asyncio.get_running_loop().time
    for seconds in (1.0, 8.0, 64.0):  # until all of it fits into the deadline
        monkeypatch.setattr(protection, "_HEAD_SECONDS", seconds)
        began = clock()
        half = [
            asyncio.create_task(exchange(address, [b"GET /health HTTP/1.1\r\nHost: localhost\r\n"]))
            for _ in range(60)
        ]
        async with asyncio.timeout(120), httpx.AsyncClient(timeout=60) as http:
            while sum(task.done() for task in half) < 52:  # all but the 8 that there is room for
                await asyncio.sleep(0.01)
            served = [(await http.get(health)).status_code for _ in range(3)]
        in_time = clock() < began + seconds
        answers = await asyncio.gather(*half)
        if in_time:
            break
    assert served == [200] * 3
    assert sum(answer.startswith(b"HTTP/1.1 503") for answer in answers) >= 52
    assert any(answer.startswith(b"HTTP/1.1 408") for answer in answers)


async def test_a_body_sent_after_its_answer_leaves_no_connection_open(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protection, "_HEAD_SECONDS", 2.0)
    reader, writer = await asyncio.open_connection(*address)
    writer.write(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n")
    async with asyncio.timeout(60):
        assert b" 401 " in await reader.readline()  # it needs a key, and is not read
        writer.write(b"{}")
        await reader.read()  # until the server closes
    writer.close()


@pytest.mark.parametrize(
    ("deadline", "pieces", "pause", "status"),
    [
        ("_HEAD_SECONDS", [b"G"], 0.0, b"408"),
        ("_HEAD_SECONDS", [b"GET / HTTP/1.1\r\n", *[b"a: b\r\n"] * 30], 0.1, b"408"),
        (
            "",
            [b"GET / HTTP/1.1\r\n", *[b"a: " + b"b" * 4_000 + b"\r\n"] * 20],
            0.01,
            b"431",
        ),
        (
            "_BODY_SECONDS",
            [
                b"POST /tokenize HTTP/1.1\r\nAuthorization: Bearer secret\r\n",
                b"Content-Length: 500\r\n\r\n",
                *[b" "] * 30,
            ],
            0.1,
            b"",
        ),
    ],
    ids=["nothing", "head", "long head", "body"],
)
async def test_a_request_that_does_not_come_to_its_end_is_ended(
    address: tuple[str, int],
    monkeypatch: pytest.MonkeyPatch,
    deadline: str,
    pieces: list[bytes],
    pause: float,
    status: bytes,
) -> None:
    if deadline:  # the others keep their half minute and more
        monkeypatch.setattr(protection, deadline, 1.0)
    answer = await exchange(address, pieces, pause)
    assert answer.startswith(b"HTTP/1.1 " + status) if status else not answer


async def test_a_connection_may_be_used_again_after_a_pause(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    body = json.dumps({"messages": HELLO, "max_tokens": 4}).encode()
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\n"
    )
    head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    reader, writer = await asyncio.open_connection(*address)
    for head_seconds, pause in ((1.0, 1.5), (30.0, 0.0)):  # longer than a head may take
        writer.write(head)
        await asyncio.sleep(0.05)
        monkeypatch.setattr(protection, "_HEAD_SECONDS", head_seconds)
        writer.write(body)
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
        assert answer.startswith(b"HTTP/1.1 200")
        length = int(answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        await asyncio.wait_for(reader.readexactly(length), 60)
        await asyncio.sleep(pause)
    writer.close()
