"""Channels that break between living workers and the processes that use them.

Everything is real but Ray: actors are objects of this process, whose calls begin in any order.
"""

import asyncio
import logging
import pickle
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError

from turnwise.config import Config, SamplingConfig, parse_config
from turnwise.core.actor import ActorHandle
from turnwise.engine import Chunk, Completion, Request, generate
from turnwise.errors import EngineError, TurnwiseError
from turnwise.serving import worker_handle
from turnwise.serving.channel import Address, Channel, listen
from turnwise.serving.engine_host import EngineHost, Mailbox
from turnwise.serving.front_process import FrontProcess
from turnwise.serving.front_processes import FrontProcesses, Process
from turnwise.serving.manager import WorkerFailure, WorkerSupervisor
from turnwise.serving.scheduler import Scheduler
from turnwise.serving.worker_handle import WorkerHandle

SECONDS = 60
TOKENS = 40


class Method:
    def __init__(self, call: Callable[..., Any]) -> None:
        self.remote = call


class Worker:
    """The actor of a healthy engine: a turn is `TOKENS` tokens, 1 to `TOKENS`, one at a time."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.pause = 0.001
        self.frozen = False
        self.unreachable = False
        self.channels: list[Channel] = []
        self.address, self.call = Method(self._address), Method(self._call)

    async def _address(self) -> Address:
        if self.unreachable:
            return Address("127.0.0.1", 1, b"nobody listens")
        return await listen("127.0.0.1", self._accept)

    def _accept(self, channel: Channel) -> None:
        self.channels.append(channel)
        Mailbox(channel, self._run)
        send = channel.send

        def send_unless_frozen(message: object) -> None:
            if not self.frozen:
                send(message)

        channel.send = send_unless_frozen  # type: ignore[method-assign]

    async def _run(self, mailbox: Mailbox, request: Request) -> None:
        begun = len(request.prompt) - 1  # the prompt of these tests is one token
        end = begun + request.sampling.max_tokens
        for token in range(begun + 1, end + 1):
            await asyncio.sleep(self.pause)
            last = token == end
            mailbox.add(request.id, Chunk([token], [-0.5], [0], "length" if last else None))

    async def _call(self, method: str, *_: object) -> int:
        while self.frozen:
            await asyncio.sleep(0.05)
        return 0


def cut(handle: Any) -> None:
    """Cut the connection of a worker's handle as a reset does."""
    handle._channel._transport.abort()


def make_config(**sections: Any) -> Config:
    model = {"environment": "package.module:Class", "model": {"path": "model"}}
    return parse_config({**model, "data": {"path": "rows.jsonl"}, **sections})


class RemoteProcess:
    """Ray's handle of a process that lives here; its calls begin in any order."""

    def __init__(self, process: FrontProcess) -> None:
        self._process = process

    def __getattr__(self, name: str) -> Method:
        async def call(*arguments: object) -> object:
            await asyncio.sleep(random.random() * 0.01)
            return await getattr(self._process, name)(*arguments)

        return Method(lambda *arguments: asyncio.ensure_future(call(*arguments)))


class LocalActor(ActorHandle):
    killed = 0

    def kill(self) -> None:
        LocalActor.killed += 1


class Processes(FrontProcesses):
    """One follower, in this process."""

    def __init__(self, config: Config, scheduler: Scheduler, follower: FrontProcess) -> None:
        super().__init__(config, scheduler, names=["rollout-0"])
        self._follower = follower

    def create(self, process: Process) -> ActorHandle:
        return LocalActor(RemoteProcess(self._follower), process.name, EngineError)


class Follower(FrontProcess):
    async def start(self, port: int, lost: Any) -> tuple[str, str]:
        return "", ""

    def _attach(self, name: str, worker: Any) -> WorkerHandle:
        return WorkerHandle(
            LocalActor(worker, name, EngineError), self.config.engine.request_timeout
        )


