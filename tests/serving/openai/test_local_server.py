"""A server on a local address: its names, its routes, and its connections, over real sockets."""

import asyncio
import resource
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, NotFoundError

from tests.simulated import Latency, SimulatedEngine
from turnwise.config import Config
from turnwise.serving.openai.server import OpenAIServer

THERE = "http://attacker.example"
HELLO = [{"role": "user", "content": "12 plus 30?"}]


@pytest.fixture(scope="module")
def few_files() -> Iterator[int]:
    """Lower the soft limit of open files; return the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Other tests of this process may have many files open.
    few = 200 + len([*Path("/proc/self/fd").iterdir()])
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="module")
async def server(
    few_files: int, make_config: Callable[..., Config], tokenizer: Any
) -> AsyncIterator[OpenAIServer]:
    latency = Latency(prefill_token=0.0, step=0.01, step_request=0.0)
    engine = SimulatedEngine(vocab_size=len(tokenizer), latency=latency)
    server = OpenAIServer(make_config(serving={"port": 0, "served_model_name": "a/b"}), engine)
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def http(server: OpenAIServer) -> AsyncIterator[httpx.AsyncClient]:
    root = server.base_url.removesuffix("/v1")
    async with httpx.AsyncClient(base_url=root, timeout=60) as client:
        yield client


async def test_a_page_under_its_own_name_reads_and_changes_nothing(http: httpx.AsyncClient) -> None:
    await http.post("/sessions", json={"id": "alice"})
    page = {"host": "attacker.example", "origin": THERE}
    for method, path, body in (
        ("GET", "/sessions", None),
        ("GET", "/sessions/alice", None),
        ("POST", "/sessions/alice/reward", {"reward": 1.0}),
        ("DELETE", "/sessions/alice", None),
        ("POST", "/sessions/alice/v1/chat/completions", {"messages": HELLO}),
        ("GET", "/health", None),
    ):
        answer = await http.request(method, path, json=body, headers=page)
        assert answer.status_code == 421, (method, path)
    described = (await http.get("/sessions/alice")).json()
    assert (described["turns"], described["reward"]) == (0, None)


async def test_a_page_of_another_site_opens_no_session(http: httpx.AsyncClient) -> None:
    before = len((await http.get("/sessions")).json()["sessions"])
    for kind in (None, "text/plain", "application/x-www-form-urlencoded"):
        headers = {"origin": THERE} | ({"content-type": kind} if kind else {})
        assert (await http.post("/sessions", headers=headers)).status_code in (403, 415)
    assert len((await http.get("/sessions")).json()["sessions"]) == before
    for options in ({}, {"json": {}}):  # a program's, which may leave out the body
        opened = await http.post("/sessions", **options)
        assert opened.status_code == 201
        under = await http.post(f"{opened.json()['base_url']}/sessions")
        assert under.status_code == 201
    preflight = {"origin": THERE, "access-control-request-method": "POST"}
    answer = await http.request("OPTIONS", "/sessions", headers=preflight)
    assert "access-control-allow-origin" not in answer.headers


async def test_every_route_that_can_be_read_answers_head(http: httpx.AsyncClient) -> None:
    await http.post("/sessions", json={"id": "bob"})
    paths = (await http.get("/openapi.json")).json()["paths"]
    readable = [path for path, methods in paths.items() if "get" in methods]
    assert {"/", "/health", "/sessions/{session_id}", "/v1/models"} <= set(readable)
    given = {"session_id": "bob", "name": "a/b", "response_id": "none"}
    for path in [*readable, "/docs", "/openapi.json"]:
        path = path.format_map(given)
        head, got = await http.head(path), await http.get(path)
        assert head.status_code == got.status_code == (404 if "/none" in path else 200), path
        assert not head.content
        if path not in ("/metrics",):
            assert head.headers["content-length"] == got.headers["content-length"]
    assert (await http.head("/v1/chat/completions")).status_code == 405


async def test_a_client_finds_a_model_by_its_name(server: OpenAIServer) -> None:
    async with AsyncOpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client:
        assert (await client.models.retrieve("a/b")).id == "a/b"
        with pytest.raises(NotFoundError, match="there is no model c"):
            await client.models.retrieve("c")


async def test_a_server_starts_with_as_many_connections_as_it_may_have(
    http: httpx.AsyncClient, few_files: int
) -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == min(few_files, 1 << 20)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=http.base_url, timeout=60, limits=limits) as many:
        body = {"messages": HELLO, "max_tokens": 8}
        asked = [many.post("/v1/chat/completions", json=body) for _ in range(160)]
        answers = await asyncio.gather(*asked)
    assert [answer.status_code for answer in answers] == [200] * 160
