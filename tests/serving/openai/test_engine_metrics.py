"""Which engines' statistics are collected, and what those do that hang or fail."""

import asyncio
from typing import Any

from prometheus_client import Metric

from tests.simulated import SimulatedEngine
from turnwise.config import ServingConfig
from turnwise.errors import EngineError
from turnwise.serving.openai.metrics import EngineMetrics
from turnwise.serving.scheduler import Scheduler


class Told(SimulatedEngine):
    async def metrics(self) -> list[Any]:
        metric = Metric("vllm:tokens", "Tokens.", "counter")
        metric.add_sample("vllm:tokens_total", {"engine": "0"}, 3.0)
        return [metric]


class Dead(SimulatedEngine):
    async def metrics(self) -> list[Any]:
        raise EngineError("it is dead")


class Hung(SimulatedEngine):
    asked = 0

    async def metrics(self) -> list[Any]:
        self.asked += 1
        await asyncio.Event().wait()
        return []


async def test_those_that_answer_are_shown_and_the_others_named() -> None:
    """A hung worker is asked once, however often somebody looks."""
    scheduler, hung = Scheduler(ServingConfig(), 1.0), Hung()
    for name, engine in (("a", Told()), ("b", Dead()), ("c", hung), ("d", Told())):
        scheduler.add(name, engine)
    metrics = EngineMetrics(scheduler, seconds=0.05)
    for _ in range(3):
        tokens, answered = await metrics.collect()
        assert [(s.labels["worker"], s.value) for s in tokens.samples] == [("a", 3.0), ("d", 3.0)]
        assert tokens.samples[0].labels == {"engine": "0", "worker": "a"}
        assert {s.labels["worker"]: s.value for s in answered.samples} == dict(a=1, b=0, c=0, d=1)
    assert hung.asked == 1
    scheduler.remove("c")
    assert len((await metrics.collect())[1].samples) == 3


async def test_one_engine_alone_is_asked_by_its_own_name() -> None:
    """A worker's own server."""
    tokens, _ = await EngineMetrics(Told(name="worker-7")).collect()
    assert tokens.samples[0].labels["worker"] == "worker-7"


class Slow(Told):
    """Answers when it may."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.may = asyncio.Event()
        self.told = 0

    async def metrics(self) -> list[Any]:
        await self.may.wait()
        self.told += 1
        return await super().metrics()


async def test_two_who_look_at_once_both_see_the_workers() -> None:
    """One asks again at the moment in which the answers of the other arrive."""
    engine = Slow(name="worker-0")
    metrics = EngineMetrics(engine, seconds=60.0)
    first = asyncio.create_task(metrics.collect())
    await asyncio.sleep(0.01)
    engine.may.set()
    while not engine.told:
        await asyncio.sleep(0)
    second = asyncio.create_task(metrics.collect())
    assert [len(families) for families in await asyncio.gather(first, second)] == [2, 2]