class Fleet:
    """Workers, the driver's scheduler and supervisors, and a follower."""

    def __init__(self, config: Config, names: tuple[str, ...]) -> None:
        self.config = config
        self.workers = {name: Worker(name) for name in names}
        self.driver = Scheduler(config.serving, 30.0)
        self.follower = Follower(config)
        self.processes = Processes(config, self.driver, self.follower)
        self.lost: list[str] = []
        self.scheduler, self.is_busy = self.driver, False
        self.failures: list[WorkerFailure] = []
        self.supervisors: list[WorkerSupervisor] = []
        for index, (name, worker) in enumerate(self.workers.items()):
            supervisor = WorkerSupervisor(index, config.serving, self)  # type: ignore[arg-type]
            supervisor.admit(
                WorkerHandle(LocalActor(worker, name, EngineError), config.engine.request_timeout)
            )
            self.supervisors.append(supervisor)

    async def start_worker(self, supervisor: WorkerSupervisor) -> None:
        self.lost.append(supervisor.name)
        raise TurnwiseError("no test here loses a worker")

    def close_if_empty(self, why: str) -> None:
        pass

    async def turn(self, scheduler: Scheduler, name: str) -> Completion:
        async with asyncio.timeout(SECONDS):
            return await generate(scheduler, Request([0], SamplingConfig(max_tokens=TOKENS), name))

    async def turn_with_cuts(self, scheduler: Scheduler, name: str, cuts: int) -> Completion:
        """A turn, each of whose channels is cut in its middle, up to `cuts` times."""
        turn = asyncio.create_task(self.turn(scheduler, name))
        while cuts and not turn.done():
            await asyncio.sleep(0.002)
            for worker in scheduler.workers.values():
                for each in worker.running:
                    if len(each.sampled) % 10 > 4:
                        cut(worker.engine)
                        cuts, before = cuts - 1, each.cuts
                        while each.cuts == before:
                            await asyncio.sleep(0.001)
                        break
        return await turn

    async def settled(self, scheduler: Scheduler, usable: dict[str, bool]) -> None:
        async with asyncio.timeout(SECONDS):
            while {name: each.usable for name, each in scheduler.workers.items()} != usable:
                await asyncio.sleep(0.01)


@pytest.fixture
def make_fleet() -> Any:
    @asynccontextmanager
    async def make(*names: str, **sections: Any) -> AsyncIterator[Fleet]:
        serving = {"health_every": 0.1, "health_timeout": 5.0, **sections.pop("serving", {})}
        fleet = Fleet(make_config(serving=serving, **sections), names)
        killed = LocalActor.killed
        await fleet.processes.start()
        for supervisor in fleet.supervisors:
            supervisor.watch()
        try:
            yield fleet
            assert not fleet.lost
            assert LocalActor.killed == killed, "a living process was killed"
        finally:
            for supervisor in fleet.supervisors:
                await supervisor.stop()
            await fleet.processes.stop()
            for scheduler in (fleet.driver, fleet.follower.scheduler):
                for worker in scheduler.workers.values():
                    worker.engine.fail("the test is over")  # type: ignore[attr-defined]

    return make


@pytest.mark.parametrize("who", ["driver", "follower"])
async def test_a_turn_goes_on_over_a_new_channel_to_the_same_worker(
    make_fleet: Any, who: str
) -> None:
    async with make_fleet("worker-0") as fleet:
        scheduler = fleet.driver if who == "driver" else fleet.follower.scheduler
        first = await fleet.turn(scheduler, "first")
        engine = scheduler.workers["worker-0"].engine
        assert first.token_ids == list(range(1, TOKENS + 1))
        cut = await fleet.turn_with_cuts(scheduler, "cut", 3)
        assert cut.token_ids == first.token_ids
        assert scheduler.events["continued"] == 3
        with pytest.raises(EngineError, match=r"failed on 4 workers.*worker-0 closed its channel"):
            await fleet.turn_with_cuts(scheduler, "cut too often", 100)
        assert (await fleet.turn(scheduler, "last")).token_ids == first.token_ids
        assert scheduler.workers["worker-0"].engine is engine


