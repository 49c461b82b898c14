"""Engines that join and leave a fleet, on simulated engines in virtual time."""

import asyncio
import contextlib
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.serving.test_manager import SAMPLING, Managed, Published, simulated, update
from tests.simulated import Latency
from tests.virtual_time import run_virtually
from turnwise.config import Config, SamplingConfig, ServingConfig, WeightsConfig
from turnwise.core.admission import Admission, Limits
from turnwise.engine import Request, Route, generate
from turnwise.engine.protocol import collect
from turnwise.errors import EngineError
from turnwise.serving.manager import AsyncLLMServerManager
from turnwise.serving.scheduler import Scheduler
from turnwise.serving.seats import EngineSeats
from turnwise.weights.manifest import Manifest
from turnwise.weights.sync import WeightSync

LONG = SamplingConfig(max_tokens=400)


async def joined(manager: AsyncLLMServerManager, count: int) -> None:
    async with asyncio.timeout(600):
        while len(manager.engines) < count:
            await asyncio.sleep(0.05)


async def left(manager: AsyncLLMServerManager) -> None:
    """Wait until all that leave have left."""
    async with asyncio.timeout(600):
        while manager._leaving:
            await asyncio.sleep(0.05)


class Sessions:
    """Sessions of three turns without end, which check their tokens.

    Args:
        lanes: Sessions in flight.
    """

    def __init__(self, manager: AsyncLLMServerManager, lanes: int) -> None:
        self.ends: list[tuple[float, int]] = []
        """Time and tokens of each turn."""
        self.wrong = 0
        self._manager, self._number = manager, 0
        self._going = True
        self._lanes = [asyncio.create_task(self._lane(index)) for index in range(lanes)]

    async def _lane(self, index: int) -> None:
        chance, reference = random.Random(index), Managed()
        while self._going:
            self._number = number = self._number + 1
            prompt = [(number * 31 + i * 7) % 997 + 1 for i in range(60)]
            route = Route(f"s{number}", f"g{number // 8}")
            for turn in range(3):
                request = Request(prompt, SAMPLING, f"{number}-{turn}", route=route)
                completion = await generate(self._manager.scheduler, request)
                self.wrong += completion.token_ids != reference.expected(prompt, 64)
                now = asyncio.get_running_loop().time()
                self.ends.append((now, len(completion.token_ids)))
                prompt = [*prompt, *completion.token_ids, 5, 5, 5]
                await asyncio.sleep(chance.choice([0.01, 0.2]))

    def rate(self, begin: float, end: float) -> float:
        """Return the tokens per second in a time."""
        return sum(n for at, n in self.ends if begin < at <= end) / (end - begin)

    async def end(self) -> None:
        self._going = False
        await asyncio.gather(*self._lanes)


def test_a_fleet_grown_to_four_engines_reaches_the_rate_of_four() -> None:
    """In virtual time, in which a rate does not depend on the machine."""

    async def rate_from(first: int) -> float:
        clock = asyncio.get_running_loop().time
        async with simulated(first).running() as manager:
            await update(manager, 1)
            sessions = Sessions(manager, 128)
            await asyncio.sleep(3)
            await manager.scale(4)
            await joined(manager, 4)
            await asyncio.sleep(2)
            begin = clock()
            await asyncio.sleep(8)
            rate = sessions.rate(begin, clock())
            turns = [worker.turns for worker in manager.scheduler.workers.values()]
            assert [engine.name for engine in manager.engines] == [f"worker-{i}" for i in range(4)]
            await sessions.end()
            assert sessions.wrong == 0
            assert not manager.failures
            assert max(turns) < 1.5 * min(turns) or first == 1, "the first one has served longer"
        return rate

    four, grown = run_virtually(rate_from(4)), run_virtually(rate_from(1))
    assert grown >= 0.9 * four, (grown, four)


