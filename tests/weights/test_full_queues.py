"""Updates of engines with full queues: their check waits for no request, and has a deadline."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from tests.simulated import Latency, SimulatedEngine
from turnwise.config import SamplingConfig
from turnwise.engine.protocol import Chunk, Request, generate
from turnwise.errors import DeadlineError
from turnwise.weights.manifest import Manifest
from turnwise.weights.sync import Updated, WeightSync

RUN = 4
LONG = SamplingConfig(n=1, max_tokens=400)
STEPS = Latency(step=1e-4, prefill_token=0, step_request=0)


class Trainer:
    """A trainer whose canary is what the simulated engine scores."""

    async def publish(self) -> Manifest:
        return Manifest(1, "disk", "", 0, (), prompt=(5, 6, 7), logprobs=(-0.006, -0.007))


def synced(timeout: float = 60.0) -> WeightSync:
    trainer: Any = Trainer()
    return WeightSync(trainer, timeout, timeout, tolerance=1e-6)


@pytest.mark.parametrize("queued", [0, 40])
@pytest.mark.parametrize("joining", [False, True], ids=["update", "update_one"])
async def test_an_update_waits_for_no_request_of_the_queue(queued: int, joining: bool) -> None:
    engine = SimulatedEngine(mean_tokens=10**9, max_num_seqs=RUN, latency=STEPS)
    requests = [Request([5, 6, k], LONG, f"r{k}") for k in range(RUN + queued)]
    tasks = [asyncio.create_task(generate(engine, each)) for each in requests]
    await asyncio.sleep(0)
    sync = synced()
    await sync.publish()
    if joining:
        sync.current = await Trainer().publish()
        assert await sync.update_one(engine, "keep") == 1
    else:
        (updated,) = (await sync.update([engine], "keep")).values()
        assert isinstance(updated, Updated)
    assert sum(task.done() for task in tasks) == 0
    for request, completion in zip(requests, await asyncio.gather(*tasks), strict=True):
        assert completion.token_ids == engine.expected(request.prompt.tolist(), 400)


class Mute(SimulatedEngine):
    """An engine that loads an update, and scores nothing."""

    async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        await asyncio.Event().wait()
        yield Chunk([], [], [])


async def test_a_check_without_an_answer_ends_at_the_updates_deadline() -> None:
    engine, sync = Mute(), synced(0.2)
    await sync.publish()
    (result,) = (await sync.update([engine], "keep")).values()
    assert isinstance(result, DeadlineError)
    assert "engine did not score the canary of version 1" in str(result)
    with pytest.raises(DeadlineError, match="did not score the canary"):
        await sync.update_one(engine, "keep")
