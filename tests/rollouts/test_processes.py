"""Groups in several processes: real actors, which sample from one real engine."""

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ray.actor import ActorHandle

from tests.simulated import SimulatedEngine
from turnwise.config import Config, RolloutConfig
from turnwise.core.actor import ActorHandle as Handle
from turnwise.core.run_files import RunFiles
from turnwise.engine.protocol import Engine, Request, generate
from turnwise.errors import EngineError, InputError, StepError
from turnwise.rollouts import Problem, RolloutContext
from turnwise.rollouts.data import load_training
from turnwise.rollouts.loops import SingleTurnLoop
from turnwise.rollouts.processes import DIED, RolloutProcesses, open_runner
from turnwise.serving.front_process import FrontProcess
from turnwise.serving.front_processes import Process
from turnwise.serving.scheduler import Scheduler
from turnwise.serving.worker_handle import WorkerHandle
from turnwise.trajectory import Trajectory
from turnwise.trajectory.audit import audit

HERE = "tests.rollouts.test_processes"
SECONDS = 120.0


class Counter:
    """Its reward is worth its process's id; a row may keep it until a file is there."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.problem = [{"role": "user", "content": row["question"]}]
        self.tools: list[Callable[..., Any]] = []
        self.row = row

    def reward(self, trajectory: Trajectory) -> float:
        if message := self.row.get("error"):
            raise ValueError(message)
        if folder := self.row.get("folder"):
            Path(folder, f"pid-{os.getpid()}").touch()
            while not Path(folder, "go").exists():
                time.sleep(0.02)
        return float(os.getpid())


class Picky(SingleTurnLoop):
    async def run(self, environment: Any, context: RolloutContext) -> None:
        if environment.row.get("refused"):
            raise InputError("the loop has no key for this row")
        await super().run(environment, context)


def pids_in(folder: Path) -> list[int]:
    return [int(path.name[4:]) for path in folder.glob("pid-*")]


def problem_of(number: int, **row: object) -> Problem:
    return Problem(f"rows:{number}", {"question": f"What is {number}?", **row})


@pytest.fixture(scope="module")
def config(make_config: Callable[..., Config]) -> Config:
    return make_config(
        environment=f"{HERE}:Counter",
        rollout={"loop": f"{HERE}:Picky", "processes": 2},
        sampling={"n": 2, "max_tokens": 8},
        serving={"health_timeout": 20.0},
    )


@pytest.fixture(scope="module")
def scheduler(config: Config, engine: WorkerHandle) -> Scheduler:
    made = Scheduler(config.serving, SECONDS)
    return made


@pytest.fixture(scope="module")
async def processes(
    config: Config, scheduler: Scheduler, engine: WorkerHandle
) -> AsyncIterator[RolloutProcesses]:
    scheduler.add("worker-0", engine)
    made = RolloutProcesses(config, scheduler)
    await made.start()
    yield made
    await made.stop()


async def test_groups_are_spread_over_processes_and_exact(
    config: Config, scheduler: Scheduler, processes: RolloutProcesses
) -> None:
    groups = await asyncio.gather(
        *(processes.run_group(problem_of(n), config.sampling, f"spread{n}") for n in range(4))
    )
    trajectories = [each for group in groups for each in group.trajectories]
    assert len(trajectories) == 8
    pids = {trajectory.reward for trajectory in trajectories}
    assert len(pids) == 2
    assert os.getpid() not in pids
    for group in groups:
        assert len({each.reward for each in group.trajectories}) == 1
    for trajectory in trajectories:
        assert audit(trajectory).violations == 0
    sampled = sum(each.sampled_tokens for each in trajectories)
    async with asyncio.timeout(SECONDS):
        while scheduler.workers["worker-0"].tokens < sampled:  # in a later report
            await asyncio.sleep(0.05)
    assert scheduler.events["turns"] == 8
    assert scheduler.workers["worker-0"].load == pytest.approx(0.0)


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
async def test_the_groups_of_a_dead_process_begin_again_in_another(
    config: Config, processes: RolloutProcesses, tmp_path: Path, how: signal.Signals
) -> None:
    problem = problem_of(1, folder=str(tmp_path))
    running = asyncio.ensure_future(processes.run_group(problem, config.sampling, f"death{how}"))
    async with asyncio.timeout(SECONDS):
        while not (first := pids_in(tmp_path)):
            await asyncio.sleep(0.02)
        pid = first[0]
        os.kill(pid, how)
        (tmp_path / "go").touch()
        group = await running
        if how == signal.SIGSTOP:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    assert dict(group.retried) == {DIED: 2}
    assert not group.dropped
    assert "rollout-" in group.causes[DIED]
    assert pid not in {trajectory.reward for trajectory in group.trajectories}
    async with asyncio.timeout(SECONDS):
        again = set()
        while len(again) < 2:  # until the process is back
            await asyncio.sleep(0.05)
            both = (processes.run_group(problem_of(n), config.sampling, f"b{n}") for n in (1, 2))
            again = {each.trajectories[0].reward for each in await asyncio.gather(*both)}


async def test_the_driver_gets_what_processes_write_to_the_run_folder(
    config: Config, processes: RolloutProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A folder that only the driver knows, as on another node.
    monkeypatch.setattr(processes, "_files", RunFiles(tmp_path))
    problem = problem_of(1, error="no such reward")
    group = await processes.run_group(problem, config.sampling, "written")
    assert dict(group.dropped) == {"reward_error": 2}
    assert group.appended == []
    assert "ValueError: no such reward" in (tmp_path / "errors.log").read_text()


async def test_a_cancelled_group_ends_its_requests(
    config: Config, processes: RolloutProcesses, engine: WorkerHandle
) -> None:
    sampling = config.sampling.model_copy(update={"max_tokens": 400, "ignore_eos": True})
    group = asyncio.ensure_future(processes.run_group(problem_of(1), sampling, "cancelled"))
    async with asyncio.timeout(SECONDS):
        while not await engine.num_in_flight():
            assert not group.done()
        group.cancel()
        while await engine.num_in_flight():
            await asyncio.sleep(0.01)
    assert group.cancelled()


async def test_the_users_mistakes_come_as_from_the_driver(
    config: Config, processes: RolloutProcesses
) -> None:
    for number in range(4):  # in both processes
        await processes.run_group(problem_of(number), config.sampling, f"first{number}")
    for problem, words in (
        (problem_of(1, refused=True), "the loop has no key for this row"),
        (problem_of(2, lock=threading.Lock()), "rows:2 cannot be sent to another process"),
    ):
        group = await processes.run_group(problem, config.sampling, problem.id)
        assert group.dropped == {"input_error": config.sampling.n}
        assert words in str(group.causes)
    lock = threading.Lock()

    class Unsendable(Counter):
        def held(self) -> bool:
            return lock.locked()

    with pytest.raises(InputError, match=r"Unsendable cannot be sent .*\(rollout.processes\)"):
        RolloutProcesses(config, Scheduler(config.serving, SECONDS), Unsendable)
    rollout = {"processes": 2, "rewards": [{"model": "some/model"}]}
    with pytest.raises(ValueError, match="reward models need processes 1"):
        RolloutConfig.model_validate(rollout)


class _Simulated(FrontProcess):
    def _attach(self, name: str, worker: ActorHandle | None) -> Engine:
        return SimulatedEngine(name=name)


async def test_a_process_reports_failures_and_hears_of_their_end(config: Config) -> None:
    process = _Simulated(config, partial(open_runner, None))
    await process.start(0, [])
    for name in ("worker-0", "worker-1"):
        process.add(name, None)
    first = process.scheduler.workers["worker-0"]
    waiting = asyncio.ensure_future(process.scheduler._ask_whether_lost(first, "it failed"))
    async with asyncio.timeout(SECONDS):
        while not (report := await process.report()).failures:
            assert not waiting.done()
    assert report.failures == [("worker-0", "it failed")]
    assert not first.usable
    process.restore("worker-0")
    assert await waiting is False
    assert first.usable

    waiting = asyncio.ensure_future(process.scheduler._ask_whether_lost(first, "it failed again"))
    async with asyncio.timeout(SECONDS):
        while not (await process.report()).failures:
            assert not waiting.done()
    first.turns += 3
    first.failed_turns["continued"] += 1  # a turn of the dead worker is counted after its removal
    process.add("worker-0", None)  # its successor
    assert await waiting is True
    second = process.scheduler.workers["worker-0"]
    assert second is not first
    second.turns += 1
    second.failed_turns["aborted"] += 1
    counts = (await process.report()).counts["worker-0"]  # those of both
    assert counts == {"turns": 4, "continued": 1, "aborted": 1}
    second.load += 2.0
    report = await process.report()
    assert (report.counts, report.loads) == ({}, {"worker-0": 2.0})  # what has changed or is busy
    assert second.supervisor is not None
    second.supervisor.excuse_death()
    assert (await process.report()).excused == ["worker-0"]
    process.scheduler.close("no worker is left")
    for name in ("worker-0", "worker-1"):
        process.remove(name, True)
    with pytest.raises(EngineError, match="no worker is left"):
        await generate(process.scheduler, Request([1, 2], config.sampling, "request"))
    assert await process.stop()


@pytest.mark.slow
async def test_agents_are_served_by_their_own_process(
    make_config: Callable[..., Config], engine: WorkerHandle
) -> None:
    agent = "tests.plain_agents:calculator"
    config = make_config(
        rollout={"loop": "agent", "agent": agent, "processes": 2},
        sampling={"n": 4, "max_tokens": 32},
    )
    scheduler = Scheduler(config.serving, SECONDS)
    scheduler.add("worker-0", engine)
    agents = RolloutProcesses(config, scheduler)
    await agents.start()
    try:
        problems = load_training(config)[:3]
        made = (agents.run_group(each, config.sampling, each.id) for each in problems)
        groups = await asyncio.gather(*made)
    finally:
        await agents.stop()
    trajectories = [each for group in groups for each in group.trajectories]
    assert len(trajectories) == 12, [group.causes for group in groups]
    assert all(audit(each).first_violation is None for each in trajectories)


async def test_two_clients_of_a_worker_have_requests_of_their_own(
    engine: WorkerHandle, config: Config
) -> None:
    other = WorkerHandle.attach(engine.actor, "worker-0", config.engine.request_timeout)
    sampling = config.sampling.model_copy(update={"max_tokens": 400, "ignore_eos": True})
    short = config.sampling
    prompt = list(range(5, 30))
    async with asyncio.timeout(SECONDS):
        while True:
            long = asyncio.ensure_future(generate(other, Request(prompt, sampling, "same name")))
            while not (await engine.num_in_flight() or long.done()):
                await asyncio.sleep(0.01)
            completion = await generate(engine, Request(prompt, short, "another name"))
            assert completion.token_ids
            if not long.done():
                break  # else this process was slower than the engine, and tries again
        other.fail("the client is gone")
        while await engine.num_in_flight():
            await asyncio.sleep(0.01)
    with pytest.raises(EngineError, match="the client is gone"):
        await long


class Unlucky(RolloutProcesses):
    """Processes that Ray starts once only."""

    made = 0

    def create(self, process: Process) -> Handle:
        self.made += 1
        if self.made > 1:
            raise RuntimeError("Ray could not create the actor")
        return super().create(process)


async def test_groups_do_not_wait_for_a_process_that_cannot_restart(
    config: Config, scheduler: Scheduler, engine: WorkerHandle, tmp_path: Path
) -> None:
    rollout = config.rollout.model_copy(update={"processes": 1})
    serving = config.serving.model_copy(update={"max_restarts": 1})
    alone = config.model_copy(update={"rollout": rollout, "serving": serving})
    if "worker-0" not in scheduler.workers:
        scheduler.add("worker-0", engine)
    processes = Unlucky(alone, scheduler)
    await processes.start()
    watching = processes.processes[0].watching
    problem = problem_of(1, folder=str(tmp_path))
    running = asyncio.ensure_future(processes.run_group(problem, config.sampling, "unlucky"))
    async with asyncio.timeout(SECONDS):
        while not (pids := pids_in(tmp_path)):
            await asyncio.sleep(0.02)
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(StepError, match=r"no rollout process is left: .* could not create"):
            await running
    assert watching is not None
    await watching  # which ended without an error
    await processes.stop()