def test_a_new_engine_has_current_weights_before_its_first_turn() -> None:
    used: dict[str, set[int]] = {}

    class Versioned(Managed):
        def _advance(self, request: Any) -> None:
            used.setdefault(self.name, set()).add(self.version)
            super()._advance(request)

    async def work() -> None:
        async with simulated(1, lambda name: Versioned(name=name)).running() as manager:
            await update(manager, 1)
            sessions = Sessions(manager, 32)
            await manager.scale(3)
            await asyncio.sleep(1)
            assert await update(manager, 2) == [2], "while they start"
            await joined(manager, 3)
            await asyncio.sleep(1)
            assert await update(manager, 3) == [3, 3, 3]
            await asyncio.sleep(1)
            await sessions.end()
            assert sessions.wrong == 0
        assert used == {"worker-0": {1, 2, 3}, "worker-1": {2, 3}, "worker-2": {2, 3}}

    run_virtually(work())


def test_a_leaving_worker_finishes_its_turns_and_gets_no_others() -> None:
    async def work() -> None:
        gone: list[int] = []
        async with simulated(3, left=gone.append).running() as manager:
            sessions = Sessions(manager, 48)
            await asyncio.sleep(2)
            leaving = manager.engines[1:]
            await manager.scale(1)
            assert list(manager.scheduler.workers) == ["worker-0"]
            assert [e.name for e in manager.engines] == ["worker-0"]
            assert await update(manager, 7) == [7], "those that leave get no update"
            await left(manager)
            assert all(engine._dead for engine in leaving)
            assert sorted(gone) == [1, 2]
            await asyncio.sleep(1)
            await sessions.end()
            assert sessions.wrong == 0
            events = manager.scheduler.events
            assert not {"continued", "moved", "restarted", "handed_over"} & events.keys(), events
            assert events["moved_gone"] > 0
            await manager.scale(2)
            await joined(manager, 2)
            assert [engine.version for engine in manager.engines] == [7, 7]

    run_virtually(work())


def slow(name: str) -> Managed:
    """An engine on which a long turn takes minutes."""
    return Managed(name=name, mean_tokens=10**9, latency=Latency(step=0.5))


def test_long_turns_are_handed_over_with_their_tokens() -> None:
    async def work() -> None:
        async with simulated(2, slow).running() as manager:
            requests = [Request([1, 2, 3 + i], LONG, f"r{i}") for i in range(8)]
            turns = [asyncio.create_task(generate(manager.scheduler, r)) for r in requests]
            await asyncio.sleep(30)
            worker, leaving = manager.scheduler.workers["worker-1"], manager.engines[1]
            count = len(worker.running)
            assert count == 4
            await manager.scale(1)
            await asyncio.sleep(50)
            assert len(worker.running) == count, "they may still end"
            await left(manager)
            assert leaving._dead
            for request, completion in zip(requests, await asyncio.gather(*turns), strict=True):
                assert completion.token_ids == leaving.expected(request.prompt.tolist(), 400)
                assert completion.worker == "worker-0"
            events = manager.scheduler.events
            assert events["handed_over"] == count
            assert not events["continued"], "a worker that leaves has not died"
            assert not manager.scheduler._quarantined

    run_virtually(work())


def test_a_streamed_turn_that_cannot_move_ends_on_its_worker() -> None:
    async def work() -> None:
        async with simulated(2, slow).running() as manager:
            stopped = LONG.model_copy(update={"stop": ["never"]})
            requests = [Request([1, 2, 3 + i], stopped, f"streamed-{i}") for i in range(2)]
            streams = [
                asyncio.create_task(collect(manager.scheduler.stream(r), r.id)) for r in requests
            ]
            await asyncio.sleep(30)
            leaving = manager.engines[1]
            assert len(manager.scheduler.workers["worker-1"].running) == 1
            await manager.scale(1)
            ended = await asyncio.gather(*streams)
            assert sorted(each.worker for each in ended) == ["worker-0", "worker-1"]
            for request, completion in zip(requests, ended, strict=True):
                assert completion.token_ids == leaving.expected(request.prompt.tolist(), 400)
            await left(manager)
            assert "handed_over" not in manager.scheduler.events

    run_virtually(work())


