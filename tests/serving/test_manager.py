"""The fleet's keeper, on simulated engines in virtual time."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from itertools import pairwise
from typing import Any

import pytest

from tests.simulated import SimulatedEngine
from tests.virtual_time import run_virtually
from turnwise.config import SamplingConfig, ServingConfig, WeightsConfig
from turnwise.engine import Request, generate
from turnwise.engine.protocol import Chunk
from turnwise.errors import DeadlineError, EngineError, InputError, WeightUpdateError
from turnwise.serving.hand_over import RunningTurns
from turnwise.serving.manager import AsyncLLMServerManager
from turnwise.weights.manifest import Manifest
from turnwise.weights.sync import WeightSync

SAMPLING = SamplingConfig(max_tokens=64)


class Managed(SimulatedEngine):
    """A simulated engine in a process that can be ended, and that several others may use."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._turns = RunningTurns()

    async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        async with (
            aclosing(super().stream(request)) as made,
            aclosing(self._turns.watched(request, made)) as chunks,
        ):
            async for chunk in chunks:
                yield chunk

    async def hand_over(self) -> bool:
        if self._turns.bound:
            return False
        await self.pause("abort")
        return True

    def fail(self, why: str) -> None:
        self.die()

    def kill(self) -> None:
        self.die()


CANARY = [5, 6, 7]
LOGPROBS = (-0.006, -0.007)
"""The log-probs that simulated engines give to the canary."""


class Published:
    """A trainer whose weights are a number."""

    def __init__(self, logprobs: tuple[float, float] = LOGPROBS) -> None:
        self.version = 0
        self.logprobs = logprobs

    async def publish(self) -> Manifest:
        return Manifest(self.version, "shm", "", 0, (), 0, CANARY, self.logprobs)

    async def send(self, devices: Any) -> None: ...

    async def rendezvous(self) -> tuple[str, int]:
        return "", 0

    async def join(self, ip: str, port: int, engine_workers: int, timeout: float) -> None: ...


async def update(
    manager: AsyncLLMServerManager, version: int, logprobs: tuple[float, float] = LOGPROBS
) -> list[int]:
    """Update a fleet to a version; return the versions of the engines that serve it."""
    trainer = Published(logprobs)
    trainer.version = version
    sync = WeightSync(trainer, timeout=120, patience=300, tolerance=1e-6)
    await sync.publish()
    return [updated.version for updated in await manager.update_weights(sync)]


def simulated(
    workers: int | str = 2,
    start: Callable[[str], Managed] | None = None,
    startup_seconds: float = 5.0,
    left: Callable[[int], None] = lambda index: None,
    **serving: Any,
) -> AsyncLLMServerManager:
    async def begin(name: str, index: int) -> Managed:
        await asyncio.sleep(startup_seconds)
        return start(name) if start else Managed(name=name)

    config = ServingConfig(workers=workers, **serving)
    return AsyncLLMServerManager(begin, config, WeightsConfig(), turn_timeout=120.0, left=left)


def test_workers_start_together_and_all_end_when_one_fails() -> None:
    started: list[Managed] = []

    def start(name: str) -> Managed:
        if name == "worker-2":
            raise InputError("vLLM cannot serve worker-2's model")
        started.append(Managed(name=name))
        return started[-1]

    async def work() -> None:
        manager = simulated(8)
        await manager.start()
        assert asyncio.get_running_loop().time() == pytest.approx(5.0)
        assert len(manager.engines) == 8
        await manager.shutdown()
        with pytest.raises(InputError, match="worker-2's model"):
            await simulated(4, start).start()
        assert all(engine._dead for engine in started)

    run_virtually(work())


