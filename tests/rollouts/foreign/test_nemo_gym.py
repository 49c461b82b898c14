"""Sessions of NeMo-Gym's resource servers: its counter example on a server of the same protocol."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from turnwise.compat.nemo_gym import read_input, to_response
from turnwise.config import RolloutConfig
from turnwise.core.deadlines import StallClock
from turnwise.errors import InputError, TrajectoryError
from turnwise.rollouts import Problem
from turnwise.rollouts.environment import load_environment
from turnwise.rollouts.episode import Episode, playing
from turnwise.rollouts.rewards import RewardManager
from turnwise.trajectory import Trajectory

COUNT = {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}
ROW: dict[str, Any] = {
    "responses_create_params": {
        "input": [{"role": "user", "content": "Add 1, then add 2, then get the count."}],
        "tools": [
            {
                "type": "function",
                "name": "increment_counter",
                "description": "",
                "parameters": COUNT,
            },
            {"type": "function", "name": "get_counter_value", "parameters": None},
        ],
    },
    "initial_count": 3,
    "expected_count": 6,
}


class Counter:
    """Keeps a counter for each cookie, as `example_session_state_mgmt` of NeMo-Gym does."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.verified: list[dict[str, Any]] = []
        self.mcp: dict[str, Any] | None = None

    async def seed(self, request: web.Request) -> web.Response:
        name = f"s{len(self.counts)}"
        self.counts[name] = (await request.json())["initial_count"]
        response = web.json_response({"mcp": self.mcp} if self.mcp else {})
        response.set_cookie("session", name)
        return response

    async def increment(self, request: web.Request) -> web.Response:
        count = (await request.json())["count"]
        if count < 0:
            return web.Response(status=422, text="count must not be negative")
        self.counts[request.cookies["session"]] += count
        return web.json_response({"success": True})

    async def get(self, request: web.Request) -> web.Response:
        return web.json_response({"count": self.counts[request.cookies["session"]]})

    async def verify(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.verified.append(body)
        right = self.counts[request.cookies["session"]] == body["expected_count"]
        return web.json_response({**body, "reward": float(right), "calls": 2, "note": "text"})


@asynccontextmanager
async def served(verify: Any = None) -> AsyncIterator[tuple[Counter, str]]:
    counter, app = Counter(), web.Application(client_max_size=1 << 24)
    for path, handler in (
        ("seed_session", counter.seed),
        ("increment_counter", counter.increment),
        ("get_counter_value", counter.get),
        ("verify", verify or counter.verify),
    ):
        app.router.add_post(f"/{path}", handler)
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield counter, f"nemo_gym:http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def play(address: str, row: dict[str, Any]) -> Any:
    async def report(reason: str, error: Exception) -> None:
        raise error

    episode = Episode(load_environment(address), Problem("rows:1", row), RolloutConfig())
    return playing(episode, StallClock(60.0), report)


async def test_a_session_is_seeded_used_and_verified() -> None:
    """By `environment: nemo_gym:`, with `seed_session` and `verify`."""
    async with (
        served() as (counter, address),
        play(address, ROW) as episode,
        play(address, {**ROW, "initial_count": 50}) as other,
    ):
        assert episode.problem == ROW["responses_create_params"]["input"]
        names = [schema["function"]["name"] for schema in episode.toolbox.schemas]
        assert names == ["increment_counter", "get_counter_value"]
        for count in (1, 2):
            result = await episode.toolbox.call("increment_counter", f'{{"count": {count}}}')
            assert json.loads(result.text) == {"success": True}
        await other.toolbox.call("increment_counter", '{"count": 1}')
        assert (
            json.loads((await episode.toolbox.call("get_counter_value", "{}")).text)["count"] == 6
        )
        refused = await episode.toolbox.call("increment_counter", '{"count": -1}')
        assert refused.outcome == "error"
        assert "increment_counter answered 422: count must not be negative" in refused.text
        trajectory = Trajectory("rows:1", messages=[*episode.problem, *CONVERSATION])
        await RewardManager([]).reward(episode, trajectory, ROW)
        assert trajectory.reward == 1.0
        assert await episode.metrics(trajectory) == {"calls": 2.0}
        (sent,) = counter.verified
        assert sent["initial_count"] == 3
        assert [item["type"] for item in sent["response"]["output"]] == [
            "message", "function_call", "function_call_output", "message",
        ]  # fmt: skip
        judged = Trajectory("rows:2", messages=[*other.problem])
        await RewardManager([]).reward(other, judged, ROW)
        assert judged.reward == 0.0


CALL = {"function": {"name": "increment_counter", "arguments": {"count": 1}}, "id": "call1"}
CONVERSATION = [
    {"role": "assistant", "content": "Adding.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call1", "name": "increment_counter", "content": "ok"},
    {"role": "assistant", "content": "6"},
]


def test_a_conversation_is_a_response() -> None:
    said, called, result, last = to_response(CONVERSATION, {"tools": [1]})["output"]
    assert said["content"][0]["text"] == "Adding."
    assert (called["name"], called["arguments"]) == ("increment_counter", '{"count": 1}')
    assert (result["call_id"], result["output"]) == ("call1", "ok")
    assert last["content"][0]["text"] == "6"


def test_the_input_is_text() -> None:
    """It is in `responses_create_params`."""
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert read_input({"input": [{"role": "developer", "content": parts}]}) == [
        {"role": "system", "content": "ab"}
    ]
    for given, message in (
        ({"input": []}, "must be a text or a list"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "has more than messages"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "more than text"),
    ):
        with pytest.raises(InputError, match=message):
            read_input(given)


async def test_what_cannot_be_played_is_named() -> None:
    with pytest.raises(InputError, match="must be like http://host:port, not 'localhost:1'"):
        load_environment("nemo_gym:localhost:1")
    async with served() as (counter, address):
        with pytest.raises(TrajectoryError, match="has responses_create_params"):
            async with play(address, {}):
                pass
        counter.mcp = {"url_path": "/mcp"}
        with pytest.raises(TrajectoryError, match="offers its tools over MCP only"):
            async with play(address, ROW):
                pass
    with pytest.raises(TrajectoryError, match="Cannot connect to host"):
        async with play(address, ROW):
            pass


async def test_a_redirect_shows_the_model_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def secret(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(text="SECRET")

    async def redirect(self: Counter, request: web.Request) -> web.Response:
        raise web.HTTPFound("/verify")

    monkeypatch.setattr(Counter, "get", redirect)
    async with served(secret) as (_, address), play(address, ROW) as episode:
        result = await episode.toolbox.call("get_counter_value", "{}")
    assert result.outcome == "error"
    assert "get_counter_value answered 302" in result.text
    assert asked == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not readable JSON"),
        ("<html>", "sent '<html>', which is not readable JSON"),
        ("[]", "wrong answer"),
        ("{}", "reward: Field required"),
        ('{"reward": "1"}', "reward: Input should be a valid number"),
        ('{"reward": NaN}', "reward: Input should be a finite number"),
        ('{"reward": 1e999}', "reward: Input should be a finite number"),
        ('{"reward": ' + "9" * 400 + "}", "reward: Input should be a valid number"),
        ("[" * 100_000, "not readable JSON"),
        ('{"reward": 1, "more": [' + "1," * 600_000 + "1]}", "more than 500,000 values"),
        ('{"reward": 1, "more": "' + "x" * 9_000_000 + '"}', "more than 8,388,608 bytes"),
    ],
)
async def test_a_wrong_answer_costs_its_trajectory(text: str, words: str) -> None:
    async def verify(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(text=text)

    async with served(verify) as (_, address), play(address, ROW) as episode:
        trajectory = Trajectory("rows:1", messages=[*episode.problem, *CONVERSATION])
        with pytest.raises(TrajectoryError, match=words) as raised:
            await RewardManager([]).reward(episode, trajectory, ROW)
        assert raised.value.reason == "environment_reply"
        assert len(str(raised.value)) < 1_000


async def test_a_verifiers_numbers_are_kept_up_to_a_limit() -> None:
    many = {f"metric {n}": n for n in range(1_000)}
    odd = {"huge": 10**400, "n" * 101: 1, "text": "1"}

    async def verify(request: web.Request) -> web.Response:
        return web.json_response({**odd, **many, "reward": True})

    async with served(verify) as (_, address), play(address, ROW) as episode:
        trajectory = Trajectory("rows:1", messages=[*episode.problem, *CONVERSATION])
        await RewardManager([]).reward(episode, trajectory, ROW)
        assert trajectory.reward == 1.0
        assert await episode.metrics(trajectory) == {f"metric {n}": float(n) for n in range(100)}
