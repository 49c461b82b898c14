"""A fleet of workers behind one scheduler: start, number, weights, sleep, wake and shutdown.

Each worker has a supervisor, which restarts it when it dies or hangs. A worker that is alive but
cannot be reached is not restarted. A new worker gets the fleet's weights and state before it gets
turns. If the restarts fail, the worker is given up, and further attempts follow at growing
intervals. Workers join and leave at any time (`AsyncLLMServerManager.scale`). A leaving worker gets
no further updates or turns; its running turns end there or continue on other workers.
"""

import asyncio
import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from turnwise.config import ServingConfig, WeightsConfig
from turnwise.core.aio import task_group, together
from turnwise.engine.protocol import Engine
from turnwise.errors import (
    DeadlineError,
    EngineError,
    TurnwiseError,
    WeightUpdateError,
    text_of,
)
from turnwise.serving.channel import ChannelError
from turnwise.serving.routing import Supervisor, Worker
from turnwise.serving.scheduler import Scheduler
from turnwise.weights.sync import Updated, WeightSync

if TYPE_CHECKING:
    from turnwise.serving.worker_handle import WorkerHandle

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0  # pause before a restart, multiplied by the number of earlier restarts
_GIVEN_UP_SECONDS, _GIVEN_UP_MAX_SECONDS = 60.0, 600.0
"""First and longest pause between attempts to start a worker whose restarts all failed; each pause
is twice the previous one."""
_CAUSE_SECONDS = 1.0
"""Time for the scheduler to find out which request crashed the worker, before a restart."""
_SLOW_SECONDS = 30.0
"""Seconds after which the log reports that a lost worker is not back yet; its node may be cut off,
or the cluster may be full."""
_LEAVE_SECONDS = 60.0
"""Time for the turns of a leaving worker to end; after that, other workers continue them."""
_LEAVE_POLL_SECONDS = 0.5  # also time for processes to learn that the worker takes no more turns
_HAND_OVER_SECONDS = 10.0  # time for a leaving worker's aborted turns to move to other workers
_SETTLED_CHECKS = 10
"""Number of successful health checks in a row after which earlier restarts no longer count."""


@dataclass(slots=True)
class WorkerFailure:
    """A failure of a worker that has been restarted since."""

    worker: str
    why: str
    """Reason, as reported by the engine, Ray or the health check."""
    seconds: float
    """Seconds until the worker was back."""
    turns: Counter[str] = field(default_factory=Counter)
    """Number of the worker's turns by outcome: continued, moved, restarted."""

    def __str__(self) -> str:
        said = {
            "continued": "continued elsewhere from their tokens",
            "moved": "begun elsewhere",
            "restarted": "restarted",
        }
        turns = ", ".join(f"{self.turns[k]} turns {v}" for k, v in said.items() if self.turns[k])
        return (
            f"{self.worker} failed ({self.why}) and is back after {self.seconds:.1f} s; "
            f"{turns or 'no turn was running on it'}"
        )


