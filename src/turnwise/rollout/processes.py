"""Rollouts in several processes (`rollout.processes`), seen from the driver.

One event loop samples about a thousand turns a second, whatever the engines could do. So groups are
spread over actors, each with an event loop, tools, templates and sessions of its own, which talk to
the engines directly. The driver tells them of engines that come and go.

Each process has some of the engines for the sessions that it begins, and balances them as one
scheduler does. Choosing among all engines by loads that are a moment old would be worse: all
processes would choose the same ones (`python -m benchmarks.scale`).
"""

import asyncio
import logging
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import cloudpickle  # type: ignore[import-untyped]
import ray
from ray.actor import ActorHandle as RayActor

from turnwise.config import NO_DEADLINE, Config, SamplingConfig
from turnwise.core.actor import ActorHandle, get_with_deadline, is_death
from turnwise.core.aio import task_group
from turnwise.core.watchdog import made_progress, waiting
from turnwise.engine.protocol import Engine
from turnwise.errors import (
    DeadlineError,
    InputError,
    StepError,
    TurnwiseError,
    describe_error,
    text_of,
)
from turnwise.rollout.environment import EnvironmentType
from turnwise.rollout.foreign.trl_reward import RewardFunction
from turnwise.rollout.group import Group
from turnwise.rollout.problems import Problem
from turnwise.rollout.rollout_process import REPORT_SECONDS, Report, RolloutProcess
from turnwise.serving.scheduler import Scheduler
from turnwise.serving.worker_state import Supervisor, Worker

logger = logging.getLogger(__name__)

DIED = "rollout_process_died"
"""Reason of trajectories whose process died."""
_MAX_DEATHS = 2
"""Processes that may die during a group until the group fails: it may be the cause."""
_MAX_CALLS = 1 << 14
"""Largest number of groups at once in an actor."""


class _DeathError(TurnwiseError):
    """The process of a group died."""


