"""Agents of their own as rollouts: a function, a command, openai-agents; and what can go wrong."""

import json
import re
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import agents
import pytest
from openai import AsyncOpenAI

from examples.calculator.tool import calculate
from turnwise.config import Config
from turnwise.machinery import load_training
from turnwise.rollout import Group, Runner
from turnwise.serving.openai_server import OpenAIServer
from turnwise.serving.remote_worker import RemoteWorker
from turnwise.trajectory import Trajectory, audit

COMMAND = f"{sys.executable} -m tests.plain_agents"


@pytest.fixture(scope="module")
async def server(
    engine: RemoteWorker, make_config: Callable[..., Config]
) -> AsyncIterator[OpenAIServer]:
    server = OpenAIServer(make_config(serving={"port": 0}, sampling={"max_tokens": 32}), engine)
    await server.start()
    yield server
    await server.stop()


async def run(
    agent: str,
    server: OpenAIServer,
    engine: RemoteWorker,
    make_config: Callable[..., Config],
    tokenizer: Any,
) -> Group:
    config = make_config(
        rollout={"loop": "agent", "agent": agent, "trajectory_timeout": 60},
        sampling={"n": 4, "max_tokens": 32},
    )
    runner = Runner(config, tokenizer)
    runner.server = server
    return await runner.run_group(engine, load_training(config)[0], config.sampling, agent[-6:])


@pytest.mark.parametrize(
    "agent", ["tests.plain_agents:calculator", COMMAND], ids=["function", "command"]
)
async def test_an_agent_that_knows_nothing_of_us_makes_exact_trajectories(
    agent: str,
    server: OpenAIServer,
    engine: RemoteWorker,
    make_config: Callable[..., Config],
    tokenizer: Any,
) -> None:
    group = await run(agent, server, engine, make_config, tokenizer)
    assert group.dropped == {}
    assert len(group.trajectories) == 4
    for index, trajectory in enumerate(group.trajectories):
        assert trajectory.sample_index == index
        assert trajectory.status == "completed"
        assert trajectory.reward in (0.0, 1.0)
        assert trajectory.messages[0]["role"] == "user"
        assert trajectory.messages[-1]["role"] == "assistant"
        assert audit(trajectory).first_violation is None
        assert len(trajectory.branches()) == 1
    assert len(server.sessions) == 0


@pytest.mark.parametrize(
    ("agent", "reason", "words"),
    [
        (f"{COMMAND} fail", "agent_error", "exited with 1: the agent's own trouble"),
        ("tests.plain_agents:silent", "agent_silent", "sampled nothing"),
        ("tests.plain_agents:cold", "loop_error", "temperature=0.1 would make .* off-policy"),
    ],
)
async def test_an_agents_trouble_is_counted_with_what_it_said(
    agent: str,
    reason: str,
    words: str,
    server: OpenAIServer,
    engine: RemoteWorker,
    make_config: Callable[..., Config],
    tokenizer: Any,
) -> None:
    group = await run(agent, server, engine, make_config, tokenizer)
    assert group.dropped == {reason: 4}
    assert re.search(words, group.causes[reason]), group.causes
    assert len(server.sessions) == 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_openai_agents_runs_unchanged(server: OpenAIServer, api: str, stream: bool) -> None:
    agents.set_tracing_disabled(True)
    name = f"agents-{api}-{stream}"
    async with AsyncOpenAI(base_url=server.session_url(name), api_key="none") as client:
        model = (await client.models.list()).data[0].id
        kinds: Any = {
            "chat": agents.OpenAIChatCompletionsModel,
            "responses": agents.OpenAIResponsesModel,
        }
        agent = agents.Agent(
            name="calculator",
            tools=[agents.function_tool(calculate)],
            model=kinds[api](model=model, openai_client=client),
            model_settings=agents.ModelSettings(temperature=0, max_tokens=40),
        )
        question = "What is 12 plus 30, then times 2?"
        try:
            if stream:
                result = agents.Runner.run_streamed(agent, question, max_turns=4)
                async for _ in result.stream_events():
                    pass
            else:
                await agents.Runner.run(agent, question, max_turns=4)
        except (agents.MaxTurnsExceeded, agents.ModelBehaviorError):
            pass  # the model is hardly trained: it may call for ever, or never end
    session = server.sessions.get(name)
    assert session is not None
    trajectory = Trajectory.from_json(json.dumps(session.describe()["trajectory"]))
    assert trajectory.turns
    assert audit(trajectory).first_violation is None
    assert [turn.fork_reason for turn in trajectory.turns if turn.fork_reason] == []
