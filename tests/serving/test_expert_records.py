"""Records of experts (`engine.routing_replay`) through HTTP, deaths of engines and updates.

However a turn reached its end, its branch has the experts of every token, and they are those that
Transformers' model chooses.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from examples.calculator.tool import TOOL_SCHEMA
from tests.models import make_moe
from tests.rollouts.test_loops import END, call
from tests.serving.openai.test_server import QUESTION, converse, fetched
from tests.serving.test_fleet import engine_process
from tests.training.test_routing import assert_chosen_by, loaded
from tests.weights.trainer import OneRank
from turnwise.config import Config, SamplingConfig, WeightsConfig
from turnwise.engine import Completion, Request, generate
from turnwise.run.fleet import make_manager
from turnwise.serving.manager import AsyncLLMServerManager
from turnwise.serving.openai.server import OpenAIServer
from turnwise.trajectory import ChatTemplate, Trajectory
from turnwise.weights.sync import WeightSync

pytestmark = pytest.mark.slow
TURNS = (
    call("calculate", operation="+", a=12, b=30) + END,
    call("calculate", operation="*", a=42, b=2) + END,
    "The answer is 84." + END,
)
LONG = SamplingConfig(max_tokens=256, ignore_eos=True)


class Fleet:
    """Two engines of a mixture of experts, and the model in Transformers."""

    def __init__(self, config: Config, manager: AsyncLLMServerManager) -> None:
        self.config, self.manager = config, manager
        self.model = loaded(config.model.path)

    def begin(self, name: str) -> list[asyncio.Task[None]]:
        """Sample long turns on both engines, and check their records when they end."""
        return [asyncio.create_task(self._sample(number, name)) for number in range(6)]

    async def _sample(self, number: int, name: str) -> None:
        prompt = [5 + number, *range(6, 30)]
        completion = await generate(
            self.manager.scheduler, Request(prompt, LONG, f"{name}-{number}")
        )
        self.check(prompt, completion)

    def check(self, prompt: list[int], completion: Completion) -> None:
        trajectory = Trajectory("p")
        ids, logprobs = completion.token_ids, completion.logprobs
        versions, experts = completion.weight_versions, completion.experts
        trajectory.add_turn(prompt, ids, logprobs, versions, "length", experts=experts)
        (branch,) = trajectory.branches()
        assert_chosen_by(self.model, branch)


@pytest.fixture(scope="module")
async def fleet(
    ray_started: None,
    make_config: Callable[..., Config],
    tokenizer: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Fleet]:
    path = make_moe(tokenizer, tmp_path_factory.mktemp("moe"))
    config = make_config(
        model={"path": path, "max_length": 512},
        engine={**make_config().engine.model_dump(), "routing_replay": True},
        serving={"workers": 2, "port": 0, "health_every": 0.5, "health_timeout": 20.0},
        sampling={"max_tokens": 200},
    )
    async with make_manager(config, 0).running() as manager:
        yield Fleet(config, manager)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_an_agents_session_has_the_experts_of_every_token(
    fleet: Fleet, template: ChatTemplate, stream: bool
) -> None:
    flat = [token for turn in TURNS for token in [*template.encode(turn), -1]]
    script = {"vllm_xargs": {"script": flat}}
    server = OpenAIServer(fleet.config, fleet.manager.scheduler)
    await server.start()
    root, name = server.base_url.removesuffix("/v1"), f"experts-{stream}"
    async with (
        httpx.AsyncClient(base_url=root, timeout=60) as http,
        AsyncOpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client,
    ):
        session = client.with_options(default_headers={"X-Session-ID": name})
        model = (await session.models.list()).data[0].id
        asked: dict[str, Any] = {"model": model, "messages": [QUESTION], "tools": [TOOL_SCHEMA]}
        async with session.chat.completions.stream(
            **asked, extra_body={"ignore_eos": True}
        ) as leaving:
            await anext(aiter(leaving))  # this client is gone in mid-answer
        await converse(session, model, script, stream=stream)
        trajectory = await fetched(http, name)
    await server.stop()
    assert len(trajectory.turns) >= 3  # and the one that was left, if it was over by then
    branches = trajectory.branches()
    for branch in branches:
        assert_chosen_by(fleet.model, branch)
    said = [template.decode_all(branch.token_ids) for branch in branches]
    assert any("The answer is 84." in text and text.count("<tool_call>") == 2 for text in said)


async def test_turns_that_outlive_an_engine_keep_every_tokens_experts(
    fleet: Fleet,
) -> None:
    manager = fleet.manager
    for attempt in range(20):
        known, victim = len(manager.failures), manager.engines[0]
        process = await engine_process(victim)
        tasks = fleet.begin(f"killed{attempt}")
        await until_sampled(fleet, tasks)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        await asyncio.gather(*tasks)
        async with asyncio.timeout(300):
            while len(manager.failures) == known or len(manager.engines) < 2:
                await asyncio.sleep(0.05)
        if manager.failures[-1].turns["continued"]:
            return
    pytest.fail("no turn was continued in 20 attempts")


@pytest.mark.parametrize("in_flight", ["abort", "keep", "keep_cache"])
async def test_turns_across_an_update_keep_every_tokens_experts(
    fleet: Fleet, in_flight: Any
) -> None:
    fleet.manager._weights = WeightsConfig(in_flight=in_flight)
    trainer = OneRank(fleet.config.model.path)  # the same weights under other versions
    trainer.version = 10 * ["abort", "keep", "keep_cache"].index(in_flight)
    sync = WeightSync(trainer, timeout=60, patience=60)
    aborted = fleet.manager.scheduler.events["aborted_by_update"]
    for _ in range(3):
        tasks = fleet.begin(in_flight)
        await until_sampled(fleet, tasks)
        trainer.version += 1
        await sync.publish()
        await fleet.manager.update_weights(sync)
        await asyncio.gather(*tasks)
    if in_flight == "abort":
        assert fleet.manager.scheduler.events["aborted_by_update"] > aborted
    trainer.sender.close()


async def until_sampled(fleet: Fleet, tasks: list[asyncio.Task[None]]) -> None:
    """Wait until both engines have sampled some tokens, or a turn has ended."""
    workers = fleet.manager.scheduler.workers.values()
    while not any(task.done() for task in tasks):
        if all(any(turn.sampled for turn in worker.running) for worker in workers):
            return
        await asyncio.sleep(0.005)
