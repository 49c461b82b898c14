"""Sessions of clients in processes of their own, beside the server, before a real engine."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from turnwise.config import Config
from turnwise.serving.front_processes import FrontProcesses
from turnwise.serving.openai.opening import make_server
from turnwise.serving.openai.server import OpenAIServer
from turnwise.serving.scheduler import Scheduler
from turnwise.serving.worker_handle import WorkerHandle
from turnwise.trajectory import Trajectory, audit

KEY = "a-long-key"
SECONDS = 60.0


@pytest.fixture(scope="module")
async def processes(engine: WorkerHandle, make_config: Callable[..., Config]) -> FrontProcesses:
    config = make_config(
        serving={"port": 0, "session_processes": 2, "api_key": KEY, "health_timeout": 20.0},
        sampling={"max_tokens": 8},
    )
    scheduler = Scheduler(config.serving, SECONDS)
    scheduler.add("worker-0", engine)
    return FrontProcesses(config, scheduler, make_server=make_server)


@pytest.fixture(scope="module")
async def server(processes: FrontProcesses) -> AsyncIterator[OpenAIServer]:
    server = OpenAIServer(processes.config, processes._scheduler, processes=processes)
    await server.start()
    yield server
    await server.stop()
    assert not processes.up


@pytest.fixture(scope="module")
async def http(server: OpenAIServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(
        base_url=server.base_url.removesuffix("/v1"),
        headers={"Authorization": f"Bearer {KEY}"},
        timeout=SECONDS,
        follow_redirects=True,
    ) as client:
        yield client


def message(text: str, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": text}


async def chat(
    http: httpx.AsyncClient, url: str, messages: list[dict[str, str]], **options: Any
) -> httpx.Response:
    body = {"model": "any", "messages": messages, **options}
    return await http.post(f"{url}/chat/completions", json=body)


async def test_a_sessions_url_leads_to_its_process_and_it_stays_exact(
    http: httpx.AsyncClient, server: OpenAIServer, processes: FrontProcesses
) -> None:
    opened = [(await http.post("/sessions")).json() for _ in range(4)]
    urls = {each["base_url"].partition("/sessions/")[0] + "/v1" for each in opened}
    assert urls == set(processes.base_urls.values())
    assert server.base_url not in urls
    assert (await http.get("/")).json()["session_processes"] == processes.base_urls
    for each in opened:
        messages = [message("What is 3 plus 4?")]
        for _ in range(2):
            answer = (await chat(http, each["base_url"], messages)).raise_for_status().json()
            said = answer["choices"][0]["message"]["content"] or ""
            messages += [message(said, "assistant"), message("And then?")]
        described = (await http.get(f"/sessions/{each['id']}")).json()
        trajectory = Trajectory.from_json(json.dumps(described["trajectory"]))
        assert len(trajectory.turns) == 2
        assert [turn.parent for turn in trajectory.turns] == [None, 0]
        assert audit(trajectory).violations == 0
    listed = (await http.get("/sessions")).json()["sessions"]
    assert {each["id"] for each in opened} <= {each["id"] for each in listed}
    for each in opened:
        closed = await http.delete(f"/sessions/{each['id']}")
        assert closed.status_code == 200
        assert (await chat(http, each["base_url"], [message("Hello?")])).status_code == 410


async def test_requests_to_the_server_itself_are_redirected(
    http: httpx.AsyncClient, server: OpenAIServer
) -> None:
    opened = (await http.post("/sessions", json={"id": "weather-1", "group": "weather"})).json()
    assert not opened["base_url"].startswith(server.base_url.removesuffix("/v1"))
    root = server.base_url.removesuffix("/v1")
    messages = [message("What is 5 minus 2?")]
    by_path = await chat(http, f"{root}/sessions/weather-1/v1", messages)
    body = {"model": "any", "messages": messages, "stream": True}
    by_header = await http.post(
        "/v1/chat/completions", json=body, headers={"X-Session-ID": "weather-1"}
    )
    assert (by_path.status_code, by_header.status_code) == (200, 200)
    home = opened["base_url"].partition("/sessions/")[0]
    assert {str(answer.url).partition("/sessions/")[0] for answer in (by_path, by_header)} == {home}
    assert by_header.text.rstrip().endswith("data: [DONE]")
    under = (await http.post("/sessions/weather-1/v1/sessions", json={"id": "helper"})).json()
    assert under["base_url"].startswith(opened["base_url"].partition("/sessions/")[0])
    await http.post("/sessions/weather-1/reward", json={"reward": 0.5})
    described = (await http.get("/sessions/weather-1")).json()
    assert described["trajectory"]["reward"] == 0.5
    assert len(described["trajectory"]["turns"]) == 2
    bad = await http.post("/sessions/weather-1/reward", json={"reward": "much"})
    assert bad.status_code == 400
    odd = await http.get("/sessions/weather-1/v1/models?limit=%zz&%20=[]")
    assert odd.status_code == 200
    child = f"/sessions/{under['id']}"
    async with asyncio.timeout(SECONDS):  # the server learns of it by the next report
        while (await http.get(child)).status_code != 200:
            await asyncio.sleep(0.05)


async def test_a_name_has_one_session(http: httpx.AsyncClient, server: OpenAIServer) -> None:
    for expected in (201, 409):
        answer = await http.post("/sessions", json={"id": "once"})
        assert answer.status_code == expected
    # A request opens a session by its name in the server's own process.
    root = server.base_url.removesuffix("/v1")
    assert (await chat(http, f"{root}/sessions/here/v1", [message("Hi")])).status_code == 200
    assert (await http.post("/sessions", json={"id": "here"})).status_code == 409
    assert (await http.delete("/sessions/once")).status_code == 200
    assert (await http.post("/sessions", json={"id": "once"})).status_code == 201
    both = await asyncio.gather(*(http.post("/sessions", json={"id": "twice"}) for _ in range(2)))
    assert sorted(answer.status_code for answer in both) == [201, 409]
    # The header names the session of a request that samples, and of no other.
    headers = {"X-Session-ID": "once"}
    assert (await http.post("/sessions", json={"id": "more"}, headers=headers)).status_code == 201
    listed = {
        each["id"] for each in (await http.get("/sessions", headers=headers)).json()["sessions"]
    }
    assert {"once", "twice", "more", "here"} <= listed
    assert (await http.get("/sessions/more")).status_code == 200


async def test_a_closed_session_stays_closed_at_the_server_too(
    http: httpx.AsyncClient, processes: FrontProcesses
) -> None:
    opened = (await http.post("/sessions", json={"id": "brief"})).json()
    root = opened["base_url"].removesuffix("/v1")
    assert (await http.delete(root)).status_code == 200  # at its process
    async with asyncio.timeout(SECONDS):
        while processes.base_url_of("brief") is not None:
            await asyncio.sleep(0.05)
    answer = await chat(http, f"{http.base_url}/sessions/brief/v1", [message("Hello?")])
    assert answer.status_code == 410
    assert "is closed" in answer.json()["error"]["message"]


async def test_the_key_holds_at_every_address(http: httpx.AsyncClient) -> None:
    opened = (await http.post("/sessions")).json()
    async with httpx.AsyncClient(base_url=http.base_url, timeout=SECONDS) as stranger:
        for url in (opened["base_url"], f"{http.base_url}/sessions/{opened['id']}/v1"):
            assert (await chat(stranger, url, [message("Hi")])).status_code == 401
            assert (await chat(http, url, [message("Hi")])).status_code == 200


async def test_metrics_count_all_processes(
    http: httpx.AsyncClient, processes: FrontProcesses
) -> None:
    async def value(name: str, **labels: str) -> float:
        families = text_string_to_metric_families((await http.get("/metrics")).text)
        samples = [sample for family in families for sample in family.samples]
        return sum(
            s.value for s in samples if s.name == name and labels.items() <= s.labels.items()
        )

    before, same = await value("turnwise_requests_total", what="200"), 0
    while same < 10:  # reports of earlier tests may still be on their way
        await asyncio.sleep(0.05)
        now = await value("turnwise_requests_total", what="200")
        before, same = now, same + 1 if now == before else 0
    turns = await value("turnwise_turns_total", event="turns")
    opened = [(await http.post("/sessions")).json() for _ in range(2)]
    for each in opened:
        await chat(http, each["base_url"], [message("Hi")])
    async with asyncio.timeout(SECONDS):
        while await value("turnwise_requests_total", what="200") < before + 2:
            await asyncio.sleep(0.05)
    listed = (await http.get("/sessions")).json()["sessions"]
    assert await value("turnwise_sessions_open") == len(listed)
    assert await value("turnwise_turns_total", event="turns") == turns + 2


async def test_a_process_that_dies_loses_its_own_sessions_only(
    http: httpx.AsyncClient, processes: FrontProcesses
) -> None:
    opened: dict[str, list[dict[str, Any]]] = {}
    while len(opened) < 2:
        one = (await http.post("/sessions")).json()
        opened.setdefault(one["base_url"].partition("/sessions/")[0], []).append(one)
    (dead, lost), (_, kept) = opened.items()
    addresses = dict(processes.base_urls)
    helper = (await http.post(f"{lost[0]['base_url']}/sessions")).json()
    async with asyncio.timeout(SECONDS):
        while processes.base_url_of(helper["id"]) is None:
            await asyncio.sleep(0.05)
    port = int(dead.rpartition(":")[2])
    (pid,) = {c.pid for c in psutil.net_connections() if c.laddr and c.laddr.port == port and c.pid}
    os.kill(pid, signal.SIGKILL)
    answer = await chat(http, kept[0]["base_url"], [message("Still there?")])
    assert answer.status_code == 200
    new = await http.post("/sessions")  # in the process that is left
    assert new.status_code == 201
    root = str(http.base_url)
    async with asyncio.timeout(SECONDS):
        while True:
            with suppress(httpx.TransportError):  # until the server knows that it is lost
                url = f"{root}/sessions/{lost[0]['id']}/v1"
                answer = await chat(http, url, [message("And you?")])
                break
            await asyncio.sleep(0.05)
        while processes.base_urls != addresses:  # it is restarted
            await asyncio.sleep(0.05)
    assert answer.status_code == 410
    assert "was lost when its process died" in answer.json()["error"]["message"]
    for each in (lost[0], helper):
        at_home = await chat(http, each["base_url"], [message("And you?")])
        assert at_home.status_code == 410
    again = await http.post("/sessions", json={"id": lost[0]["id"]})
    assert again.status_code == 201


async def test_without_a_process_the_server_serves_sessions_itself(
    http: httpx.AsyncClient, server: OpenAIServer, processes: FrontProcesses
) -> None:
    held = [(process, process.actor) for process in processes.processes]
    try:
        for process, _ in held:
            process.actor = None
        opened = (await http.post("/sessions", json={"id": "alone"})).json()
    finally:
        for process, actor in held:
            process.actor = actor
    assert opened["base_url"].startswith(server.base_url.removesuffix("/v1"))
    assert (await chat(http, opened["base_url"], [message("Hi")])).status_code == 200
