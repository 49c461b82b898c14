"""Actors that sample from the driver's engines, each with a scheduler of its own.

One event loop samples about a thousand turns a second, whatever the engines could do. So the work
is spread over actors (`scheduler_process`), which talk to the engines directly. The driver tells
them of engines that come and go, and remains the only one that starts, checks and restarts engines.

Each process has some of the engines for the sessions that it begins, and balances them as one
scheduler does. Choosing among all engines by loads that are a moment old would be worse: all
processes would choose the same ones (`python -m benchmarks.scale`).
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass, field

from ray.actor import ActorHandle as RayActor

from turnwise.config import Config
from turnwise.core.actor import ActorHandle
from turnwise.core.aio import is_cancelled, task_group
from turnwise.core.watchdog import made_progress
from turnwise.engine.protocol import Engine
from turnwise.errors import DeadlineError, TurnwiseError, text_of
from turnwise.serving.api_key import with_api_key
from turnwise.serving.routing import Supervisor, Worker
from turnwise.serving.scheduler import Scheduler
from turnwise.serving.scheduler_process import REPORT_SECONDS, Message, Report

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Process:
    """One actor, across restarts."""

    name: str
    actor: ActorHandle | None = None
    """None while there is none."""
    lost: "asyncio.Future[str]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """Set to the reason when the actor died or hangs."""
    busy: int = 0
    """Number of groups in flight, or of open sessions."""
    restarts: int = 0
    """Restarts since it last finished anything."""
    given_up: bool = False
    """Whether it is not started again."""
    suspects: set[str] = field(default_factory=set)
    """Workers on which a request failed, and which were not restored or removed since."""
    loads: dict[str, float] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    """Messages that go to the actor with the request for its next report."""
    watching: "asyncio.Task[None] | None" = None


class SchedulerProcesses(ABC):
    """The base class of their owners; a `Follower` of the driver's scheduler.

    Args:
        scheduler: Scheduler of the engines.
        names: Names of the processes, for logs and errors.
    """

    def __init__(self, config: Config, scheduler: Scheduler, names: list[str]) -> None:
        self.config = with_api_key(config)
        self.failure = ""
        """Reason why no process is left; "" while one is."""
        self.processes = [Process(name) for name in names]
        self.changed = asyncio.Event()
        """Set when a process is up, or no process is left."""
        self._scheduler = scheduler
        self._supervisors: dict[str, Supervisor] = {}
        self._workers: dict[str, Worker] = {}
        """The last worker of each name, removed or not."""

    @abstractmethod
    def create(self, process: Process) -> ActorHandle:
        """Start the actor of a process, without waiting for it."""

    async def start_actor(self, process: Process, actor: ActorHandle) -> None:
        """Call the `start` of a new actor."""
        await actor.call("start", what="start", seconds=self.config.engine.start_timeout)

    @property
    def up(self) -> list[Process]:
        """Processes that have an actor."""
        return [process for process in self.processes if process.actor is not None]

    async def start(self) -> None:
        """Start all processes; if one fails, end them all.

        Raises:
            InputError: when a process refuses what the user gave.
            DeadlineError: when one does not start within `engine.start_timeout`.
        """
        self._scheduler.lead(self)
        try:
            async with task_group() as starting:
                for process in self.processes:
                    starting.create_task(self._start(process))
        except BaseException:
            await self.stop()
            raise

    async def _start(self, process: Process) -> None:
        actor = self.create(process)
        try:
            await self.start_actor(process, actor)
            process.lost = asyncio.get_running_loop().create_future()
            process.actor, process.messages = actor, []
            for worker in self._scheduler.workers.values():
                self._tell(process, "add", worker.name, _actor_of(worker.engine))
            self._assign()
        except BaseException:
            process.actor = None
            actor.kill()
            raise
        process.watching = asyncio.create_task(self._watch(process, actor))
        self.changed.set()

    async def _watch(self, process: Process, actor: ActorHandle) -> None:
        """Receive a process's reports; restart it when it dies or hangs."""
        seconds = REPORT_SECONDS + self.config.serving.health_timeout
        try:
            while True:
                what = "report its health"
                messages, process.messages = process.messages, []
                report = await actor.call("report", messages, what=what, seconds=seconds)
                self.take(process, report)
        except Exception as error:  # none may end the watch without a restart
            await self._restart(process, actor, text_of(error))

    def take(self, process: Process, report: Report) -> None:
        """Add what a process reports to the driver's counts."""
        if report.progressed:
            made_progress()
        process.loads = report.loads
        total: dict[str, float] = {}
        for name in self._scheduler.workers:
            total[name] = sum(each.loads.get(name, 0.0) for each in self.processes)
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

    def forget(self, process: Process) -> None:
        """Forget what a process had in hand; called when it is lost, before its restart."""
        process.loads = {}

    async def _restart(self, process: Process, actor: ActorHandle, why: str) -> None:
        """Start a lost process again, up to `serving.max_restarts` times, or give it up.

        Any failure here (Ray, a lack of threads, a bug) counts as an attempt, because groups that
        wait for a process must not wait for ever.
        """
        process.actor = None
        try:
            if not process.lost.done():
                process.lost.set_result(why)
            try:
                actor.kill()
                self.forget(process)
                self._assign()
            except Exception:
                logger.exception("%s could not be ended", process.name)
            logger.warning("%s is restarted: %s", process.name, why)
            limit = self.config.serving.max_restarts
            while process.restarts < limit:
                process.restarts += 1
                # Seconds; what it needs may still be taken.
                await asyncio.sleep(process.restarts - 1)
                try:
                    return await self._start(process)
                except Exception as error:
                    unexpected = not isinstance(error, TurnwiseError)
                    logger.info("%s does not start", process.name, exc_info=unexpected)
                    why = text_of(error)
            why = f"{process.name} was restarted {limit} times; the last: {why}"
        finally:
            if process.actor is None and not is_cancelled():
                self._give_up(process, why)

    def _give_up(self, process: Process, why: str) -> None:
        logger.error(why)
        process.given_up = True
        if all(one.given_up for one in self.processes):
            self.failure = why
        self.changed.set()

    def _tell(self, process: Process, method: str, *arguments: object) -> None:
        if process.actor is not None:
            process.messages.append((method, arguments))
            process.actor.actor.wake.remote()

    def add(self, name: str, engine: Engine) -> None:
        """See `Follower.add`."""
        worker = self._workers[name] = self._scheduler.workers[name]
        if worker.supervisor is not None:
            self._supervisors[name] = worker.supervisor
        for process in self.processes:
            process.suspects.discard(name)
            self._tell(process, "add", name, _actor_of(engine))
        self._assign()

    def _assign(self) -> None:
        """Divide the workers among the processes that are up."""
        up, names = self.up, [*self._scheduler.workers]
        for place, process in enumerate(up):
            few = [names[place % len(names)]] if names else []
            self._tell(process, "prefer", names[place :: len(up)] or few)

    def restore(self, name: str) -> None:
        """See `Follower.restore`."""
        for process in self.processes:
            if name in process.suspects:
                process.suspects.discard(name)
                self._tell(process, "restore", name)

    def remove(self, name: str) -> None:
        """See `Follower.remove`."""
        for process in self.processes:
            process.suspects.discard(name)
            process.loads.pop(name, None)
            self._tell(process, "remove", name)
        self._assign()

    def close(self, why: str) -> None:
        """See `Follower.close`."""
        for process in self.processes:
            self._tell(process, "close", why)

    async def stop(self) -> None:
        """End all processes."""
        with suppress(ValueError):
            self._scheduler.leave(self)
        actors = [p.actor for p in self.processes if p.actor is not None]
        for process in self.processes:
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
