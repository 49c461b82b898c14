"""Keeps one worker of a fleet alive: starts it, checks its health, and restarts it when it fails.

A worker that dies or hangs is killed and restarted; one that only cannot be reached any more keeps
running. If the restarts fail, the worker is given up,
which is logged, and further attempts follow at growing intervals.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from turnwise.config import ServingConfig
from turnwise.engine.protocol import Engine
from turnwise.errors import DeadlineError, EngineError, text_of
from turnwise.serving.channel import ChannelError
from turnwise.serving.scheduler import Scheduler
from turnwise.serving.worker_state import Worker

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0
"""Pause before a restart, multiplied by the number of earlier restarts."""
_GIVEN_UP_SECONDS, _GIVEN_UP_MOST_SECONDS = 60.0, 600.0
"""First and longest pause between attempts to start a worker that was given up; each pause is twice
the previous one."""
_CAUSE_SECONDS = 1.0
"""Time for the scheduler to find out which request crashed the worker, before a restart."""
_SETTLED_CHECKS = 10
"""Number of successful health checks in a row after which earlier restarts no longer count."""


class ManagedEngine(Engine, Protocol):
    """An engine whose process can be ended."""

    name: str

    def fail(self, why: str) -> None:
        """End every request with `EngineError`."""
        ...

    def kill(self) -> None:
        """End the engine's process."""
        ...


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
    """Supervisor of one worker across restarts of its process.

    Args:
        index: Position in the fleet, which names the worker.
        scheduler: Gives turns to the worker while it is up.
        start: Starts a process for this worker, and calls `admit` with its engine.
        is_busy: Returns whether an update, sleep or wake-up is in progress, during which engines
            do not answer health checks.
        on_failure: Called when the worker is back.
        on_give_up: Called when all allowed restarts have failed.
    """

    def __init__(
        self,
        index: int,
        serving: ServingConfig,
        scheduler: Scheduler,
        *,
        start: "Callable[[WorkerSupervisor], Awaitable[None]]",
        is_busy: Callable[[], bool],
        on_failure: Callable[[WorkerFailure], None],
        on_give_up: Callable[[str], None],
    ) -> None:
        self.index = index
        self.name = f"worker-{index}"
        self.engine: ManagedEngine | None = None
        """Engine of the running process; None while there is none."""
        self.given_up = ""
        """Reason why the worker could not be restarted; "" unless it was given up."""
        self.restarts = 0
        """Number of restarts in a row, since it last passed `_SETTLED_CHECKS` health checks.

        Restarts after a death that a single request caused do not count, even if that is found
        out after the restart.
        """
        self._serving = serving
        self._scheduler = scheduler
        self._start = start
        self._is_busy = is_busy
        self._on_failure = on_failure
        self._on_give_up = on_give_up
        self._failure = ""
        """Reason of the last failed request; "" after a successful health check."""
        self._unreachable = ""
        """Reason why this process cannot reach the living worker; "" while it can."""
        self._checks = 0
        self._watching: asyncio.Task[None] | None = None
        self._checking: asyncio.Task[None] | None = None
        self._restarting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the worker for the first time; raise the error of a failed start."""
        await self._start(self)

    def admit(self, engine: ManagedEngine) -> None:
        """Add a new process, which has the fleet's weights and state, to the scheduler."""
        self.engine = engine
        self._scheduler.add(self.name, engine, self)

    def watch(self) -> None:
        """Start checking the worker's health, until `stop`."""
        self._watching = asyncio.create_task(self._watch())

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

    def lose(self, why: str, engine: ManagedEngine) -> None:
        """Kill a failed process and start another; without effect if it is already replaced."""
        if self.engine is not engine:
            return
        logger.info("%s is lost: %s", self.name, why)
        self.engine = None
        worker = self._scheduler.remove(self.name)
        self._restarting = asyncio.create_task(self._restart(why, worker))
        try:
            engine.fail(f"{self.name} failed: {why}")
            engine.kill()
        except Exception:
            logger.exception("%s could not be ended", self.name)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._serving.health_every)
            if not self._is_busy():
                await self._check()

    async def _check(self) -> None:
        engine = self.engine
        if engine is None:
            return
        try:
            await self._check_twice(engine)
        except TimeoutError:
            if not self._is_busy():
                seconds = self._serving.health_timeout
                self.lose(f"no answer to health checks in {seconds:g} s", engine)
        except ChannelError as error:
            if self.engine is engine:
                self._suspend(str(error))
        except (EngineError, DeadlineError) as error:
            self.lose(self._failure or str(error), engine)
        except Exception as error:
            # No error may end the health checks: a worker that cannot be checked is lost.
            logger.exception("%s: its health check failed unexpectedly", self.name)
            self.lose(f"its health check failed: {error!r}", engine)
        else:
            if self.engine is engine:
                self._failure = self._unreachable = ""
                self._checks += 1
                if self._checks >= _SETTLED_CHECKS:
                    self.restarts = 0
                self._scheduler.restore(self.name)

    def _suspend(self, why: str) -> None:
        """Give the worker no turns while it is alive, but cannot be reached from this process."""
        if not self._unreachable:
            logger.warning("%s; it gets no turns until it can be reached again", why)
        self._failure, self._unreachable = "", why
        self._scheduler.suspend(self.name)

    async def _check_twice(self, engine: ManagedEngine) -> None:
        """Check the health, twice if the first deadline passes: this process may have been
        suspended, so the answer may have arrived in time."""
        seconds = self._serving.health_timeout / 2
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await engine.check_health()
                return
        async with asyncio.timeout(seconds):
            await engine.check_health()

    async def _restart(self, why: str, dead: Worker) -> None:
        clock = asyncio.get_running_loop().time
        started = clock()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CAUSE_SECONDS):
                while dead.running:  # noqa: ASYNC110 (one of the turns may be the cause)
                    await asyncio.sleep(_CAUSE_SECONDS / 100)
        last = ""
        for pause in self._pauses():
            if self.restarts >= self._serving.max_restarts:
                self._give_up(why, last, pause)
            await asyncio.sleep(pause)
            self.restarts = min(self.restarts + 1, self._serving.max_restarts)
            try:
                await self._start(self)
                break
            except Exception as error:  # logged when the worker is given up
                last = text_of(error)
        self.given_up = self._failure = self._unreachable = ""
        self._checks = 0
        failure = WorkerFailure(self.name, why, clock() - started, Counter(dead.failed_turns))
        logger.warning("%s", failure)
        self._on_failure(failure)

    def _pauses(self) -> Iterator[float]:
        """Yield the seconds before each attempt to start the worker."""
        while self.restarts < self._serving.max_restarts:
            yield _RETRY_SECONDS * max(0, self.restarts)
        pause = _GIVEN_UP_SECONDS
        while True:
            yield pause
            pause = min(2 * pause, _GIVEN_UP_MOST_SECONDS)

    def _give_up(self, why: str, last: str, pause: float) -> None:
        logger.error(
            "%s failed (%s) and could not be restarted: %s; the next attempt is in %g s",
            *(self.name, why, last or "it has no restarts left", pause),
        )
        self.given_up = last or why
        self._on_give_up(f"{self.name} failed: {why}")
