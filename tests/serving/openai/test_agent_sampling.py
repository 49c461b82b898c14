"""Agents' requests with sampling parameters of their own, in training sessions.

Before a simulated engine, without a socket.
"""

import json
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from tests.serving.openai.client_shapes import CHAT, MESSAGES, RESPONSES, SHAPES, USER
from tests.serving.openai.test_http_limits import QUICK, Noting
from turnwise.chat.session import Session
from turnwise.config import AgentSamplingRule, Config, SamplingConfig
from turnwise.serving.openai.server import OpenAIServer
from turnwise.trajectory import Distribution, Trajectory, audit

OWN = SamplingConfig(max_tokens=16, temperature=0.8)


@pytest.fixture(scope="module")
def engine(tokenizer: Any) -> Noting:
    return Noting(latency=QUICK, vocab_size=len(tokenizer))


@pytest.fixture
async def server(make_config: Callable[..., Config], engine: Noting) -> OpenAIServer:
    return OpenAIServer(make_config(), engine)


@pytest.fixture
async def http(server: OpenAIServer) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(await server.application())
    async with httpx.AsyncClient(transport=transport, base_url="http://t") as http:
        yield http


def opened(server: OpenAIServer, rule: AgentSamplingRule = "override") -> Session:
    return server.sessions.open_private(Trajectory("p"), sampling=OWN, agent_sampling=rule)


async def ask(
    http: httpx.AsyncClient, session: Session, path: str, body: dict[str, Any]
) -> httpx.Response:
    return await http.post(f"/sessions/{session.id}{path}", json=body)


def asked_of(engine: Noting) -> Any:
    """The sampling parameters of the last request that reached the engine."""
    return engine.sampled[-1]


@pytest.mark.parametrize("name", SHAPES)
async def test_a_clients_request_is_answered_in_training_as_it_is(
    name: str, http: httpx.AsyncClient, server: OpenAIServer, engine: Noting
) -> None:
    path, body, events = SHAPES[name]
    session = opened(server)
    answer = await ask(http, session, path, body)
    assert answer.status_code == 200, answer.text
    assert '"error"' not in answer.text
    trajectory = session.finish()
    (turn,) = trajectory.turns
    assert {k: v for k, v in trajectory.events.items() if not k.startswith("tool_")} == events
    assert audit(trajectory).first_violation is None
    assert sum(sum(sample.response_mask) for sample in trajectory.samples()) == len(
        turn.completion_token_ids
    )
    params = asked_of(engine)
    drawn = turn.distribution or Distribution(0.8)
    for key, value in drawn._asdict().items():
        assert getattr(params, key) == value, key
        if "own_sampling" in events:
            assert value == body.get(key, getattr(OWN, key))
    assert (turn.distribution is not None) == ("own_sampling" in events)
    if not isinstance(params, SamplingConfig):
        assert "own_grammar" in events or params.structured_outputs is None
        assert params.frequency_penalty == params.presence_penalty == 0
        assert not params.logit_bias
        assert params.thinking_token_budget is None


async def test_turns_of_one_conversation_keep_their_own_temperatures(
    http: httpx.AsyncClient, server: OpenAIServer
) -> None:
    session = opened(server)
    messages: list[Any] = [USER]
    for temperature in (0.3, None, 1.2, 0.8):
        body = {"messages": messages, "temperature": temperature}
        said = (await ask(http, session, CHAT, body)).json()["choices"][0]["message"]
        messages = [*messages, {"role": "assistant", "content": said["content"]}, USER]
    trajectory = session.finish()
    found = [turn.distribution and turn.distribution.temperature for turn in trajectory.turns]
    assert found == [0.3, None, 1.2, None]
    assert [turn.fork_reason for turn in trajectory.turns] == [None] * 4
    assert trajectory.events["own_sampling"] == 2


FORCED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": [USER], "temperature": 0}, "temperature"),
    (CHAT, {"messages": [USER], "min_tokens": 3}, "min_tokens"),
    (CHAT, {"messages": [USER], "frequency_penalty": 0.5}, "frequency_penalty"),
    (RESPONSES, {"model": "any", "input": [USER], "temperature": 0.0}, "temperature"),
    (MESSAGES, {"model": "any", "messages": [USER], "max_tokens": 8, "temperature": 0}, ""),
]


