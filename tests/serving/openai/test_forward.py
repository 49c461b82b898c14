"""Forwarded answers as clients' libraries read them (Miles 851 and 1828): their own framing, once.

Another server, before a simulated engine, has the sessions.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import httpx
import pytest
import requests
import uvicorn
from starlette.responses import PlainTextResponse

from tests.serving.openai.test_http_limits import HELLO, QUICK
from tests.simulated import SimulatedEngine
from turnwise.chat.session_store import SessionStore
from turnwise.config import Config, SamplingConfig
from turnwise.serving.openai.address import listen
from turnwise.serving.openai.connections import Connection
from turnwise.serving.openai.forward import ForwardSessions
from turnwise.serving.openai.middleware import Gate
from turnwise.serving.openai.server import OpenAIServer, _Server

LONG = {"messages": HELLO, "padding": "x" * 80_000, "n": 12, "max_tokens": 400}
HEADERS = {"Accept-Encoding": "gzip, deflate", "Content-Type": "application/json"}
Read = tuple[int, list[tuple[str, str]], bytes]
Ask = Callable[[str, str, bytes | None], "asyncio.Future[Read]"]


class Places:
    """One place for all sessions: a server at another address."""

    def __init__(self, base_url: str) -> None:
        self._place = base_url, asyncio.get_running_loop().create_future()

    def place_of(self, name: str) -> Any:
        return self._place if name else None


@pytest.fixture(scope="module")
async def root(make_config: Callable[..., Config], tokenizer: Any) -> AsyncIterator[str]:
    engine = SimulatedEngine(vocab_size=len(tokenizer), latency=QUICK, mean_tokens=100_000)
    behind = OpenAIServer(make_config(serving={"port": 0}), engine)
    forwarding = ForwardSessions(PlainTextResponse("here"), Places(await behind.start()))  # type: ignore[arg-type]
    listening = listen("127.0.0.1", 0)
    options = uvicorn.Config(
        Gate(forwarding, 1 << 20, None, SessionStore(SamplingConfig())),
        http=Connection,
        ws="none",
        lifespan="off",
        log_level="error",
    )
    front = _Server(options)
    serving = asyncio.create_task(front.serve(sockets=[listening]))
    await front.ready.wait()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    front.should_exit = True
    await serving
    await forwarding.close()
    await behind.stop()


async def by_httpx(method: str, url: str, body: bytes | None) -> Read:
    async with httpx.AsyncClient(timeout=60) as client:
        answer = await client.request(method, url, content=body, headers=HEADERS)
        return answer.status_code, answer.headers.multi_items(), answer.content


async def by_aiohttp(method: str, url: str, body: bytes | None) -> Read:
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url, data=body, headers=HEADERS) as answer,
    ):
        return answer.status, list(answer.headers.items()), await answer.read()


async def by_requests(method: str, url: str, body: bytes | None) -> Read:
    def ask() -> Read:
        answer = requests.request(method, url, data=body, headers=HEADERS, timeout=60)
        return answer.status_code, list(answer.raw.headers.items()), answer.content

    return await asyncio.to_thread(ask)


async def by_curl(method: str, url: str, body: bytes | None) -> Read:
    command = ["curl", "-sS", "-i", "--compressed", "-m", "60", url]
    command += ["-I"] if method == "HEAD" else ["-X", method]
    command += ["-H", "Content-Type: application/json", "-H", "Expect:"]
    if body is not None:
        command += ["--data-binary", "@-"]
    pipe = asyncio.subprocess.PIPE
    curl = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    said, errors = await curl.communicate(body)
    assert curl.returncode == 0, errors
    head, _, content = said.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = [(line.partition(":")[0], line.partition(":")[2].strip()) for line in lines]
    return int(first.split()[1]), headers, content


@pytest.mark.parametrize("ask", [by_httpx, by_aiohttp, by_requests, by_curl])
async def test_a_forwarded_answer_is_read_as_one_that_is_not(root: str, ask: Any) -> None:
    name = f"{ask.__name__}-1"
    chat = f"{root}/sessions/{name}/v1/chat/completions"
    long = json.dumps(LONG).encode()
    short = json.dumps({"messages": HELLO, "max_tokens": 4, "stream": True}).encode()
    made = [
        await ask("POST", chat, long),
        await ask("POST", chat, short),
        await ask("GET", f"{root}/sessions/{name}", None),
        await ask("HEAD", f"{root}/sessions/{name}", None),
        await ask("POST", chat, b"{}"),
    ]
    assert len(long) > 65_536
    assert [status for status, _, _ in made] == [200, 200, 200, 200, 400]
    for _, headers, _ in made:
        names = [header.lower() for header, _ in headers]
        assert names.count("date") == names.count("server") == 1
        assert names.count("content-length") + names.count("transfer-encoding") == 1
    assert json.loads(made[0][2])["choices"]
    assert made[1][2].rstrip().endswith(b"data: [DONE]")
    assert len(json.loads(made[2][2])["trajectory"]["turns"]) == 13
    assert len(made[2][2]) > 65_536
    assert made[3][2] == b""
