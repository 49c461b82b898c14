"""One engine with the requests of several clients: what one's adapter computes reaches no other."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace

import pytest

from tests.adapters import adapter_config, adapter_tensors, write_adapter
from turnwise.config import Config, SamplingConfig
from turnwise.engine.protocol import Completion, Request, Route, generate
from turnwise.errors import TrajectoryError
from turnwise.serving.worker_handle import WorkerHandle

GREEDY = SamplingConfig(max_tokens=12, temperature=0.0, ignore_eos=True)
SCORED = SamplingConfig(max_tokens=1, prompt_logprobs=True)
LENGTHS = (3, 17, 33, 70, 100)


@pytest.fixture(scope="module")
async def engine(
    ray_started: None,
    make_config: Callable[..., Config],
    model_path: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[WorkerHandle]:
    """An engine with a small cache, and beside a good adapter one whose training has diverged: all
    of its values are finite, and what it computes is not."""
    folder = tmp_path_factory.mktemp("adapters")
    adapters = {
        name: write_adapter(
            folder / name, adapter_tensors(model_path, 4, size=size), adapter_config(model_path, 4)
        )
        for name, size in (("good", 0.5), ("diverged", 1e36))
    }
    small = {"kv_cache_gib": 0.004, "max_num_seqs": 8}
    config = make_config(serving={"adapters": adapters}, engine=small)
    engine = await WorkerHandle.start(config, name="shared")
    yield engine
    await engine.shutdown()


async def answer(engine: WorkerHandle, adapter: str, length: int) -> Completion:
    request = Request(list(range(7, 7 + length)), GREEDY, f"{adapter}-{length}")
    return await generate(engine, replace(request, route=Route(adapter=adapter)))


async def diverge(engine: WorkerHandle, number: int) -> bool:
    """Sample from the diverged adapter, score a prompt with it, or leave in the midst of an answer;
    return whether the client got an error."""
    ids = random.Random(number).choices(range(5, 60), k=300)
    route = Route(adapter="diverged")
    request = Request(ids, (GREEDY, SCORED, GREEDY)[number % 3], f"diverged-{number}", route=route)
    try:
        if number % 3 < 2:
            await generate(engine, request)
        else:
            async with aclosing(engine.stream(request)) as chunks:
                async with asyncio.timeout(0.01 * (number % 10)):
                    await anext(chunks)
    except TrajectoryError as error:
        return error.reason == "no_token"
    except TimeoutError:
        pass
    return False


@pytest.mark.parametrize("adapter", ["", "good"])
async def test_nobody_sees_what_a_diverged_adapter_left_in_the_cache(
    engine: WorkerHandle, adapter: str
) -> None:
    before = {length: await answer(engine, adapter, length) for length in LENGTHS}
    failed = 0
    for round_ in range(4):  # the blocks of some are freed while others are being computed
        whose = [diverge(engine, 24 * round_ + number) for number in range(24)]
        beside = [answer(engine, adapter, length) for length in LENGTHS]
        errors, others = await asyncio.gather(asyncio.gather(*whose), asyncio.gather(*beside))
        failed += sum(errors)
        expected = [each.token_ids for each in before.values()]
        assert [each.token_ids for each in others] == expected
        for _ in range(4):
            await engine.reset_prefix_cache()  # so that new blocks are taken
            for length in LENGTHS:  # one at a time, which makes them equal bit for bit
                assert await answer(engine, adapter, length) == before[length]
    assert failed >= 24


async def test_an_urgent_request_waits_for_none_of_a_full_queue(engine: WorkerHandle) -> None:
    long = GREEDY.model_copy(update={"max_tokens": 400})
    requests = [Request([5, 6, 7 + number], long, f"long-{number}") for number in range(24)]
    alone = await generate(engine, requests[7])
    waiting = [asyncio.create_task(generate(engine, each)) for each in requests]
    while await engine.num_in_flight() < len(requests):
        await asyncio.sleep(0.01)
    for number in range(3):
        urgent = Request(list(range(5, 105)), SCORED, f"urgent-{number}", urgent=True)
        assert len((await generate(engine, urgent)).prompt_logprobs or []) == 100
    assert sum(each.done() for each in waiting) == 0
    done = await asyncio.gather(*waiting)
    assert {len(each.token_ids) for each in done} == {400}
    assert done[7].token_ids == alone.token_ids  # it made room, and went on as if it had not