class WorkerSupervisor:
    """Supervisor of one worker, identified by its index, across restarts of its process."""

    def __init__(self, index: int, serving: ServingConfig, fleet: "AsyncLLMServerManager") -> None:
        self.index = index
        self.name = f"worker-{index}"
        self.engine: WorkerHandle | None = None
        """Engine of the running process; None while no process is running."""
        self.given_up = ""
        """Reason why a worker that is down could not be restarted, once it has used up its
        `restarts`; "" otherwise. Attempts to start it go on forever, at growing intervals."""
        self.restarts = 0
        """Number of restarts since the worker last passed `_SETTLED_CHECKS` health checks in a row,
        at most `serving.max_restarts`. A restart after a death that a single request caused does
        not count, even if the cause is found later."""
        self._serving = serving
        self._fleet = fleet
        self._failure = ""  # reason of the last failed request; "" after a successful health check
        self._unreachable = ""
        """Reason why this process cannot reach the living worker; "" while it can."""
        self._checks = 0
        self._watching: asyncio.Task[None] | None = None
        self._checking: asyncio.Task[None] | None = None
        self._restarting: asyncio.Task[None] | None = None

    def admit(self, engine: "WorkerHandle") -> None:
        """Add a new process, which has the fleet's weights and state, to the scheduler."""
        self.engine = engine
        own = Supervisor(self.report_failure, self.excuse_death)
        self._fleet.scheduler.add(self.name, engine, own)

    def watch(self) -> None:
        """Start checking the worker's health, until `stop`."""

        async def check_often() -> None:
            while True:
                await asyncio.sleep(self._serving.health_every)
                if not self._fleet.is_busy:
                    await self._check()

        self._watching = asyncio.create_task(check_often())

    async def stop(self) -> None:
        """Stop health checks and restarts; the worker's process keeps running."""
        tasks = [t for t in (self._watching, self._checking, self._restarting) if t is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def report_failure(self, why: str) -> None:
        self._failure = why
        if self._checking is None or self._checking.done():
            self._checking = asyncio.create_task(self._check())

    def excuse_death(self) -> None:
        self.restarts -= 1

    def lose(self, why: str, engine: "WorkerHandle") -> None:
        """Kill a failed process and start another; do nothing if the process has already been
        replaced."""
        if self.engine is not engine:
            return
        logger.info("%s is lost: %s", self.name, why)
        self.engine = None
        worker = self._fleet.scheduler.remove(self.name)
        self._restarting = asyncio.create_task(self._restart(why, worker))
        try:
            engine.fail(f"{self.name} failed: {why}")
            engine.kill()
        except Exception:
            logger.exception("%s could not be ended", self.name)

    async def _check(self) -> None:
        engine, scheduler = self.engine, self._fleet.scheduler
        if engine is None:
            return
        seconds = self._serving.health_timeout
        try:
            try:
                async with asyncio.timeout(seconds / 2):
                    occupancy = await engine.check_health()
            except TimeoutError:  # ask once more: this process may have been suspended
                async with asyncio.timeout(seconds / 2):
                    occupancy = await engine.check_health()
        except TimeoutError:
            if not self._fleet.is_busy:
                self.lose(f"no answer to health checks in {seconds:g} s", engine)
        except ChannelError as error:  # the worker is alive, but unreachable from this process
            if self.engine is engine:
                if not self._unreachable:
                    logger.warning("%s; it gets no turns until it can be reached again", error)
                self._failure, self._unreachable = "", str(error)
                scheduler.suspend(self.name)
        except (EngineError, DeadlineError) as error:
            self.lose(self._failure or str(error), engine)
        except Exception as error:
            # No error may end the health checks, so a worker that cannot be checked counts as lost.
            logger.exception("%s: its health check failed unexpectedly", self.name)
            self.lose(f"its health check failed: {error!r}", engine)
        else:
            if self.engine is engine:
                self._failure = self._unreachable = ""
                self._checks += 1
                if self._checks >= _SETTLED_CHECKS:
                    self.restarts = 0
                scheduler.restore(self.name)
                if occupancy is not None:
                    scheduler.note_occupancy(self.name, occupancy)

    def join(self) -> None:
        """Start the first process of a worker that joins during the run, and watch it."""
        self.restarts = -1  # the first start does not count as a restart
        self._restarting = asyncio.create_task(self._start_at_last("it did not start"))
        self.watch()

    async def _restart(self, why: str, dead: Worker) -> None:
        loop = asyncio.get_running_loop()
        started, slow = loop.time(), "%s is lost (%s), and not back after %g s"
        late = loop.call_later(_SLOW_SECONDS, logger.warning, slow, self.name, why, _SLOW_SECONDS)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CAUSE_SECONDS):
                    while dead.running:  # noqa: ASYNC110 (one of the turns may be the cause)
                        await asyncio.sleep(_CAUSE_SECONDS / 100)
            await self._start_at_last(why)
        finally:
            late.cancel()
        failure = WorkerFailure(self.name, why, loop.time() - started, Counter(dead.failed_turns))
        logger.warning("%s", failure)
        self._fleet.failures.append(failure)

    async def _start_at_last(self, why: str) -> None:
        """Start the worker, retrying until it succeeds; `why` is the reason in the log."""
        last, longer = "", _GIVEN_UP_SECONDS
        while True:
            pause = _RETRY_SECONDS * max(0, self.restarts)
            if self.restarts >= self._serving.max_restarts:
                pause, longer = longer, min(2 * longer, _GIVEN_UP_MAX_SECONDS)
                logger.error(
                    "%s failed (%s) and could not be restarted: %s; the next attempt is in %g s",
                    *(self.name, why, last or "it has no restarts left", pause),
                )
                self.given_up = last or why
                self._fleet.close_if_empty(f"{self.name} failed: {why}")
            await asyncio.sleep(pause)
            self.restarts = min(self.restarts + 1, self._serving.max_restarts)
            try:
                await self._fleet.start_worker(self)
                break
            except Exception as error:  # logged when the worker is given up
                last = text_of(error)
        logger.info("%s serves", self.name)
        self.given_up = self._failure = self._unreachable = ""
        self._checks = 0


