"""Agents behind an HTTP endpoint: what they are sent, what they report, and what can go wrong."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from aiohttp import web

from tests.pages import blocks
from tests.rollouts.test_agents import keyless, try_agent
from turnwise.config import Config
from turnwise.errors import InputError, TrajectoryError
from turnwise.rollouts.agents import read_report
from turnwise.serving.openai.server import OpenAIServer
from turnwise.trajectory import audit

__all__ = ["keyless"]

Handler = Callable[[dict[str, Any]], Awaitable[Any]]


@contextlib.asynccontextmanager
async def endpoint(handle: Handler) -> AsyncIterator[str]:
    """The URL of an endpoint; a handler's text is answered with status 500."""

    async def answer(request: web.Request) -> web.Response:
        reply = await handle(await request.json())
        if isinstance(reply, web.Response):
            return reply
        return web.json_response(reply)

    app = web.Application()
    app.router.add_post("/run", answer)
    async with serving(app) as url:
        yield url


@contextlib.asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[str]:
    """The URL of an application's endpoint."""
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/run"
    finally:
        await runner.cleanup()


async def ask(base_url: str, content: str = "12 plus 30?") -> str:
    messages = [{"role": "user", "content": content}]
    async with httpx.AsyncClient(timeout=60) as http:
        made = await http.post(f"{base_url}/chat/completions", json={"messages": messages})
        assert made.status_code == 200, made.text
        return str(made.json()["choices"][0]["message"]["content"])


@pytest.mark.parametrize("agent_rewards", [False, True])
async def test_an_endpoint_gets_a_row_and_reports_what_it_did(
    agent_rewards: bool,
    keyless: OpenAIServer,
    make_config: Callable[..., Config],
    tokenizer: Any,
) -> None:
    sent: list[dict[str, Any]] = []

    async def handle(request: dict[str, Any]) -> Any:
        sent.append(request)
        await ask(request["base_url"])
        async with httpx.AsyncClient() as http:
            opened = (await http.post(f"{request['base_url']}/sessions", json={"id": "b"})).json()
        await ask(opened["base_url"], "And 3?")
        report = {"reward": 0.25, "metrics": {"searches": 3}, "sessions": ["b", opened["id"]]}
        return report | {"error": None, "response": "ignored"}

    async with endpoint(handle) as url:
        group = await try_agent(url, keyless, make_config, tokenizer, agent_rewards=agent_rewards)
    assert group.causes == {}
    assert len({request["id"] for request in sent}) == 2
    assert {request["model"] for request in sent} == {"model"}
    assert all(request["row"]["question"] for request in sent)
    for trajectory in group.trajectories:
        assert trajectory.metrics["searches"] == 3.0
        assert audit(trajectory).first_violation is None
        assert len(trajectory.branches()) == 2
        if agent_rewards:
            assert trajectory.reward == 0.25
            assert not trajectory.events
        else:
            assert trajectory.reward in (0.0, 1.0)
            assert trajectory.events == {"agent_reward_ignored": 1}
    assert len(keyless.sessions) == 0


async def test_the_service_of_the_page_plays(
    keyless: OpenAIServer, make_config: Callable[..., Config], tokenizer: Any
) -> None:
    (page,) = (b for b in blocks("docs/how-to/agents.md") if b.name == "service.py")
    names: dict[str, Any] = {"__name__": "service"}
    exec(compile(page.text, str(page), "exec"), names)
    async with serving(names["app"]) as url:
        group = await try_agent(url, keyless, make_config, tokenizer)
    assert group.causes == {}
    assert all("characters" in trajectory.metrics for trajectory in group.trajectories)


def failing(status: int, text: str) -> Handler:
    async def handle(request: dict[str, Any]) -> Any:
        return web.Response(status=status, text=text)

    return handle


def replying(reply: Any) -> Handler:
    async def handle(request: dict[str, Any]) -> Any:
        await ask(request["base_url"])
        return reply

    return handle


