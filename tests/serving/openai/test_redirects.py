"""Redirects to the process that has a session, as clients' libraries follow them.

Another server, before a simulated engine, has the sessions. Both need a key, which no library sends
to a second address.
"""

import asyncio
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import httpx
import openai
import pytest
import requests

from tests.serving.openai.test_http_limits import HELLO, QUICK
from tests.simulated import SimulatedEngine
from turnwise.chat.session_store import SessionStore
from turnwise.config import Config, SamplingConfig
from turnwise.serving.openai.server import OpenAIServer

KEY = "a-long-key"
LONG = {"messages": HELLO, "padding": "x" * 80_000, "n": 12, "max_tokens": 400}
HEADERS = {
    "Accept-Encoding": "gzip, deflate",
    "Content-Type": "application/json",
    "Authorization": f"Bearer {KEY}",
}
Read = tuple[int, bytes]


class Places:
    """One place for all sessions: a server at another address."""

    def __init__(self, base_url: str) -> None:
        self.requests: Counter[str] = Counter()
        self.store = SessionStore(SamplingConfig())
        self.base_urls = {"sessions-0": base_url}
        self.count = 0

    def base_url_of(self, name: str) -> str | None:
        return self.base_urls["sessions-0"] if name else None

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass

    async def open(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    async def list_sessions(self, *_: Any) -> Any:
        return []


@pytest.fixture(scope="module")
async def root(make_config: Callable[..., Config], tokenizer: Any) -> AsyncIterator[str]:
    engine = SimulatedEngine(vocab_size=len(tokenizer), latency=QUICK, mean_tokens=100_000)
    config = make_config(serving={"port": 0, "api_key": KEY})
    behind = OpenAIServer(config, engine)
    front = OpenAIServer(config, engine, processes=Places(await behind.start()))
    yield (await front.start()).removesuffix("/v1")
    await front.stop()
    await behind.stop()


async def by_httpx(method: str, url: str, body: bytes | None) -> Read:
    async with httpx.AsyncClient(timeout=60, follow_redirects=True) as client:
        answer = await client.request(method, url, content=body, headers=HEADERS)
        return answer.status_code, answer.content


async def by_aiohttp(method: str, url: str, body: bytes | None) -> Read:
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url, data=body, headers=HEADERS, allow_redirects=True) as answer,
    ):
        return answer.status, await answer.read()


async def by_requests(method: str, url: str, body: bytes | None) -> Read:
    def ask() -> Read:
        answer = requests.request(method, url, data=body, headers=HEADERS, timeout=60)
        return answer.status_code, answer.content

    return await asyncio.to_thread(ask)


async def by_curl(method: str, url: str, body: bytes | None) -> Read:
    command = ["curl", "-sS", "-L", "-w", "%{http_code}", "--compressed", "-m", "60", url]
    command += ["-I"] if method == "HEAD" else ["-X", method]
    command += ["-o", os.devnull] if method == "HEAD" else []
    command += ["-H", "Content-Type: application/json", "-H", "Expect:"]
    command += ["-H", f"Authorization: Bearer {KEY}"]
    if body is not None:
        command += ["--data-binary", "@-"]
    pipe = asyncio.subprocess.PIPE
    curl = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    said, errors = await curl.communicate(body)
    assert curl.returncode == 0, errors
    return int(said[-3:]), said[:-3]


@pytest.mark.parametrize("ask", [by_httpx, by_aiohttp, by_requests, by_curl])
async def test_a_redirected_request_is_answered(root: str, ask: Any) -> None:
    name = f"{ask.__name__}-1"
    chat = f"{root}/sessions/{name}/v1/chat/completions"
    long = json.dumps(LONG).encode()
    short = json.dumps({"messages": HELLO, "max_tokens": 4, "stream": True}).encode()
    made = [
        await ask("POST", chat, long),
        await ask("POST", f"{chat}?of=%20", short),
        await ask("GET", f"{root}/sessions/{name}", None),
        await ask("HEAD", f"{root}/sessions/{name}", None),
        await ask("POST", chat, b"{}"),
    ]
    assert len(long) > 65_536
    assert [status for status, _ in made] == [200, 200, 200, 200, 400]
    assert json.loads(made[0][1])["choices"]
    assert made[1][1].rstrip().endswith(b"data: [DONE]")
    assert len(json.loads(made[2][1])["trajectory"]["turns"]) == 13
    assert made[3][1] == b""


async def test_openais_client_follows_a_redirect_by_session_header(root: str) -> None:
    headers = {"X-Session-ID": "by-header"}
    async with openai.AsyncOpenAI(
        base_url=f"{root}/v1", api_key=KEY, default_headers=headers
    ) as client:
        made = await client.chat.completions.create(model="any", messages=HELLO, max_tokens=4)  # type: ignore[arg-type]
        assert made.choices
    described = json.loads((await by_httpx("GET", f"{root}/sessions/by-header", None))[1])
    assert described["turns"] == 1


async def test_a_redirect_opens_one_session_only(root: str) -> None:
    async with httpx.AsyncClient(base_url=root, timeout=60) as http:
        sent = {"json": {"messages": HELLO, "max_tokens": 4}}
        chat = "/sessions/mine/v1/chat/completions"
        assert (await http.post(chat, **sent)).status_code == 401
        moved = await http.post(chat, **sent, headers=HEADERS)
        assert moved.status_code == 307
        target = moved.headers["location"]
        assert KEY not in target
        assert (await http.post(target, **sent)).status_code == 200
        for other in (target.replace("mine", "yours"), target[:-1], target.partition("?")[0]):
            assert (await http.post(other, **sent)).status_code == 401
        elsewhere = target.replace("/sessions/mine/v1/chat/completions", "/v1/chat/completions")
        assert (await http.post(elsewhere, **sent)).status_code == 401
