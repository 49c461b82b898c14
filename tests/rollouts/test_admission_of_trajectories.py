"""A trajectory that waits holds nothing that an engine could use."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from tests.rollouts.test_judges import verdict
from tests.rollouts.test_runner import Crowd
from tests.scripted import Scripted
from tests.simulated import SimulatedEngine
from turnwise.config import Config, SamplingConfig
from turnwise.core.admission import Priority
from turnwise.engine.protocol import Chunk, Occupancy, Request
from turnwise.rollouts import Problem, RolloutContext, Runner
from turnwise.rollouts.loops import SingleTurnLoop
from turnwise.serving.scheduler import Scheduler
from turnwise.serving.seats import engine_admission, limits_of
from turnwise.trajectory import Trajectory

HERE = "tests.rollouts.test_admission_of_trajectories"
SECONDS = 60


class Desk:
    problem = ({"role": "user", "content": "Go."},)
    tools = ()

    def __init__(self, row: dict[str, Any]) -> None:
        self.row = row

    def reward(self, trajectory: Trajectory) -> float:
        return 1.0


class Counting(Crowd):
    """Knows how many answers it has sampled, too."""

    sampled = 0

    async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        try:
            async for chunk in super().stream(request):
                yield chunk
        finally:
            self.sampled += 1


class ToolLoop(SingleTurnLoop):
    """Waits for a tool that answers when all have asked it."""

    async def run(self, environment: Any, context: RolloutContext) -> None:
        await super().run(environment, context)
        with context.timed("tools"):
            await environment.row["tool"].wait()


async def test_a_judge_of_concurrency_1_leaves_no_engine_idle(
    scripted: Scripted, make_config: Callable[..., Config], tokenizer: Any
) -> None:
    """It answers nobody before all prompts were sampled."""
    engine, over = Counting(vocab_size=len(tokenizer)), threading.Event()

    def patient(body: dict[str, Any]) -> str:
        assert over.wait(SECONDS)
        return verdict(1)

    scripted.answer = patient
    judge = {"url": scripted.url, "model": "m", "rubric": "Any.", "concurrency": 1}
    config = make_config(
        environment=f"{HERE}:Desk",
        engine={"max_num_seqs": 16},
        rollout={"loop": "single_turn", "rewards": [{"judge": judge}]},
    )
    runner = Runner(config, tokenizer)
    sampling = SamplingConfig(n=64, max_tokens=8)
    problem = Problem("rows:1", {})
    running = asyncio.create_task(runner.run_group(engine, problem, sampling, "step1.0"))
    async with asyncio.timeout(SECONDS):
        while engine.sampled < 64:
            assert not running.done()
            await asyncio.sleep(0.01)
        over.set()
        group = await running
    assert len(group.trajectories) == 64
    assert engine.most <= limits_of(config, config.serving.max_workers).at_once == 20
    assert scripted.most == 1


@pytest.mark.parametrize(("concurrency", "most"), [(None, 40), (8, 8)])
async def test_tools_hold_a_place_where_a_number_is_given(
    make_config: Callable[..., Config], tokenizer: Any, concurrency: int | None, most: int
) -> None:
    engine, tool = Counting(vocab_size=len(tokenizer)), asyncio.Event()
    config = make_config(
        environment=f"{HERE}:Desk",
        engine={"max_num_seqs": 8},
        rollout={"loop": f"{HERE}:ToolLoop", "concurrency": concurrency},
    )
    runner = Runner(config, tokenizer)
    sampling = SamplingConfig(n=60, max_tokens=8)
    problem = Problem("rows:1", {"tool": tool})
    running = asyncio.create_task(runner.run_group(engine, problem, sampling, "step1.0"))
    async with asyncio.timeout(SECONDS):
        while engine.sampled < most:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert engine.sampled == most, "four times as many as keep the engine busy, or the number"
        tool.set()
        assert len((await running).trajectories) == 60
    assert engine.most <= 10


async def test_the_seats_of_an_engine_follow_its_cache(make_config: Callable[..., Config]) -> None:
    config = make_config(engine={"max_num_seqs": 64}, serving={"workers": 2})
    scheduler = Scheduler(config.serving, 1.0)
    admission = engine_admission(limits_of(config), scheduler)
    assert admission.limits.working == 160
    for name in ("worker-0", "worker-1"):
        scheduler.add(name, SimulatedEngine(name=name))
    scheduler.note_occupancy("worker-0", Occupancy(running=20, waiting=30, cache=0.98))
    assert admission.limits.working == 20 + 80
    scheduler.note_occupancy("worker-0", Occupancy(running=18, waiting=0, cache=0.95))
    assert admission.limits.working == 20 + 80, "it is full, and nothing waits"
    for cache, seats in ((0.7, 25), (0.7, 32), (0.3, 64), (0.3, 80), (0.3, 80)):
        scheduler.note_occupancy("worker-0", Occupancy(running=20, waiting=0, cache=cache))
        assert admission.limits.working == seats + 80
    scheduler.note_occupancy("worker-9", Occupancy(1, 1, 1.0))
    scheduler.remove("worker-0")
    assert admission.limits.working == 160, "that of its successor"
    scheduler.add("worker-2", SimulatedEngine(name="worker-2"))
    scheduler.add("worker-3", SimulatedEngine(name="worker-3"))
    assert admission.limits.working == 240


async def test_an_evaluation_beside_training_waits_for_it(
    make_config: Callable[..., Config], tokenizer: Any
) -> None:
    """The order in which the engine was asked."""
    asked = list[str]()

    class Ordered(Counting):
        def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
            asked.append(request.id.partition("-")[0])
            return super().stream(request)

    config = make_config(
        environment=f"{HERE}:Desk", rollout={"loop": "single_turn", "concurrency": 1}
    )
    runner, engine = Runner(config, tokenizer), Ordered(vocab_size=len(tokenizer))
    sampling, problem = SamplingConfig(n=2, max_tokens=4), Problem("rows:1", {})
    await runner.run_group(engine, problem, sampling, "warm")
    asked.clear()
    await asyncio.gather(
        *(
            runner.run_group(engine, problem, sampling, tag, priority=priority)
            for tag, priority in (
                ("first", Priority.TRAINING),
                ("eval", Priority.EVALUATION),
                ("second", Priority.TRAINING),
            )
        )
    )
    assert asked == ["first"] * 2 + ["second"] * 2 + ["eval"] * 2