@pytest.mark.parametrize("change", [{"stop": ["never"]}, {}], ids=["bound", "free"])
def test_a_leaving_worker_loses_no_turns_of_other_processes(
    change: dict[str, Any],
) -> None:
    async def work() -> None:
        async with simulated(2, slow).running() as manager:
            front = Scheduler(ServingConfig(), 60)  # the scheduler of another process

            def follow(kind: str, name: str, given: Any = None) -> None:
                if kind == "add":
                    front.add(name, given)
                elif kind == "remove":
                    front.remove(name, lost=given)

            manager.scheduler.subscribe(follow)
            sampling = LONG.model_copy(update=change)
            requests = [Request([1, 2, 3 + i], sampling, f"streamed-{i}") for i in range(4)]
            streams = [asyncio.create_task(collect(front.stream(r), r.id)) for r in requests]
            await asyncio.sleep(30)
            leaving = manager.engines[1]
            assert len(front.workers["worker-1"].running) == 2
            assert not manager.scheduler.workers["worker-1"].running
            await manager.scale(1)
            for request, completion in zip(requests, await asyncio.gather(*streams), strict=True):
                assert completion.token_ids == leaving.expected(request.prompt.tolist(), 400)
            await left(manager)
            assert front.events["handed_over"] == (0 if change else 2)
            manager.scheduler.unsubscribe(follow)

    run_virtually(work())


def test_turns_continue_elsewhere_when_a_leaving_worker_dies() -> None:
    async def work() -> None:
        async with simulated(2, slow).running() as manager:
            requests = [Request([1, 2, 3 + i], LONG, f"r{i}") for i in range(4)]
            turns = [asyncio.create_task(generate(manager.scheduler, r)) for r in requests]
            await asyncio.sleep(30)
            leaving = manager.engines[1]
            await manager.scale(1)
            await asyncio.sleep(5)
            leaving.die()
            for request, completion in zip(requests, await asyncio.gather(*turns), strict=True):
                assert completion.token_ids == leaving.expected(request.prompt.tolist(), 400)
            await left(manager)
            assert manager.scheduler.events["continued"] == 2
            assert not manager.failures, "nobody starts it again"

    run_virtually(work())


def test_workers_without_room_block_nothing_and_may_be_cancelled() -> None:
    room = asyncio.Event()

    async def begin(name: str, index: int) -> Any:
        if index:
            await room.wait()
        return Managed(name=name)

    async def work() -> None:
        gone: list[int] = []
        serving = ServingConfig(workers="1-3", max_restarts=0)
        manager: AsyncLLMServerManager = AsyncLLMServerManager(
            begin, serving, WeightsConfig(), turn_timeout=120.0, left=gone.append
        )
        async with manager.running():
            assert len(manager.engines) == 1
            await manager.scale(serving.max_workers)
            await asyncio.sleep(10)
            assert await update(manager, 1) == [1]
            assert (await generate(manager.scheduler, Request([1, 2], SAMPLING, "r"))).token_ids
            await manager.scale(2)
            assert gone == [2], "the last one"
            room.set()
            await joined(manager, 2)
            assert [engine.version for engine in manager.engines] == [1, 1]
            await manager.scale(2)
            assert gone == [2]

    run_virtually(work())


def test_turns_fail_at_once_when_all_workers_wait_for_room() -> None:
    async def begin(name: str, index: int) -> Any:
        if index:
            await asyncio.Event().wait()
        if started:
            raise EngineError("no memory left")
        started.append(name)
        return Managed(name=name)

    started: list[str] = []

    async def work() -> None:
        serving = ServingConfig(workers="1-2", max_restarts=1)
        manager: AsyncLLMServerManager = AsyncLLMServerManager(
            begin, serving, WeightsConfig(), turn_timeout=120.0
        )
        async with manager.running():
            await manager.scale(2)
            manager.engines[0].die()  # type: ignore[attr-defined]
            with pytest.raises(EngineError, match="no worker left"):
                await generate(manager.scheduler, Request([1, 2, 3], SAMPLING, "r"))

    run_virtually(work())