class AsyncLLMServerManager:
    """The workers behind one scheduler.

    Args:
        start: Starts a worker, given its name and its index from 0; raises `InputError` or
            `DeadlineError`.
        serving: Number of workers, and settings of their supervision.
        weights: Treatment of running turns during updates.
        turn_timeout: Seconds that a turn waits while no worker is usable.
        end: Called once no worker will be started any more.
        left: Called with the index of a worker that has left.

    A worker that fails during sleep or wake-up is restarted; see `update_weights` for updates.
    """

    def __init__(
        self,
        start: "Callable[[str, int], Awaitable[WorkerHandle]]",
        serving: ServingConfig,
        weights: WeightsConfig,
        turn_timeout: float,
        end: Callable[[], None] = lambda: None,
        left: Callable[[int], None] = lambda index: None,
    ) -> None:
        self.scheduler = Scheduler(serving, turn_timeout)
        self.failures: list[WorkerFailure] = []
        """Failures of workers that have been restarted since."""
        self.must_keep_version: Callable[[], bool] = lambda: False
        """Returns whether all workers must keep the same weight version for now. As long as it
        returns True, a new worker that would get newer weights waits, unless no other worker is
        up."""
        self.is_busy = False
        """True during an update, sleep or wake-up, when engines do not answer health checks."""
        self._start, self._end, self._left = start, end, left
        self._serving, self._weights = serving, weights
        self._supervisors = [
            WorkerSupervisor(index, serving, self) for index in range(serving.min_workers)
        ]
        self._leaving: dict[int, tuple[asyncio.Task[None], WorkerHandle]] = {}
        """Leaving workers by index: the task that ends the worker, and its engine."""
        self._sync: WeightSync | None = None  # source of the last update; None before the first one
        self._asleep = False
        self._control = asyncio.Lock()
        """Lock of updates, sleep, wake-up and `scale`, also held while a new worker joins."""

    @property
    def engines(self) -> "list[WorkerHandle]":
        return [engine for _, engine in self._up()]

    @property
    def base_urls(self) -> dict[str, str]:
        """URLs of running workers that serve HTTP themselves (serving.worker_servers)."""
        known = {engine.name: getattr(engine, "base_url", None) for engine in self.engines}
        return {name: url for name, url in known.items() if url}

    @property
    def given_up(self) -> dict[str, str]:
        """Reasons why workers that have used up `serving.max_restarts` are down, by name.
        Attempts to start them go on forever, at growing intervals."""
        return {one.name: one.given_up for one in self._supervisors if one.given_up}

    async def start(self) -> None:
        """Start all workers concurrently; if one fails, end them all."""
        try:
            async with task_group() as starting:
                for supervisor in self._supervisors:
                    starting.create_task(self.start_worker(supervisor))
        except BaseException:
            await self.shutdown()
            raise
        for supervisor in self._supervisors:
            supervisor.watch()

    async def scale(self, workers: int) -> None:
        """Change the number of workers; return before new workers are up and leaving workers have
        left.

        A new worker starts once there is room for it, and gets the current weights before its first
        turn. Workers that are not up leave first, then the workers with the highest indices. A
        leaving worker gets no more turns. Its running turns end there or, after a while, continue
        on other workers.
        """
        async with self._control:  # no update is in progress
            known = self._supervisors
            last_first = sorted(known, key=lambda one: (one.engine is not None, -one.index))
            for supervisor in last_first[: max(0, len(known) - workers)]:
                await supervisor.stop()
                known.remove(supervisor)
                if (engine := supervisor.engine) is None:
                    self._left(supervisor.index)
                    continue
                supervisor.engine = None  # a failure that is reported later must not restart it
                worker = self.scheduler.remove(supervisor.name, lost=False)
                leaving = asyncio.create_task(self._let_go(supervisor.index, engine, worker))
                self._leaving[supervisor.index] = leaving, engine
            taken = {one.index for one in known} | self._leaving.keys()
            free = (index for index in itertools.count() if index not in taken)
            for index in itertools.islice(free, max(0, workers - len(known))):
                known.append(supervisor := WorkerSupervisor(index, self._serving, self))
                supervisor.join()

    async def _let_go(self, index: int, engine: "WorkerHandle", worker: Worker) -> None:
        """End a leaving worker once its turns have ended or have been handed over."""
        clock = asyncio.get_running_loop().time
        ends, handed_over = clock() + _LEAVE_SECONDS, False
        try:
            await asyncio.sleep(_LEAVE_POLL_SECONDS)
            while worker.running or await engine.num_in_flight():
                if clock() > ends:
                    if handed_over:
                        break
                    if handed_over := await engine.hand_over():
                        ends = clock() + _HAND_OVER_SECONDS
                await asyncio.sleep(_LEAVE_POLL_SECONDS)
            await engine.shutdown()
        except Exception as error:  # as after any death, its turns continue elsewhere
            logger.warning("%s failed while it was leaving: %s", worker.name, text_of(error))
            engine.fail(f"{worker.name} has left")
            engine.kill()
        finally:
            del self._leaving[index]
        self._left(index)
        logger.info("%s has left", worker.name)

    async def start_worker(self, supervisor: WorkerSupervisor) -> None:
        """Start a worker, and give it the weights and state of the other workers."""
        engine = await self._start(supervisor.name, supervisor.index)
        try:
            while not await self._admit(supervisor, engine):  # noqa: ASYNC110 (nobody says when)
                await asyncio.sleep(_RETRY_SECONDS)
        except BaseException:
            engine.fail(f"{supervisor.name} did not come up")
            engine.kill()
            raise

    async def _admit(self, supervisor: WorkerSupervisor, engine: "WorkerHandle") -> bool:
        """Give a new worker the weights and state of the other workers, and let it take turns;
        return False if it has to wait."""
        async with self._control:
            if (sync := self._sync) is not None:
                if sync.sends_newest and self.engines and self.must_keep_version():
                    return False
                await sync.update_one(engine, self._weights.in_flight)
            if self._asleep:
                await engine.sleep()
            supervisor.admit(engine)
            return True

    async def update_weights(self, sync: WeightSync) -> list[Updated]:
        """Update all workers to the weights that `sync` offers, or update none of them.

        If one worker refuses the update, all keep their weights. A worker that dies or fails in
        another way is restarted, and gets the weights before it serves. If all workers fail, those
        that raised a `WeightUpdateError` are not restarted, because the next update may succeed.
        Raises the errors of `WeightSync.update`, and the first worker's error if no worker loaded
        the weights.

        Returns:
            The results of the workers that serve the weights.
        """

        def take_results(results: Mapping[Engine, object]) -> None:
            """Restart the workers whose result is an error; raise the first error if all failed."""
            failed = {e: r for e, r in results.items() if isinstance(r, TurnwiseError)}
            all_failed = len(failed) == len(results)
            for supervisor, engine in self._up():
                error = failed.get(engine)
                if error is not None and not (all_failed and isinstance(error, WeightUpdateError)):
                    supervisor.lose(f"in a weight update: {error}", engine)
            if failed and all_failed:
                raise next(iter(failed.values()))

        async with self._occupied():
            try:
                results = await sync.update(self.engines, self._weights.in_flight, take_results)
            finally:
                if sync.current is not None:  # no worker has refused the update
                    self._sync = sync
        return [result for result in results.values() if isinstance(result, Updated)]

    @asynccontextmanager
    async def _occupied(self) -> AsyncIterator[None]:
        async with self._control:
            self.is_busy = True
            try:
                yield
            finally:
                self.is_busy = False

    async def sleep(self) -> None:
        """Free every worker's memory; running turns wait and continue after the wake-up."""
        await self._all("sleep", lambda engine: engine.sleep(), asleep=True)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Resume serving; `tags` (weights, kv_cache) select the parts to wake; None wakes
        everything."""
        asleep = bool(tags) and "kv_cache" not in (tags or ())
        await self._all("wake_up", lambda engine: engine.wake_up(tags or None), asleep=asleep)

    async def _all(
        self, what: str, call: "Callable[[WorkerHandle], Awaitable[None]]", *, asleep: bool
    ) -> None:
        async def one(supervisor: WorkerSupervisor, engine: "WorkerHandle") -> None:
            try:
                await call(engine)
            except TurnwiseError as error:
                supervisor.lose(f"in {what}: {error}", engine)

        async with self._occupied():
            self._asleep = asleep
            await together(one(*pair) for pair in self._up())

    @asynccontextmanager
    async def running(self) -> AsyncIterator["AsyncLLMServerManager"]:
        """Start the workers, and shut them down at the end of the block in any case."""
        await self.start()
        try:
            yield self
        finally:
            await self.shutdown()

    async def shutdown(self) -> None:
        await asyncio.gather(*(supervisor.stop() for supervisor in self._supervisors))
        leaving = [*self._leaving.values()]
        for task, _ in leaving:
            task.cancel()
        self.scheduler.close("the fleet was shut down")
        for name in list(self.scheduler.workers):
            self.scheduler.remove(name)
        engines = [*self.engines, *(engine for _, engine in leaving)]
        await asyncio.gather(*(e.shutdown() for e in engines), return_exceptions=True)
        for supervisor in self._supervisors:
            supervisor.engine = None
        self._end()

    def _up(self) -> "list[tuple[WorkerSupervisor, WorkerHandle]]":
        return [(one, one.engine) for one in self._supervisors if one.engine is not None]

    def close_if_empty(self, why: str) -> None:
        """Fail the turns that wait for a worker, if none is up and all initial workers are given
        up.

        Workers that joined later do not count, because they may wait for room forever.
        """
        first = [one for one in self._supervisors if one.index < self._serving.min_workers]
        if not self.engines and all(one.given_up for one in first or self._supervisors):
            self.scheduler.close(why)
