"""Grammars of requests before a real engine: what they allow, and how it is trained."""

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from tests.serving.openai.client_shapes import ANSWER, CHAT, RESPONSES, STRICT, USER
from turnwise.config import Config, SamplingConfig
from turnwise.rollouts import Group
from turnwise.serving.openai.server import OpenAIServer
from turnwise.serving.worker_handle import WorkerHandle
from turnwise.training.batching import Columns
from turnwise.training.rank import TrainerRank
from turnwise.training.samples import make_samples
from turnwise.trajectory import ChatTemplate, Trajectory, allowed_bits

OWN = SamplingConfig(max_tokens=40, temperature=0.8)
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": ANSWER}}
FLAT = {"type": "json_schema", "name": "a", "schema": ANSWER}
CHOICE = {"type": "function", "function": {"name": "calculate"}}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "a JSON schema": (CHAT, {"messages": [USER], "response_format": SCHEMA}),
    "an object": (CHAT, {"messages": [USER], "response_format": {"type": "json_object"}}),
    "Responses' schema": (RESPONSES, {"model": "any", "input": [USER], "text": {"format": FLAT}}),
    "a pattern": (CHAT, {"messages": [USER], "structured_outputs": {"regex": "[0-9]{3}"}}),
    "a choice": (CHAT, {"messages": [USER], "structured_outputs": {"choice": ["Yes", "No"]}}),
    "colder": (CHAT, {"messages": [USER], "response_format": SCHEMA, "temperature": 0.5}),
    "few tokens": (CHAT, {"messages": [USER], "response_format": SCHEMA, "top_k": 5}),
    "a forced call": (CHAT, {"messages": [USER], "tools": [STRICT], "tool_choice": CHOICE}),
    "any call": (CHAT, {"messages": [USER], "tools": [STRICT], "tool_choice": "required"}),
    "a stream": (CHAT, {"messages": [USER], "response_format": SCHEMA, "stream": True}),
}


@pytest.fixture(scope="module")
def own_config(make_config: Callable[..., Config]) -> Config:
    training = {"learning_rate": 1e-3, "threads": 1}
    return make_config(serving={"port": 0}, sampling=OWN.model_dump(), training=training)


@pytest.fixture(scope="module")
def policy(own_config: Config) -> TrainerRank:
    return TrainerRank(own_config)


@pytest.fixture(scope="module")
async def server(engine: WorkerHandle, own_config: Config) -> AsyncIterator[OpenAIServer]:
    server = OpenAIServer(own_config, engine)
    yield server
    await server.stop()


@pytest.mark.parametrize("name", ASKED)
async def test_turns_of_a_grammar_are_trained_from_what_it_allowed(
    name: str, server: OpenAIServer, policy: TrainerRank, own_config: Config
) -> None:
    path, body = ASKED[name]
    session = server.sessions.open_private(Trajectory("p"), sampling=OWN, agent_sampling="override")
    transport = httpx.ASGITransport(await server.application())
    async with httpx.AsyncClient(transport=transport, base_url="http://t", timeout=60) as http:
        for _ in range(2):
            answer = await http.post(f"/sessions/{session.id}{path}", json=body)
            assert answer.status_code == 200, answer.text
    trajectory = session.finish()
    assert trajectory.events["own_grammar"] == 2
    trajectory = Trajectory.from_json(trajectory.to_json())
    for turn in trajectory.turns:
        assert len(turn.allowed) == len(turn.completion_token_ids)
        assert any(turn.allowed)
        counts = [
            np.unpackbits(np.frombuffer(allowed_bits(s), np.uint8)).sum() for s in turn.allowed if s
        ]
        assert min(counts) < 50
    # The two answers are one trajectory's, of two branches.
    trajectory.set_outcome(reward=1.0)
    other = Trajectory("p")
    other.add_turn([1], [2], [-1.0], [0], "stop")
    batch = make_samples([Group("p", trajectories=[trajectory, other])], own_config, 0)
    assert batch.report.first_violation is None
    samples = [sample for sample in batch.samples if sample.length > 2]
    assert len(samples) == 2
    for layout in ("padded", "shared"):
        columns = Columns.of(samples, layout, policy.device)
        with torch.no_grad():
            found_N, _ = policy._models.score("policy", columns)
        sampled = np.concatenate([s.logprobs_T[s.response_mask_T] for s in samples])
        assert np.abs(found_N.numpy() - sampled).max() < 2e-4
        bare = Columns.of([replace(s, allowed={}) for s in samples], layout, policy.device)
        with torch.no_grad():
            found_N, _ = policy._models.score("policy", bare)
        assert np.abs(found_N.numpy() - sampled).max() > 0.1  # without the sets it is off


async def test_clients_without_a_training_session_pay_for_no_replay(server: OpenAIServer) -> None:
    session = server.sessions.open_private(Trajectory("p"), sampling=None)
    transport = httpx.ASGITransport(await server.application())
    async with httpx.AsyncClient(transport=transport, base_url="http://t", timeout=60) as http:
        path, body = ASKED["a JSON schema"]
        answer = await http.post(f"/sessions/{session.id}{path}", json=body | {"max_tokens": 40})
    assert answer.status_code == 200, answer.text
    assert session.finish().turns[0].allowed == ()


@pytest.mark.slow
async def test_a_grammar_begins_where_the_reasoning_ends(
    ray_started: None, make_config: Callable[..., Config], template: ChatTemplate
) -> None:
    config = make_config(serving={"port": 0, "reasoning_parser": "qwen3"})
    engine = await WorkerHandle.start(config, name="reasoning")
    server = OpenAIServer(config, engine)
    try:
        async with httpx.AsyncClient(base_url=await server.start(), timeout=60) as http:
            asked: dict[str, Any] = {
                "messages": [{"role": "user", "content": "What is 12 plus 30?"}],
                **{"temperature": 0, "max_tokens": 60},
                "structured_outputs": {"choice": ["Alpha", "Beta"]},
                "vllm_xargs": {"script": template.encode("<think>12 and 30</think>")},
            }
            message = (await http.post("/chat/completions", json=asked)).json()["choices"][0]
            assert message["message"]["reasoning"] == "12 and 30"
            assert message["message"]["content"].strip() in ("Alpha", "Beta")
            assert message["finish_reason"] == "stop"
    finally:
        await server.stop()
        await engine.shutdown()