def test_another_process_keeps_the_turns_of_a_leaving_worker(
    make_config: Callable[..., Config],
) -> None:
    from turnwise.serving.front_process import FrontProcess  # imports Ray

    class Process(FrontProcess):
        def _attach(self, name: str, worker: object) -> Managed:
            return slow(name)

    async def work() -> None:
        process = Process(make_config())
        for name in ("worker-0", "worker-1"):
            process.add(name, None)
        engines = [worker.engine for worker in process.scheduler.workers.values()]
        requests = [Request([1, 2, 3 + i], LONG, f"r{i}") for i in range(2)]
        turns = [asyncio.create_task(generate(process.scheduler, r)) for r in requests]
        await asyncio.sleep(30)
        report = await process.report([("remove", ("worker-1", False))])
        assert report.loads.keys() == {"worker-0"}
        assert not report.failures
        await asyncio.sleep(30)
        await engines[1].pause("abort")  # which the driver does
        for request, completion in zip(requests, await asyncio.gather(*turns), strict=True):
            assert completion.token_ids == slow("").expected(request.prompt.tolist(), 400)
            assert completion.worker == "worker-0"
        report = await process.report()
        assert report.events["handed_over"] == 1
        assert report.counts["worker-1"]["turns"] + report.counts["worker-1"]["tokens"] > 0

    run_virtually(work())


def test_shutdown_ends_workers_that_join_or_leave() -> None:
    async def work() -> None:
        engines: list[Managed] = []

        def start(name: str) -> Managed:
            engines.append(slow(name))
            return engines[-1]

        async with simulated(2, start).running() as manager:
            turn = asyncio.create_task(generate(manager.scheduler, Request([1, 2], LONG, "r")))
            await asyncio.sleep(1)
            await manager.scale(1)
            await manager.scale(3)
            await asyncio.sleep(2)
            assert len(engines) == 2, "two more are starting"
        assert len(engines) == 2
        assert all(engine._dead for engine in engines)
        with contextlib.suppress(EngineError):
            await turn
        assert not manager._leaving

    run_virtually(work())


def test_more_workers_admit_more_trajectories() -> None:
    async def work() -> None:
        async with simulated(2).running() as manager:
            admission, over = Admission(Limits(4)), asyncio.Event()
            manager.scheduler.subscribe(EngineSeats(admission, seats=2, min_engines=2))

            async def hold() -> None:
                async with admission.admitted():
                    await over.wait()

            waiting = [asyncio.create_task(hold()) for _ in range(20)]
            await asyncio.sleep(1)
            assert admission.use.working == 4
            await manager.scale(6)
            await joined(manager, 6)
            assert admission.use.working == 12, "as soon as they have joined"
            await manager.scale(1)
            assert admission.limits.working == 4, "those of the engines it began with, at least"
            await left(manager)
            over.set()
            await asyncio.gather(*waiting)

    run_virtually(work())


@pytest.mark.parametrize("transport", ["shm", "ipc"])
def test_an_engine_with_newer_weights_joins_after_an_evaluation(
    transport: str,
) -> None:
    """As beside an evaluation, which measures one version."""

    class Training(Published):
        async def publish(self) -> Manifest:
            manifest = await super().publish()
            return replace(manifest, transport=transport)

    async def work() -> None:
        async with simulated(1).running() as manager:
            trainer = Training()
            trainer.version = 1
            sync = WeightSync(trainer, timeout=120, patience=300, tolerance=1e-6)
            await sync.publish()
            await manager.update_weights(sync)
            measuring = True
            manager.must_keep_version = lambda: measuring
            trainer.version = 2  # it goes on training
            await manager.scale(2)
            await asyncio.sleep(20)
            versions = [engine.version for engine in manager.engines]
            assert versions == ([1, 1] if transport == "shm" else [1])
            manager.engines[0].die()  # type: ignore[attr-defined]
            await asyncio.sleep(20)
            versions = [engine.version for engine in manager.engines]
            assert len(versions) >= 1, "the only one comes back at once"
            measuring = False
            await joined(manager, 2)

    run_virtually(work())


def test_a_worker_that_joins_has_all_its_restarts(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with simulated(1, max_restarts=0).running() as manager:
            await manager.scale(2)
            await asyncio.sleep(6)
            assert len(manager.engines) == 2
            assert not manager.given_up

    run_virtually(work())
    assert "could not be restarted" not in caplog.text
