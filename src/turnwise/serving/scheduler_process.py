"""An actor with a scheduler of its own, which samples from the driver's engines.

`scheduler_processes`, in the driver, tells it of engines that come and go.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ray.actor import ActorHandle as RayActor

from turnwise.config import Config
from turnwise.core.watchdog import last_progress
from turnwise.engine.protocol import Engine
from turnwise.errors import DeadlineError, EngineError
from turnwise.serving.routing import Worker
from turnwise.serving.scheduler import Scheduler
from turnwise.serving.worker_handle import WorkerHandle

Message = tuple[str, tuple[object, ...]]
"""A method of a `SchedulerProcess` that the driver calls, and its arguments."""
_REACH_SECONDS = 1.0
"""Time between two attempts to reach a worker that is alive."""
REPORT_SECONDS = 0.25
"""Time between two reports of a process that has nothing urgent."""


@dataclass(frozen=True, slots=True)
class _Counts:
    """Counts of a worker; see `Worker`."""

    turns: int = 0
    tokens: int = 0
    failed_turns: Counter[str] = field(default_factory=Counter)

    def since(self, before: "_Counts") -> "_Counts":
        turns, tokens = self.turns - before.turns, self.tokens - before.tokens
        return _Counts(turns, tokens, self.failed_turns - before.failed_turns)

    def plus(self, other: "_Counts") -> "_Counts":
        turns, tokens = self.turns + other.turns, self.tokens + other.tokens
        return _Counts(turns, tokens, self.failed_turns + other.failed_turns)


@dataclass(slots=True)
class Report:
    """News of a process since its last report."""

    progressed: bool
    """Whether a wait ended or tokens arrived."""
    loads: dict[str, float]
    """Load that the process puts on each worker, by name."""
    events: Counter[str]
    """Counts to add to `Scheduler.events`."""
    counts: "dict[str, _Counts]" = field(default_factory=dict)
    """Counts to add to each worker's, by name."""
    failures: list[tuple[str, str]] = field(default_factory=list)
    """Workers on which a request failed, and why: each waits for `restore` or `remove`."""
    excused: list[str] = field(default_factory=list)
    """Workers whose death a single request caused."""
    sessions: dict[str, str] = field(default_factory=dict)
    """Sessions of clients that began ("") or ended (why), by name; of a `SessionProcess` only."""
    requests: Counter[str] = field(default_factory=Counter)
    """Requests of clients, by status or event; of a `SessionProcess` only."""


class SchedulerProcess:
    """The base class of such actors; a subclass adds what samples from the scheduler.

    Args:
        config: The driver's configuration.

    Example:
        class SessionProcess(SchedulerProcess):
            async def start(self) -> str:
                self._server = OpenAIServer(self.config, self.scheduler, port=0)
                return await self._server.start()
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        seconds = config.engine.start_timeout + config.engine.request_timeout
        self.scheduler = Scheduler(config.serving, seconds)
        self._urgent = asyncio.Event()
        self._failures: list[tuple[str, str]] = []
        self._excused: list[str] = []
        self._counted: dict[Worker, _Counts] = {}
        """Reported counts of each worker, also of removed ones whose turns are not over."""
        self._events: Counter[str] = Counter()
        self._moved = 0.0
        self._reaching: set[asyncio.Task[None]] = set()

    async def add(self, name: str, worker: RayActor) -> None:
        """See `Follower.add`."""
        if name in self.scheduler.workers:
            await self.remove(name)
        added = self.scheduler.add(name, self._attach(name, worker), _Remote(self, name))
        self._counted[added] = _Counts()

    def _attach(self, name: str, worker: RayActor) -> Engine:
        return WorkerHandle.attach(worker, name, self.config)

    async def restore(self, name: str) -> None:
        """See `Follower.restore`."""
        if (worker := self.scheduler.workers.get(name)) is not None:
            task = asyncio.create_task(self._restore(worker))
            self._reaching.add(task)
            task.add_done_callback(self._reaching.discard)

    async def _restore(self, worker: Worker) -> None:
        """Use a worker again, if this process can reach it; else report that it cannot."""
        name, seconds = worker.name, self.config.serving.health_timeout
        why = f"{name} did not answer within {seconds:g} s"
        try:
            async with asyncio.timeout(seconds):
                await worker.engine.check_health()
        except (EngineError, DeadlineError, TimeoutError) as error:
            if self.scheduler.workers.get(name) is worker:
                self.scheduler.suspend(name)
                await asyncio.sleep(_REACH_SECONDS)
                self.report_failure(name, str(error) or why)
        else:
            if self.scheduler.workers.get(name) is worker:
                self.scheduler.restore(name)

    async def remove(self, name: str) -> None:
        """See `Follower.remove`."""
        if name in self.scheduler.workers:
            worker = self.scheduler.remove(name)
            if isinstance(worker.engine, WorkerHandle):
                worker.engine.fail(f"{name} is lost")

    async def close(self, why: str) -> None:
        """See `Follower.close`."""
        self.scheduler.close(why)

    async def prefer(self, names: Sequence[str]) -> None:
        """See `Scheduler.prefer`."""
        self.scheduler.prefer(names)

    async def wake(self) -> None:
        """End a `report` that waits: the driver has messages."""
        self._urgent.set()

    async def report(self, messages: Sequence[Message] = ()) -> Report:
        """Return the news at the next urgent event, or after `REPORT_SECONDS`.

        Args:
            messages: What the driver tells this process. Ray's asynchronous actors may begin calls
                in another order than they were made, so all messages come by this one.
        """
        for method, arguments in messages:
            await getattr(self, method)(*arguments)
        try:
            async with asyncio.timeout(REPORT_SECONDS):
                await self._urgent.wait()
        except TimeoutError:
            pass
        self._urgent.clear()
        moved, self._moved = self._moved, last_progress()
        events, self._events = self._events, Counter(self.scheduler.events)
        workers = self.scheduler.workers
        report = Report(
            progressed=self._moved != moved,
            loads={name: worker.load for name, worker in workers.items()},
            events=self._events - events,
            failures=self._failures,
            excused=self._excused,
        )
        self._failures, self._excused = [], []
        for worker, before in list(self._counted.items()):
            new = _Counts(worker.turns, worker.tokens, Counter(worker.failed_turns))
            known = report.counts.get(worker.name, _Counts())  # of a worker before it
            report.counts[worker.name] = known.plus(new.since(before))
            if worker.running or workers.get(worker.name) is worker:
                self._counted[worker] = new
            else:
                del self._counted[worker]
        return report

    def report_failure(self, name: str, why: str) -> None:
        """Report at once that a request failed on a worker."""
        self._failures.append((name, why))
        self._urgent.set()

    def excuse_death(self, name: str) -> None:
        """Report that a single request caused a worker's death."""
        self._excused.append(name)
        self._urgent.set()


@dataclass(frozen=True, slots=True)
class _Remote:
    """The supervisor of a worker, which is in the driver."""

    process: SchedulerProcess
    name: str

    def report_failure(self, why: str) -> None:
        self.process.report_failure(self.name, why)

    def excuse_death(self) -> None:
        self.process.excuse_death(self.name)