async def closing(request: dict[str, Any]) -> Any:
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("handle", "reason", "words"),
    [
        (failing(500, "no such tool"), "agent_error", r"/run answered 500: no such tool"),
        (failing(302, ""), "agent_error", "answered 302"),
        (failing(200, "<html>"), "agent_reply", "/run sent '<html>', which is not readable JSON"),
        (closing, "agent_error", "closed the connection: Server disconnected"),
        (failing(200, "[" * 100_000), "agent_reply", "which is not readable JSON"),
        (failing(200, "x" * (5 << 20)), "agent_reply", "more than 4,194,304 bytes"),
        (replying({"error": "the browser crashed"}), "agent_error", "/run: the browser crashed"),
        (replying({"sessions": ["else"]}), "agent_reply", "the session else, which it did not"),
        (replying({}), "", ""),
        (failing(200, ""), "agent_silent", "sampled nothing"),
    ],
)
async def test_an_endpoints_failure_is_counted_by_its_reason(
    handle: Handler,
    reason: str,
    words: str,
    keyless: OpenAIServer,
    make_config: Callable[..., Config],
    tokenizer: Any,
) -> None:
    async with endpoint(handle) as url:
        group = await try_agent(url, keyless, make_config, tokenizer)
    assert group.dropped == ({reason: 2} if reason else {})
    assert re.search(words, group.causes.get(reason, "")), group.causes
    assert len(keyless.sessions) == 0


async def test_an_endpoint_that_nobody_serves_is_unreachable(
    keyless: OpenAIServer, make_config: Callable[..., Config], tokenizer: Any
) -> None:
    async with endpoint(closing) as url:
        pass
    group = await try_agent(url, keyless, make_config, tokenizer)
    assert group.dropped == {"agent_unreachable": 2}
    with pytest.raises(InputError, match=r"rollout\.agent: http:// is not a URL"):
        await try_agent("http://", keyless, make_config, tokenizer)


async def test_a_silent_endpoint_is_left_at_the_deadline(
    keyless: OpenAIServer, make_config: Callable[..., Config], tokenizer: Any
) -> None:
    left = asyncio.Queue[str]()

    async def handle(request: dict[str, Any]) -> Any:
        try:
            await asyncio.Event().wait()
        finally:
            left.put_nowait(request["id"])

    async with endpoint(handle) as url:
        group = await try_agent(url, keyless, make_config, tokenizer, stall_timeout=0.5)
        assert group.dropped == {"stalled": 2}
        async with asyncio.timeout(60):  # the connections were closed
            assert await left.get() != await left.get()


@pytest.mark.parametrize(
    ("report", "words"),
    [
        ([1], "sent a wrong answer .*dictionary"),
        ({"reward": float("nan")}, "reward: Input should be a finite number"),
        ({"reward": "1"}, "reward: Input should be a valid number"),
        ({"reward": 1e9}, "reward: Input should be less than or equal to 1000000"),
        ({"reward": 10**400}, "reward: Input should be a valid number"),
        ({"metrics": {"a": "x"}}, "metrics.a: Input should be a valid number"),
        ({"metrics": {"a" * 101: 1}}, "metrics.a+.*: String should have at most 100"),
        (
            {"metrics": {str(n): n for n in range(101)}},
            "metrics: Dictionary should have at",
        ),
        ({"sessions": "a"}, "sessions: Input should be a valid list"),
        ({"sessions": ["a"] * 1_002}, "sessions: List should have at most 1001"),
    ],
)
def test_a_report_that_cannot_be_used_says_why(report: Any, words: str) -> None:
    with pytest.raises(TrajectoryError, match=words) as raised:
        read_report(report, "the agent x")
    assert raised.value.reason == "agent_reply"
    assert read_report(None, "the agent x") == {}
    known = {"reward": 1.0, "metrics": None}
    assert read_report({"reward": True, "metrics": None, "more": []}, "a") == known
    error = read_report(json.loads('{"error": "%s"}' % ("x" * 9_999)), "a")["error"]
    assert len(str(error)) == 500