@pytest.mark.parametrize("way", ["die", "hang"])
def test_a_lost_worker_comes_back_with_the_current_weights(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        async with simulated().running() as manager:
            await update(manager, 3)
            turns = [
                asyncio.create_task(
                    generate(manager.scheduler, Request(list(range(1, 90 + i)), SAMPLING, f"r{i}"))
                )
                for i in range(64)
            ]
            await asyncio.sleep(0.3)
            lost = manager.engines[0]
            getattr(lost, way)()
            completions = await asyncio.gather(*turns)
            for index, completion in enumerate(completions):
                assert completion.token_ids == lost.expected(range(1, 90 + index), 64)
            while len(manager.engines) < 2:
                await asyncio.sleep(1.0)
            assert manager.engines[0].version == 3
            (loss,) = manager.failures
            assert loss.turns.total() > 10
            assert sum(r.name.startswith("turnwise") for r in caplog.records) == 1

    with caplog.at_level(logging.WARNING):
        run_virtually(work())
    why = r"worker-0 died" if way == "die" else r"no answer to health checks in 20 s"
    assert f"worker-0 failed ({why}) and is back after" in caplog.text
    assert "turns continued elsewhere from their tokens" in caplog.text


def test_a_worker_that_is_not_back_soon_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with simulated(startup_seconds=40).running() as manager:
            manager.engines[0].die()
            await asyncio.sleep(35)
            assert "worker-0 is lost (worker-0 is dead), and not back after 30 s" in caplog.text
            await asyncio.sleep(35)
            assert "worker-0 failed (worker-0 is dead) and is back after" in caplog.text
            assert caplog.text.count("not back") == 1

    with caplog.at_level(logging.WARNING):
        run_virtually(work())


def test_a_worker_that_stays_down_is_retried_ever_less_often() -> None:
    starts: list[float] = []

    def start(name: str) -> Managed:
        starts.append(asyncio.get_running_loop().time())
        if 1 < len(starts) < 9:
            raise EngineError("no memory left")
        return Managed(name=name)

    async def work() -> None:
        async with simulated(1, start, max_restarts=2).running() as manager:
            manager.engines[0].die()
            with pytest.raises(EngineError, match="no worker left: worker-0 failed: worker-0"):
                await generate(manager.scheduler, Request([1, 2, 3], SAMPLING, "r"))
            assert manager.given_up == {"worker-0": "no memory left"}
            assert len(starts) == 3
            while not manager.engines:
                await asyncio.sleep(1.0)
            waits = [after - before - 5 for before, after in pairwise(starts[2:])]
            assert waits == pytest.approx([60, 120, 240, 480, 600, 600])
            assert manager.given_up == {}
            assert (await generate(manager.scheduler, Request([1, 2, 3], SAMPLING, "r2"))).token_ids

    run_virtually(work())


def test_a_request_that_ends_workers_uses_up_no_restarts(caplog: pytest.LogCaptureFixture) -> None:
    class Fragile(Managed):
        async def stream(self, request: Request) -> Any:
            if 666 in request.prompt.tolist():
                asyncio.get_running_loop().call_later(0.001, self.die)
            async with aclosing(super().stream(request)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def work() -> None:
        fragile = simulated(1, lambda name: Fragile(name=name), max_restarts=1)
        async with fragile.running() as manager:
            for index in range(5):
                poison = [666, index + 1, *range(1, 200)]
                with pytest.raises(EngineError, match="crashed 2 workers"):
                    await generate(manager.scheduler, Request(poison, SAMPLING, f"poison{index}"))
                assert (
                    await generate(manager.scheduler, Request([1, 2, 3], SAMPLING, "r"))
                ).token_ids
            assert len(manager.failures) == 10
            assert manager.given_up == {}

    with caplog.at_level(logging.WARNING):
        run_virtually(work())
    assert "poison0 crashed 2 workers (worker-0, worker-0) and is refused for 600 s" in caplog.text


def test_a_request_that_fails_by_itself_costs_no_worker() -> None:
    class Choosy(Managed):
        async def stream(self, request: Request) -> Any:
            if 667 in request.prompt.tolist():
                await asyncio.sleep(1.0)
                raise DeadlineError(f"{self.name} did not finish request bomb in 1 s")
            async with aclosing(super().stream(request)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def work() -> None:
        async with simulated(2, lambda name: Choosy(name=name)).running() as manager:
            honest = asyncio.create_task(
                generate(manager.scheduler, Request(list(range(1, 99)), SAMPLING, "honest"))
            )
            with pytest.raises(DeadlineError, match="bomb failed 2 times on healthy workers"):
                await generate(manager.scheduler, Request([667, 1], SAMPLING, "bomb"))
            assert (await honest).token_ids
            assert [w.usable for w in manager.scheduler.workers.values()] == [True, True]
            assert sum((w.failed_turns for w in manager.scheduler.workers.values()), Counter()) == {
                "moved": 1
            }
            await asyncio.sleep(60)
            assert manager.failures == []

    run_virtually(work())


def test_an_unexpected_error_fails_a_worker_but_not_the_watch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Odd(Managed):
        async def check_health(self) -> None:
            await super().check_health()
            if self.name in odd:
                odd.remove(self.name)
                raise RuntimeError("as nobody expected")

        def kill(self) -> None:
            raise OSError("the process is somebody else's")

    odd: list[str] = []

    async def work() -> None:
        async with simulated(2, lambda name: Odd(name=name)).running() as manager:
            for round_ in range(1, 3):
                odd.append("worker-1")
                while len(manager.failures) < round_:
                    await asyncio.sleep(1.0)
            manager.engines[1].die()
            await asyncio.sleep(30)
            assert [loss.worker for loss in manager.failures] == ["worker-1"] * 3
            assert len(manager.engines) == 2

    with caplog.at_level(logging.WARNING):
        run_virtually(work())
    why = "its health check failed: RuntimeError('as nobody expected')"
    assert f"worker-1 failed ({why}) and is back after" in caplog.text
    assert "worker-1 could not be ended" in caplog.text


def test_an_update_reaches_survivors_and_the_restarted_worker() -> None:
    class Dying(Managed):
        async def update_weights(self, manifest: Manifest, *args: Any) -> int:
            if manifest.version == 1 and self.name == "worker-1" and not died:
                died.append(self.name)
                raise EngineError("worker-1 died during a weight update")
            return await super().update_weights(manifest, *args)

    died: list[str] = []

    async def work() -> None:
        async with simulated(3, lambda name: Dying(name=name)).running() as manager:
            assert await update(manager, 1) == [1, 1]
            while len(manager.engines) < 3:
                await asyncio.sleep(1.0)
            assert [engine.version for engine in manager.engines] == [1, 1, 1]

            with pytest.raises(WeightUpdateError, match="its weights are not the trainer's"):
                await update(manager, 2, (-0.006, -0.5))

    run_virtually(work())


def test_an_update_that_one_worker_refuses_touches_none() -> None:
    class Choosy(Managed):
        async def check_update(self, manifest: Manifest) -> list[str]:
            if manifest.version == 2 and self.name == "worker-1":
                raise WeightUpdateError("worker-1 refused a weight update: too heavy")
            return await super().check_update(manifest)

    async def work() -> None:
        async with simulated(3, lambda name: Choosy(name=name)).running() as manager:
            await update(manager, 1)
            with pytest.raises(WeightUpdateError, match="too heavy"):
                await update(manager, 2)
            assert [engine.version for engine in manager.engines] == [1, 1, 1]
            manager.engines[0].die()
            await asyncio.sleep(30)
            assert [engine.version for engine in manager.engines] == [1, 1, 1]
            assert manager.failures

    run_virtually(work())


def test_an_update_that_no_worker_takes_up_is_told() -> None:
    class Failing(Managed):
        async def update_weights(self, manifest: Manifest, *args: Any) -> int:
            raise WeightUpdateError(f"{self.name}: a tensor cannot be loaded")

    async def work() -> None:
        async with simulated(2, lambda name: Failing(name=name)).running() as manager:
            with pytest.raises(WeightUpdateError, match="worker-0: a tensor cannot be loaded"):
                await update(manager, 1)
            assert len(manager.engines) == 2  # the next update may mend them

    run_virtually(work())


def test_a_worker_that_does_not_check_an_update_is_replaced() -> None:
    class Slow(Managed):
        async def check_update(self, manifest: Manifest) -> list[str]:
            if self.name == "worker-1" and not late:
                late.append(self)
                await asyncio.sleep(1000)
            return await super().check_update(manifest)

        async def update_weights(self, manifest: Manifest, *args: Any) -> int:
            dead.append(late[0]._dead)  # it must not serve old weights while others load new ones
            return await super().update_weights(manifest, *args)

    late: list[Slow] = []
    dead: list[bool] = []

    async def work() -> None:
        async with simulated(2, lambda name: Slow(name=name)).running() as manager:
            assert await update(manager, 1) == [1]
            while len(manager.engines) < 2:
                await asyncio.sleep(1.0)
            assert [engine.version for engine in manager.engines] == [1, 1]
            assert (
                "worker-1 did not check the update to version 1 within 30 s"
                in manager.failures[0].why
            )
            assert dead == [True, True]

    run_virtually(work())


def test_sleeping_workers_keep_turns_waiting_until_they_wake() -> None:
    async def work() -> None:
        async with simulated().running() as manager:
            await manager.sleep()
            turn = asyncio.create_task(
                generate(manager.scheduler, Request([1, 2, 3], SAMPLING, "r"))
            )
            await asyncio.sleep(1.0)
            assert not turn.done()
            await manager.wake_up()
            assert (await turn).token_ids

    run_virtually(work())