@pytest.mark.parametrize(("path", "body", "key"), FORCED)
async def test_what_cannot_be_trained_exactly_may_be_context(
    path: str,
    body: dict[str, Any],
    key: str,
    http: httpx.AsyncClient,
    server: OpenAIServer,
    engine: Noting,
) -> None:
    session = opened(server, "context")
    answer = await ask(http, session, path, body)
    assert answer.status_code == 200, answer.text
    trajectory = session.finish()
    (turn,) = trajectory.turns
    assert turn.untrained == "agent_sampling"
    assert trajectory.events[f"context_{key or 'temperature'}"] == 1
    assert trajectory.samples() == []
    assert audit(trajectory).masked == {"agent_sampling": len(turn.completion_token_ids)}
    params = asked_of(engine)
    assert params.temperature == body.get("temperature", 0.8)
    if key == "frequency_penalty":
        assert params.frequency_penalty == 0.5


@pytest.mark.parametrize(("path", "body", "key"), FORCED)
async def test_what_cannot_be_trained_exactly_may_be_refused(
    path: str, body: dict[str, Any], key: str, http: httpx.AsyncClient, server: OpenAIServer
) -> None:
    session = opened(server, "refuse")
    answer = await ask(http, session, path, body)
    assert answer.status_code == 400
    assert f"{key or 'temperature'}=" in answer.text
    assert "off-policy" in answer.text
    warm = await ask(http, session, CHAT, {"messages": [USER], "temperature": 0.5})
    assert warm.status_code == 200  # it is trained exactly
    assert session.finish().turns[0].distribution == Distribution(0.5)


async def test_a_run_may_sample_every_turn_by_its_own_parameters(
    http: httpx.AsyncClient, server: OpenAIServer, engine: Noting
) -> None:
    session = opened(server, "override_all")
    body = {"messages": [USER], "temperature": 0.2, "top_p": 0.5}
    assert (await ask(http, session, CHAT, body)).status_code == 200
    assert (asked_of(engine).temperature, asked_of(engine).top_p) == (0.8, 1.0)
    trajectory = session.finish()
    assert trajectory.turns[0].distribution is None
    assert trajectory.events == {"override_temperature": 1, "override_top_p": 1}


async def test_a_teacher_elsewhere_leaves_one_distribution_to_train(
    make_config: Callable[..., Config], engine: Noting
) -> None:
    config = make_config(algorithm={"teacher": {"url": "http://127.0.0.1:9/v1"}})
    server = OpenAIServer(config, engine)
    transport = httpx.ASGITransport(await server.application())
    sampling = SamplingConfig(max_tokens=8)
    session = server.sessions.open_private(
        Trajectory("p"), sampling=sampling, agent_sampling="override"
    )
    async with httpx.AsyncClient(transport=transport, base_url="http://t") as http:
        asked = {"temperature": 0.5, "response_format": {"type": "json_object"}}
        await ask(http, session, CHAT, {"messages": [USER], **asked})
    found = session.finish().events
    assert found == {"override_temperature": 1, "override_response_format": 1}


async def test_a_grammar_gives_way_to_the_runs_logits_processors(
    http: httpx.AsyncClient, server: OpenAIServer, engine: Noting
) -> None:
    sampling = OWN.model_copy(update={"logits_processor_args": {"script": [5, 6]}})
    session = server.sessions.open_private(
        Trajectory("p"), sampling=sampling, agent_sampling="override"
    )
    body = {"messages": [USER], "response_format": {"type": "json_object"}}
    assert (await ask(http, session, CHAT, body)).status_code == 200
    assert session.finish().events == {"override_response_format": 1}
    assert getattr(asked_of(engine), "structured_outputs", None) is None


async def test_what_is_replaced_is_told_once_by_key(
    http: httpx.AsyncClient, server: OpenAIServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    for _ in range(3):
        body = {"messages": [USER], "temperature": 0, "presence_penalty": 0.5}
        assert (await ask(http, opened(server), CHAT, body)).status_code == 200
    said = [r.getMessage() for r in caplog.records if "rollout.agent_sampling" in r.getMessage()]
    assert [line.split(",")[0] for line in said] == [
        "an agent's requests set presence_penalty",
        "an agent's requests set temperature",
    ]


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-1", "1e400"])
@pytest.mark.parametrize("rule", ["override", "context", "refuse", "override_all"])
async def test_a_temperature_that_is_no_temperature_is_refused(
    text: str, rule: AgentSamplingRule, http: httpx.AsyncClient, server: OpenAIServer
) -> None:
    session = opened(server, rule)
    content = json.dumps({"messages": [USER]})[:-1] + f', "temperature": {text}}}'
    headers = {"content-type": "application/json"}
    answer = await http.post(f"/sessions/{session.id}{CHAT}", content=content, headers=headers)
    assert answer.status_code == 400
    assert session.trajectory.turns == []
