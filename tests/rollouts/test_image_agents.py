"""Agents of their own that see: an endpoint gets a row with an image, and sends one itself."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from openai import AsyncOpenAI

from tests.simulated import Latency, SimulatedEngine
from tests.vision import encoded, picture, vision_config
from turnwise.chat.images import with_urls
from turnwise.chat.template import load_tokenizer
from turnwise.config import Config
from turnwise.rollouts import Problem, Runner
from turnwise.serving.openai.server import OpenAIServer
from turnwise.training.samples import SampleBatch, add_trajectory
from turnwise.trajectory import Trajectory, audit

QUICK = Latency(prefill_token=0.0, step=1e-4, step_request=0.0)


class Gallery:
    """The reward of an agent that was asked about an image."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.problem = [{"role": "user", "content": "What is it?"}]

    def reward(self, trajectory: Trajectory) -> float:
        return float(len(trajectory.images))


async def look(request: web.Request) -> web.Response:
    """Ask about the row's image, then about another one."""
    task = await request.json()
    messages: list[Any] = []
    async with AsyncOpenAI(base_url=task["base_url"], api_key="none") as client:
        for url in (task["row"]["image"], with_urls(encoded(picture(28, 28, 7)))):
            image = {"type": "image_url", "image_url": {"url": url}}
            messages.append({"role": "user", "content": [{"type": "text", "text": "?"}, image]})
            answer = await client.chat.completions.create(model="any", messages=messages)
            said = answer.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": said})
    return web.json_response({})


@pytest.fixture
async def endpoint() -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/", look)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    yield f"http://127.0.0.1:{port}/"
    await runner.cleanup()


def seeing(vision_path: str, agent: str) -> Config:
    return vision_config(
        vision_path,
        environment="tests.rollouts.test_image_agents:Gallery",
        rollout={"loop": "agent", "agent": agent},
        serving={"port": 0},
        sampling={"n": 2, "max_tokens": 8},
    )


async def test_images_of_rows_and_agents_are_in_exact_turns(
    vision_path: str, endpoint: str
) -> None:
    config = seeing(vision_path, endpoint)
    tokenizer = load_tokenizer(config.model)
    engine = SimulatedEngine(vocab_size=len(tokenizer), mean_tokens=100_000, latency=QUICK)
    server = OpenAIServer(config, engine)
    await server.start()
    try:
        runner = Runner(config, tokenizer)
        runner.loops["agent"].server = server
        row = {"image": picture(seed=3)}
        group = await runner.run_group(engine, Problem("p", row), config.sampling, "images")
    finally:
        await server.stop()
    assert (group.dropped, len(group.trajectories)) == ({}, 2)
    batch = SampleBatch()
    for trajectory in group.trajectories:
        assert [len(turn.images) for turn in trajectory.turns] == [1, 1]
        assert [turn.fork_reason for turn in trajectory.turns] == [None, None]
        assert audit(trajectory).first_violation is None
        shown = [one.image.read() for one in trajectory.prompt(1).images]
        assert shown == [encoded(picture(seed=3)), encoded(picture(28, 28, 7))]
        assert trajectory.reward == 2.0
        add_trajectory(batch, trajectory, [1.0, 1.0], 0)
    assert [len(sample.images) for sample in batch.samples] == [2, 2]
    # Both trajectories have the one object of the row's image.
    first, second = (t.prompt(0).images[0].image for t in group.trajectories)
    assert first is second


async def test_a_broken_image_of_a_row_costs_its_trajectories(
    vision_path: str, endpoint: str
) -> None:
    config = seeing(vision_path, endpoint)
    engine = SimulatedEngine(vocab_size=1000, mean_tokens=4, latency=QUICK)
    server = OpenAIServer(config, engine)
    await server.start()
    try:
        runner = Runner(config, load_tokenizer(config.model))
        runner.loops["agent"].server = server
        problem = Problem("p", {"image": {"bytes": b"nothing", "path": None}})
        group = await runner.run_group(engine, problem, config.sampling, "images")
    finally:
        await server.stop()
    assert group.dropped == {"agent_error": 2}
    assert "is no image that can be read" in group.causes["agent_error"]
