"""Restarts of engines that meet weight updates, on simulated engines in virtual time.

A new process has the weights of its disk: it must never be used with them.
"""

import asyncio
from typing import Any

import pytest

from tests.serving.test_manager import CANARY, Managed, Published, simulated
from tests.virtual_time import run_virtually
from turnwise.config import SamplingConfig
from turnwise.engine import Request, generate
from turnwise.engine.protocol import Rendezvous
from turnwise.errors import DeadlineError, EngineError
from turnwise.serving.manager import AsyncLLMServerManager
from turnwise.weights.manifest import Manifest
from turnwise.weights.sync import WeightSync
from turnwise.weights.transport import ANSWER_SHARE

SEND_SECONDS = 5.0
SAMPLING = SamplingConfig(max_tokens=64)


class Sending(Published):
    """A trainer that takes `SEND_SECONDS` to send its weights, to living engines."""

    def __init__(self, transport: str, version: int) -> None:
        super().__init__()
        self.transport, self.version = transport, version

    async def publish(self) -> Manifest:
        return Manifest(self.version, self.transport, "", 0, (), 0, CANARY, self.logprobs)

    async def send(self, devices: Any) -> None:
        await asyncio.sleep(SEND_SECONDS)


class Updating(Managed):
    """An engine that takes its time for an update, and notices its own death at the end."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.used: set[int] = set()
        """Versions that sampled tokens."""

    def _advance(self, request: Any) -> None:
        self.used.add(self.version)
        super()._advance(request)

    async def update_weights(self, manifest: Manifest, *args: Any) -> int:
        await asyncio.sleep(SEND_SECONDS)
        if self._dead:
            raise EngineError(f"{self.name} died during a weight update")
        return await super().update_weights(manifest, *args)


async def update(manager: AsyncLLMServerManager, transport: str, number: int) -> list[int]:
    sync = WeightSync(Sending(transport, number), timeout=120, patience=300, tolerance=1e-6)
    await sync.publish()
    return [updated.version for updated in await manager.update_weights(sync)]


@pytest.mark.parametrize("transport", ["shm", "ipc"])
@pytest.mark.parametrize("startup", [0.5, 3.0, 20.0])
@pytest.mark.parametrize("killed", [-10.0, -1.0, -0.001, 0.0, 0.5, 4.9, 5.1])
def test_a_restart_during_an_update_serves_only_the_new_version(
    transport: str, startup: float, killed: float
) -> None:
    """`killed` is the time of the death in seconds after the beginning of the update."""

    async def work() -> None:
        started: list[Updating] = []

        def start(name: str) -> Updating:
            started.append(Updating(name=name))
            return started[-1]

        async with simulated(2, start, startup_seconds=startup).running() as manager:
            await update(manager, transport, 6)

            async def sample(place: int) -> None:
                for number in range(10_000):
                    name = f"{place}-{number}"
                    await generate(manager.scheduler, Request([place, number], SAMPLING, name))

            sampling = [asyncio.create_task(sample(place)) for place in range(8)]
            victim = manager.engines[0]
            loop = asyncio.get_running_loop()
            begin = loop.time() + 11.0
            loop.call_at(begin + killed, victim.die)
            await asyncio.sleep(11.0)
            versions = await update(manager, transport, 7)
            assert versions in ([7], [7, 7])
            async with asyncio.timeout(200):
                while len(manager.failures) < 1 or len(manager.engines) < 2:
                    await asyncio.sleep(0.1)
            assert started[-1] in manager.engines
            assert [engine.version for engine in manager.engines] == [7, 7]  # type: ignore[attr-defined]
            await asyncio.sleep(5.0)
            for task in sampling:
                task.cancel()
            await asyncio.gather(*sampling, return_exceptions=True)
            back_before = killed + startup < 0.0  # and got what was current then
            assert started[-1].used == ({6, 7} if back_before else {7})
            assert all(engine.used <= {6, 7} for engine in started)

    run_virtually(work())


class Broadcasting(Published):
    """A trainer of a process group, whose broadcasts wait for every engine in it."""

    def __init__(self, fleet: "dict[str, CutOff]", version: int) -> None:
        super().__init__()
        self._fleet, self.version = fleet, version

    async def publish(self) -> Manifest:
        return Manifest(self.version, "collective", "", 0, (), 0, CANARY, self.logprobs)

    async def join(self, ip: str, port: int, engine_workers: int, timeout: float) -> None:
        await self._all("join", timeout)

    async def send(self, devices: Any) -> None:
        await self._all("broadcast", 120)

    async def _all(self, moment: str, timeout: float) -> None:
        await asyncio.sleep(SEND_SECONDS)
        joined = [engine for engine in self._fleet.values() if moment in engine.asked]
        for engine in self._fleet.values():
            engine.asked.discard(moment)
        if any(engine.cut for engine in joined):
            await asyncio.sleep(timeout * ANSWER_SHARE)
            raise DeadlineError("the engines did not receive chunk 1")


class CutOff(Managed):
    """An engine whose node is cut off, without a word to anybody, at a moment of an update."""

    def __init__(self, when: str, **options: Any) -> None:
        super().__init__(**options)
        self.cut, self.asked = False, set[str]()
        self._when = when

    async def _at(self, moment: str) -> None:
        self.asked.add(moment)
        self.cut |= moment == self._when
        await self._answer(120)
        await asyncio.sleep(SEND_SECONDS)

    async def _answer(self, seconds: float) -> None:
        if self.cut:
            await asyncio.sleep(seconds + 10)  # as a worker's handle waits
            raise DeadlineError(f"{self.name} did not answer within {seconds + 10:g} s")

    async def check_health(self) -> None:
        await self._answer(120)
        await super().check_health()

    async def check_update(self, manifest: Manifest) -> list[str]:
        await self._answer(120)
        return await super().check_update(manifest)

    async def init_collective(self, group: Rendezvous, timeout: float | None = None) -> None:
        await self._at("join")

    async def update_weights(self, manifest: Manifest, *args: Any) -> int:
        await self._at("broadcast")
        return await super().update_weights(manifest, *args)


@pytest.mark.parametrize("when", ["join", "broadcast"])
def test_an_engine_cut_off_in_a_broadcast_spares_the_others(when: str) -> None:
    """Its calls are never answered, not even by an error; by `weights.transport: collective`."""

    async def work() -> None:
        fleet: dict[str, CutOff] = {}

        def start(name: str) -> CutOff:
            first = name not in fleet
            fleet[name] = CutOff(when if first and name == "worker-1" else "", name=name)
            return fleet[name]

        async with simulated(3, start).running() as manager:
            sync = WeightSync(Broadcasting(fleet, 1), timeout=120, patience=300, tolerance=1e-6)
            await sync.publish()
            updated = await manager.update_weights(sync)
            assert [one.version for one in updated] == [1, 1]
            assert asyncio.get_running_loop().time() < 5 + 120
            async with asyncio.timeout(200):
                while len(manager.engines) < 3:
                    await asyncio.sleep(1.0)
            assert [engine.version for engine in manager.engines] == [1, 1, 1]  # type: ignore[attr-defined]
            (loss,) = manager.failures
            assert loss.worker == "worker-1"
            assert "worker-1 did not answer after the trainer had given up" in loss.why

    run_virtually(work())
