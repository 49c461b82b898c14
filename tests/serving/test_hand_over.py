"""A worker's turns, from processes and from its own server, which may be handed over to others."""

import asyncio
from collections.abc import Callable
from typing import Any

from tests.simulated import Latency, SimulatedEngine
from turnwise.config import Config, SamplingConfig
from turnwise.engine.protocol import Chunk, Request, generate
from turnwise.serving.openai.serving_host import ServingHost

LONG = SamplingConfig(n=1, max_tokens=10_000)
STEPS = Latency(prefill_token=0.0, step=1e-3, step_request=0.0)


class Box:
    """The mailbox of a process."""

    def __init__(self) -> None:
        self.chunks = dict[str, list[Chunk]]()

    def add(self, request_id: str, chunk: Any) -> None:
        self.chunks.setdefault(request_id, []).append(chunk)

    async def has(self, request_id: str) -> None:
        while not self.chunks.get(request_id):
            await asyncio.sleep(0.001)


async def test_a_worker_hands_over_once_no_turn_would_be_lost(
    make_config: Callable[..., Config],
) -> None:
    worker: Any = ServingHost(make_config())
    worker._engine = SimulatedEngine(mean_tokens=10**9, latency=STEPS)
    box = Box()

    def begin(name: str, **more: Any) -> "asyncio.Task[None]":
        return asyncio.create_task(worker._run(box, Request([5, 6, 7], LONG, name, **more)))

    free, whole = begin("free"), begin("whole", seed=1, whole=True)
    bound = begin("bound", seed=1)
    for name in ("free", "whole", "bound"):
        await box.has(name)
    assert not await worker.hand_over()
    assert not any(task.done() for task in (free, whole, bound))
    bound.cancel()
    await asyncio.wait([bound])
    own = asyncio.create_task(generate(worker.turns, Request([5, 6, 7], LONG, "own server")))
    while await worker._engine.num_in_flight() < 3:
        await asyncio.sleep(0.001)
    assert not await worker.hand_over()
    own.cancel()
    await asyncio.wait([own])
    assert await worker.hand_over()
    await asyncio.gather(free, whole)
    assert {box.chunks[name][-1].finish_reason for name in ("free", "whole")} == {"abort"}
    assert (worker._running.count, worker._running.bound) == (0, 0)