async def test_a_channel_that_is_lost_while_idle_costs_no_turn(make_fleet: Any) -> None:
    async with make_fleet("worker-0") as fleet:
        for scheduler in (fleet.driver, fleet.follower.scheduler):
            await fleet.turn(scheduler, "first")
        for scheduler in (fleet.driver, fleet.follower.scheduler):
            cut(scheduler.workers["worker-0"].engine)
        await asyncio.sleep(0.05)
        for scheduler in (fleet.driver, fleet.follower.scheduler):
            assert len((await fleet.turn(scheduler, "second")).token_ids) == TOKENS
            assert not scheduler.events["continued"] + scheduler.events["moved"]


@pytest.mark.parametrize("who", ["driver", "follower"])
async def test_an_unreachable_worker_stays_alive_and_gets_no_turns(
    make_fleet: Any, who: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with make_fleet("worker-0", "worker-1") as fleet:
        scheduler = fleet.driver if who == "driver" else fleet.follower.scheduler
        await asyncio.gather(*(fleet.turn(scheduler, f"first-{n}") for n in range(8)))
        hidden = fleet.workers["worker-0"]
        hidden.unreachable, hidden.pause = True, 0.01
        with caplog.at_level(logging.WARNING):
            turns = [asyncio.create_task(fleet.turn(scheduler, f"cut-{n}")) for n in range(8)]
            while not scheduler.workers["worker-0"].running:
                await asyncio.sleep(0.01)
            cut(scheduler.workers["worker-0"].engine)
            for turn in turns:
                assert (await turn).token_ids == list(range(1, TOKENS + 1))
            await fleet.settled(scheduler, {"worker-0": False, "worker-1": True})
            for number in range(8):
                done = await fleet.turn(scheduler, f"elsewhere-{number}")
                assert done.worker == "worker-1"
        if who == "driver":
            (warned,) = (r.getMessage() for r in caplog.records if "worker-0" in r.getMessage())
            assert "worker-0 cannot be reached at 127.0.0.1:1: " in warned
            assert "it gets no turns until it can be reached again" in warned
        hidden.unreachable = False
        await fleet.settled(scheduler, {"worker-0": True, "worker-1": True})
        after = await asyncio.gather(*(fleet.turn(scheduler, f"after-{n}") for n in range(8)))
        assert {done.worker for done in after} == {"worker-0", "worker-1"}


async def test_a_worker_that_stood_still_is_used_again(
    make_fleet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_handle, "HEARTBEAT_SECONDS", 0.1)
    async with make_fleet("worker-0", engine={"request_timeout": 0.4}) as fleet:
        scheduler, worker = fleet.follower.scheduler, fleet.workers["worker-0"]
        await fleet.turn(scheduler, "first")
        worker.frozen = True
        turn = asyncio.create_task(fleet.turn(scheduler, "during"))
        await asyncio.sleep(1.0)
        worker.frozen = False
        assert (await turn).token_ids == list(range(1, TOKENS + 1))
        assert len((await fleet.turn(scheduler, "after")).token_ids) == TOKENS


async def test_a_briefly_unavailable_actor_is_not_killed(
    make_fleet: Any,
) -> None:
    async with make_fleet("worker-0") as fleet:
        scheduler, worker = fleet.driver, fleet.workers["worker-0"]
        await fleet.turn(scheduler, "first")
        call, failed = worker.call, 0

        async def unavailable(*arguments: object) -> int:
            nonlocal failed
            failed += 1
            raise ActorUnavailableError("The actor is temporarily unavailable", None)

        worker.call = Method(unavailable)
        turn = asyncio.create_task(fleet.turn_with_cuts(scheduler, "cut", 1))
        async with asyncio.timeout(SECONDS):
            while failed < 3:
                await asyncio.sleep(0.01)
        assert not turn.done()
        worker.call = call
        assert (await turn).token_ids == list(range(1, TOKENS + 1))


async def test_what_the_driver_tells_arrives_in_its_order(make_fleet: Any) -> None:
    async with make_fleet("worker-0") as fleet:
        engine, supervisor = fleet.driver.workers["worker-0"].engine, fleet.supervisors[0]
        for round_ in range(30):
            name = f"worker-{1 + round_ % 2}"
            fleet.driver.add(name, engine, supervisor)
            fleet.driver.add(name, engine, supervisor)  # which replaces it
            fleet.driver.remove(name)
            if round_ % 3 == 0:
                await asyncio.sleep(0.01)
        fleet.driver.add("last", engine, supervisor)
        async with asyncio.timeout(SECONDS):
            while "last" not in fleet.follower.scheduler.workers:
                await asyncio.sleep(0.01)
        assert [*fleet.follower.scheduler.workers] == ["worker-0", "last"]
        fleet.driver.remove("last")


class Unreadable(SamplingConfig):
    """Sampling that a worker cannot unpickle."""

    def __reduce__(self) -> Any:
        return (_refuse, ())


def _refuse() -> None:
    raise ImportError("there is no such class here")


async def test_a_request_that_a_worker_cannot_read_fails_alone() -> None:
    worker = Worker("worker-0")
    handle = WorkerHandle(LocalActor(worker, "worker-0", EngineError), SECONDS)
    plain = SamplingConfig(max_tokens=TOKENS)
    async with asyncio.timeout(SECONDS):
        running = asyncio.create_task(generate(handle, Request([0], plain, "running")))
        await asyncio.sleep(0)  # it goes in one message with the other
        with pytest.raises(EngineError, match="request unreadable cannot be read: ImportError"):
            await generate(handle, Request([0], Unreadable(max_tokens=3), "unreadable"))
        assert len((await running).token_ids) == TOKENS
        assert len(worker.channels) == 1
    handle.fail("the test is over")


async def test_any_error_while_a_channel_opens_ends_its_requests() -> None:
    class Odd(Worker):
        async def _address(self) -> Any:
            raise RuntimeError("can't start new thread")

    handle = WorkerHandle(LocalActor(Odd("worker-0"), "worker-0", EngineError), SECONDS)
    async with asyncio.timeout(SECONDS):
        with pytest.raises(EngineError, match="can't start new thread"):
            await generate(handle, Request([0], SamplingConfig(max_tokens=1), "request"))
        with pytest.raises(EngineError, match="can't start new thread"):
            await handle.check_health()
    handle.fail("the test is over")
    with pytest.raises(EngineError, match="the test is over"):
        await handle.check_health()


class TwoArgumentsError(EngineError):
    """An error that cannot be unpickled."""

    def __init__(self, done: int, of: int) -> None:
        super().__init__(f"{done} of {of}")


async def test_an_unpicklable_error_is_sent_as_its_text() -> None:
    class Failing:
        async def stream(self, request: Request) -> AsyncIterator[Chunk]:
            yield Chunk([1], [-0.5], [0])
            raise TwoArgumentsError(1, 2)

    class Real(Worker):
        async def _run(self, mailbox: Mailbox, request: Request) -> None:
            await engine_worker._run(mailbox, request)

    with pytest.raises(TypeError):
        pickle.loads(pickle.dumps(TwoArgumentsError(1, 2)))
    engine_worker = EngineHost(make_config(), name="worker-0")
    engine_worker._engine = Failing()  # type: ignore[assignment]
    worker = Real("worker-0")
    handle = WorkerHandle(LocalActor(worker, "worker-0", EngineError), SECONDS)
    async with asyncio.timeout(SECONDS):
        with pytest.raises(EngineError, match=r"worker-0: TwoArgumentsError\('1 of 2'\)"):
            await generate(handle, Request([0], SamplingConfig(max_tokens=3), "request"))
    assert len(worker.channels) == 1
    assert not worker.channels[0].closed.done()
    handle.fail("the test is over")