@dataclass(slots=True, eq=False)
class _Process:
    """One actor, across restarts."""

    index: int
    actor: ActorHandle | None = None
    """None while there is none."""
    lost: "asyncio.Future[str]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """Set to the reason when the actor died or hangs."""
    groups: int = 0
    """Groups in flight."""
    restarts: int = 0
    """Restarts since a group was finished."""
    suspects: set[str] = field(default_factory=set)
    """Workers on which a request failed, and which were not restored or removed since."""
    loads: dict[str, float] = field(default_factory=dict)
    watching: "asyncio.Task[None] | None" = None

    @property
    def name(self) -> str:
        return f"rollout-{self.index}"


class RolloutProcesses:
    """The rollout processes of a run; a `Follower` of the driver's scheduler.

    Args:
        scheduler: Scheduler of the engines.
        environment: None means the configured one.
        functions: Reward functions of a program, by their paths in `rollout.rewards`.
        process_class: Class of the actors.

    Raises:
        InputError: when the environment or a function cannot be sent to another process.

    Example:
        processes = RolloutProcesses(config, manager.scheduler)
        await processes.start()
        group = await processes.run_group(problem, config.sampling, tag="demo")
        await processes.stop()
    """

    def __init__(
        self,
        config: Config,
        scheduler: Scheduler,
        environment: EnvironmentType | None = None,
        functions: Mapping[str, RewardFunction] | None = None,
        process_class: type[RolloutProcess] = RolloutProcess,
    ) -> None:
        for what in (environment, *(functions or {}).values()):
            try:
                cloudpickle.dumps(what)
            except Exception as error:
                name = getattr(what, "__name__", what)
                raise InputError(
                    f"{name} cannot be sent to another process (rollout.processes): "
                    f"{describe_error(error)}"
                ) from error
        count = config.rollout.processes
        share = -(-config.rollout.concurrency // count)
        rollout = config.rollout.model_copy(update={"concurrency": share})
        self._config = config.model_copy(update={"rollout": rollout})
        self._arguments = (environment, functions)
        self._class = process_class
        self._scheduler = scheduler
        self._supervisors: dict[str, Supervisor] = {}
        self._workers: dict[str, Worker] = {}
        """The last worker of each name, removed or not."""
        self._processes = [_Process(index) for index in range(count)]
        self._changed = asyncio.Event()
        self._failure: TurnwiseError | None = None

    async def start(self) -> None:
        """Start all processes; if one fails, end them all.

        Raises:
            InputError: when the environment, the loop or a tool cannot be used in them.
            DeadlineError: when one does not start within `engine.start_timeout`.
        """
        self._scheduler.lead(self)
        try:
            async with task_group() as starting:
                for process in self._processes:
                    starting.create_task(self._start(process))
        except BaseException:
            await self.stop()
            raise

    async def _start(self, process: _Process) -> None:
        actor = ActorHandle.create(
            self._class,
            *(self._config, *self._arguments),
            name=process.name,
            config=self._config,
            log=process.name,
            placement="SPREAD",
            max_concurrency=_MAX_CALLS,
            failure=StepError,
        )
        try:
            seconds = self._config.engine.start_timeout
            await actor.call("start", what="start", seconds=seconds)
        except BaseException:
            actor.kill()
            raise
        process.lost = asyncio.get_running_loop().create_future()
        process.actor = actor
        for worker in self._scheduler.workers.values():
            self._tell(process, "add", worker.name, _actor_of(worker.engine))
        self._assign()
        process.watching = asyncio.create_task(self._watch(process, actor))
        self._changed.set()

    async def run_group(self, problem: Problem, sampling: SamplingConfig, tag: str) -> Group:
        """Run the group of a problem in the process with the fewest groups.

        A group whose process dies begins again in another one; that is counted in `Group.retried`,
        or in `Group.dropped` after the second death.

        Raises:
            InputError: when something that the user gave cannot be used.
            StepError: when no process is left.
        """
        causes: list[str] = []
        while len(causes) < _MAX_DEATHS:
            process = await self._free_process(tag)
            process.groups += 1
            try:
                name = f"{tag}.{len(causes)}" if causes else tag
                group = await self._ask(process, problem, sampling, name)
            except _DeathError as error:
                causes.append(str(error))
                continue
            finally:
                process.groups -= 1
            process.restarts = 0
            break
        else:
            group = Group(problem.id)
        for number, cause in enumerate(causes, 1):
            counts = group.dropped if number == _MAX_DEATHS else group.retried
            counts[DIED] += sampling.n
            group.causes.setdefault(DIED, cause)
        return group

    async def _free_process(self, tag: str) -> _Process:
        """Return the process with the fewest groups; wait while there is none."""
        with waiting(f"a rollout process for {tag}", "rollout process"):
            while True:
                if self._failure is not None:
                    raise self._failure
                up = [p for p in self._processes if p.actor is not None]
                if up:
                    return min(up, key=lambda process: process.groups)
                self._changed.clear()
                await self._changed.wait()

    async def _ask(
        self, process: _Process, problem: Problem, sampling: SamplingConfig, name: str
    ) -> Group:
        """Run a group in one process.

        Raises:
            _DeathError: when the process dies or hangs meanwhile.
        """
        assert process.actor is not None
        lost = process.lost
        try:
            reply = process.actor.actor.run_group.remote(problem, sampling, name)
        except TypeError as error:
            raise InputError(
                f"{problem.id} cannot be sent to another process (rollout.processes): "
                f"{describe_error(error)}"
            ) from error
        answer = asyncio.ensure_future(_answer(reply, process.name))
        try:
            with waiting(f"{process.name} to finish {name}", "group"):
                either: list[asyncio.Future[Group] | asyncio.Future[str]] = [answer, lost]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if answer.done() and not is_death(answer.exception()):
                    return answer.result()
                raise _DeathError(await asyncio.shield(lost))  # after a death, its reports end too
        finally:
            if not answer.done():
                answer.cancel()
                if not lost.done():
                    ray.cancel(reply)

    async def _watch(self, process: _Process, actor: ActorHandle) -> None:
        """Receive a process's reports; restart it when it dies or hangs."""
        seconds = REPORT_SECONDS + self._config.serving.health_timeout
        while True:
            try:
                what = "report its health"
                report = await actor.call("report", what=what, seconds=seconds)
                self._take(process, report)
            except Exception as error:  # none may end the watch without a restart
                await self._restart(process, actor, text_of(error))
                return

    def _take(self, process: _Process, report: Report) -> None:
        if report.progressed:
            made_progress()
        process.loads = report.loads
        total: dict[str, float] = {}
        for name in self._scheduler.workers:
            total[name] = sum(each.loads.get(name, 0.0) for each in self._processes)
        self._scheduler.note_elsewhere(total)
        self._scheduler.events.update(report.events)
        for name, counts in report.counts.items():
            if (worker := self._workers.get(name)) is not None:
                worker.turns += counts.turns
                worker.tokens += counts.tokens
                worker.failed_turns.update(counts.failed_turns)
        for name in report.excused:
            if (supervisor := self._supervisors.get(name)) is not None:
                supervisor.excuse_death()
        for name, why in report.failures:
            process.suspects.add(name)
            supervisor = self._supervisors.get(name)
            if supervisor is not None and name in self._scheduler.workers:
                supervisor.report_failure(why)

    async def _restart(self, process: _Process, actor: ActorHandle, why: str) -> None:
        process.actor, process.loads = None, {}
        process.lost.set_result(why)
        actor.kill()
        self._assign()
        logger.warning("%s is restarted: %s", process.name, why)
        limit = self._config.serving.max_restarts
        while True:
            process.restarts += 1
            if process.restarts > limit:
                return self._give_up(f"{process.name} was restarted {limit} times; the last: {why}")
            try:
                return await self._start(process)
            except TurnwiseError as error:
                why = str(error)

    def _give_up(self, why: str) -> None:
        logger.error(why)
        if all(p.actor is None and p.restarts for p in self._processes):
            self._failure = StepError(f"no rollout process is left: {why}")
        self._changed.set()

    def _tell(self, process: _Process, method: str, *arguments: object) -> None:
        if process.actor is not None:
            getattr(process.actor.actor, method).remote(*arguments)

    def add(self, name: str, engine: Engine) -> None:
        """See `Follower.add`."""
        worker = self._workers[name] = self._scheduler.workers[name]
        if worker.supervisor is not None:
            self._supervisors[name] = worker.supervisor
        for process in self._processes:
            process.suspects.discard(name)
            self._tell(process, "add", name, _actor_of(engine))
        self._assign()

    def _assign(self) -> None:
        """Divide the workers among the processes that are up."""
        up, names = [p for p in self._processes if p.actor is not None], [*self._scheduler.workers]
        for place, process in enumerate(up):
            few = [names[place % len(names)]] if names else []
            self._tell(process, "prefer", names[place :: len(up)] or few)

    def restore(self, name: str) -> None:
        """See `Follower.restore`."""
        for process in self._processes:
            if name in process.suspects:
                process.suspects.discard(name)
                self._tell(process, "restore", name)

    def remove(self, name: str) -> None:
        """See `Follower.remove`."""
        for process in self._processes:
            process.suspects.discard(name)
            process.loads.pop(name, None)
            self._tell(process, "remove", name)
        self._assign()

    def close(self, why: str) -> None:
        """See `Follower.close`."""
        for process in self._processes:
            self._tell(process, "close", why)

    async def stop(self) -> None:
        """End all processes."""
        with suppress(ValueError):
            self._scheduler.leave(self)
        actors = [p.actor for p in self._processes if p.actor is not None]
        for process in self._processes:
            process.actor = None
            if process.watching is not None:
                process.watching.cancel()

        async def stop(actor: ActorHandle) -> None:
            with suppress(TurnwiseError, DeadlineError):
                await actor.call("stop", what="stop", seconds=5.0)
            actor.kill()

        await asyncio.gather(*map(stop, actors))


def _actor_of(engine: Engine) -> RayActor | None:
    actor: RayActor | None = getattr(engine, "actor", None)
    return actor


async def _answer(reply: Awaitable[Group], who: str) -> Group:
    """Wait for a group; its process limits its time."""
    return await get_with_deadline(reply, who, "finish a group", NO_DEADLINE, StepError)
