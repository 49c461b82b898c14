"""Real engines that join and leave a fleet."""

import asyncio
from collections.abc import Callable

import pytest

from tests.serving.test_fleet import serve
from tests.weights.trainer import OneRank
from turnwise.config import Config, SamplingConfig
from turnwise.engine import Completion, Request, Route, generate
from turnwise.run.fleet import make_manager
from turnwise.serving import manager as manager_module
from turnwise.serving.manager import AsyncLLMServerManager
from turnwise.weights.sync import WeightSync

pytestmark = pytest.mark.slow

LONG = SamplingConfig(max_tokens=400, ignore_eos=True)


async def joined(manager: AsyncLLMServerManager, count: int) -> None:
    async with asyncio.timeout(400):
        while len(manager.engines) != count or manager._leaving:
            await asyncio.sleep(0.05)


async def sample(manager: AsyncLLMServerManager, name: str) -> None:
    """Sample from all engines at once."""
    sampling = SamplingConfig(max_tokens=64, ignore_eos=True)
    requests = (
        Request([5 + i % 40, 6], sampling, f"{name}-{i}", route=Route(f"{name}-{i}"))
        for i in range(64)
    )
    done = await asyncio.gather(*(generate(manager.scheduler, request) for request in requests))
    assert {each.worker for each in done} == set(manager.scheduler.workers)


@pytest.mark.parametrize("transport", ["shm", "collective"])
async def test_a_fleet_of_one_gets_three_more_and_gives_two_back(
    ray_started: None, make_config: Callable[..., Config], model_path: str, transport: str
) -> None:
    trainer = OneRank(model_path, transport)
    sync = WeightSync(trainer, timeout=240, patience=240)

    async def update(manager: AsyncLLMServerManager, version: int) -> None:
        trainer.train(version)
        await sync.publish()
        await manager.update_weights(sync)
        await serve(manager, trainer, version)

    async with make_manager(make_config(serving={"workers": 1}), 0).running() as manager:
        await update(manager, 1)
        busy = asyncio.create_task(sample(manager, "alone"))
        await busy
        await manager.scale(4)
        await joined(manager, 4)
        assert [engine.name for engine in manager.engines] == [f"worker-{i}" for i in range(4)]
        await serve(manager, trainer, 1)  # without an update since they came
        await update(manager, 2)
        await sample(manager, "grown")
        await manager.scale(2)
        await joined(manager, 2)
        await update(manager, 3)
        await sample(manager, "two")
        assert not manager.failures
    trainer.sender.close()


async def test_turns_that_are_handed_over_are_exact_to_the_token(
    ray_started: None,
    make_config: Callable[..., Config],
    model_path: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(manager_module, "_LEAVE_SECONDS", 0.0)
    trainer = OneRank(model_path)
    sync = WeightSync(trainer, timeout=120, patience=120)
    async with make_manager(make_config(serving={"workers": 2}), 0).running() as manager:
        trainer.train(1)
        await sync.publish()
        await manager.update_weights(sync)
        handed_over = 0
        for attempt in range(20):  # turns may end before they can be handed over
            prompts = [[5 + i, 6, 7] for i in range(16)]
            turns: list[asyncio.Task[Completion]] = [
                asyncio.create_task(
                    generate(manager.scheduler, Request(prompt, LONG, f"{attempt}-{i}"))
                )
                for i, prompt in enumerate(prompts)
            ]
            leaving = next(reversed(manager.scheduler.workers.values()))
            while not any(turn.sampled for turn in leaving.running):
                await asyncio.sleep(0.005)
            await manager.scale(1)
            async with asyncio.timeout(300):
                completions = await asyncio.gather(*turns)
            for prompt, completion in zip(prompts, completions, strict=True):
                assert len(completion.token_ids) == 400
                expected = trainer.model.logprobs([*prompt, *completion.token_ids], len(prompt))
                assert completion.logprobs == pytest.approx(expected, abs=1e-4)
                assert set(completion.weight_versions) == {1}
            await joined(manager, 1)
            handed_over = manager.scheduler.events["handed_over"]
            if handed_over:
                break
            await manager.scale(2)
            await joined(manager, 2)
        assert handed_over
        assert not {"continued", "restarted", "moved"} & manager.scheduler.events.keys()
        assert not manager.failures
    trainer.sender.close()
