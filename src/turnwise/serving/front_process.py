"""An actor that samples from the driver's engines, with a scheduler of its own.

`front_processes`, in the driver, tells it of engines that come and go.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import ray
from ray.actor import ActorHandle as RayActor

from turnwise.chat.session_store import Place
from turnwise.config import Config, SamplingConfig
from turnwise.core import logs
from turnwise.core.json_types import JsonObject
from turnwise.core.optional import Foreign
from turnwise.core.watchdog import last_progress
from turnwise.engine.protocol import Engine
from turnwise.errors import DeadlineError, EngineError, InputError
from turnwise.serving.openai import import_server
from turnwise.serving.openai.address import listen
from turnwise.serving.routing import Supervisor, Worker
from turnwise.serving.scheduler import Scheduler
from turnwise.serving.worker_handle import WorkerHandle

if TYPE_CHECKING:
    from turnwise.serving.openai import OpenAIServer

logger = logging.getLogger(__name__)

Message = tuple[str, tuple[object, ...]]
"""A method of a `FrontProcess`, or of its scheduler, that the driver calls, and its arguments."""
REPORT_SECONDS = 0.25
"""Time between two reports of a process that has nothing urgent."""
LOST = "was lost when its process died"
"""End of a session, after "the session NAME"."""
_REACH_SECONDS = 1.0
"""Time between two attempts to reach a worker that is alive."""
_PORT_SECONDS = 3.0
"""Time in which the port of a process that died becomes free."""


RunGroup = Callable[[Foreign, SamplingConfig, str], Awaitable[object]]
"""Runs the group of a problem, under a unique tag."""
OpenRunner = Callable[[Config, Scheduler], AbstractAsyncContextManager[RunGroup]]
"""Makes a runner of groups, and what serves its agents; see `rollouts.processes`."""


@dataclass(slots=True)
class Report:
    """News of a process since its last report."""

    progressed: bool
    """Whether a wait ended or tokens arrived."""
    loads: dict[str, float]
    events: Counter[str]
    failures: list[tuple[str, str]]
    """Workers on which a request failed, and why: each waits for `restore` or `remove`."""
    excused: list[str]
    """Workers whose death a single request caused."""
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    """Counts of each worker: turns, tokens, and its failed turns by outcome."""
    sessions: dict[str, str] = field(default_factory=dict)
    """Sessions of clients that began ("") or ended (why), by name."""
    requests: Counter[str] = field(default_factory=Counter)


class FrontProcess:
    """An actor's class: a scheduler, and a runner of groups or (without one) an OpenAI server."""

    def __init__(self, config: Config, open_runner: OpenRunner | None = None) -> None:
        self.config = config
        seconds = config.engine.start_timeout + config.engine.request_timeout
        self.scheduler = Scheduler(config.serving, seconds)
        self._open_runner = open_runner
        self._run_group: RunGroup | None = None
        self._stack = AsyncExitStack()
        self._server: OpenAIServer | None = None
        self.urgent = asyncio.Event()
        """Set when something is to be reported at once."""
        self.failures: list[tuple[str, str]] = []
        self.excused: list[str] = []
        self._counted: dict[Worker, Counter[str]] = {}
        """Reported counts of each worker, also of removed ones whose turns are not over."""
        self._events: Counter[str] = Counter()
        self._requests: Counter[str] = Counter()
        self._moved = 0.0
        self._reaching: set[asyncio.Task[None]] = set()

    async def start(self, port: int, lost: Sequence[str]) -> tuple[str, str]:
        """Make the runner, or start the server at a port that is free or becomes so; return the
        base URL and the id of the node. Sessions of the process before, `lost`, are refused."""
        logs.follow()
        base_url = ""
        if self._open_runner is not None:
            opening = self._open_runner(self.config, self.scheduler)
            self._run_group = await self._stack.enter_async_context(opening)
        else:
            make = await import_server()
            port = await _free_port(self.config.serving.host, port)
            base_url = await self.serve(make(self.config, self.scheduler, port), lost)
        return base_url, ray.get_runtime_context().get_node_id()

    async def serve(self, server: "OpenAIServer", lost: Sequence[str]) -> str:
        self._server = server
        self._stack.push_async_callback(server.stop)
        server.sessions.refuse(lost, LOST)
        server.sessions.changes = {}
        return await server.start()

    async def run_group(self, problem: Foreign, sampling: SamplingConfig, tag: str) -> object:
        assert self._run_group is not None
        return await self._run_group(problem, sampling, tag)

    async def open(self, name: str | None, training: bool, group: str) -> JsonObject:
        assert self._server is not None
        session = self._server.sessions.open(name, training=training, group=group)
        return {**session.describe(), **self._server.urls(session.id)}

    async def list_sessions(self, after: Place | None, most: int) -> list[tuple[Place, JsonObject]]:
        """Return a page of the sessions of clients; see `SessionStore.page`."""
        assert self._server is not None
        return self._server.sessions.page(after, most)

    async def stop(self) -> bool:
        """End the server or the runner, and return True; the owner kills the actor."""
        await self._stack.aclose()
        return True

    # What the driver tells this process, beside the scheduler's own methods; see `Follower`.

    def add(self, name: str, worker: RayActor) -> None:
        self.remove(name)

        def excuse_death() -> None:
            self.excused.append(name)
            self.urgent.set()

        supervisor = Supervisor(partial(self._report_failure, name), excuse_death)
        added = self.scheduler.add(name, self._attach(name, worker), supervisor)
        self._counted[added] = Counter()

    def _attach(self, name: str, worker: RayActor) -> Engine:
        return WorkerHandle.attach(worker, name, self.config)

    def _report_failure(self, name: str, why: str) -> None:
        self.failures.append((name, why))
        self.urgent.set()

    def restore(self, name: str) -> None:
        """Use a worker again, once this process can reach it; report it as long as it cannot."""
        if (worker := self.scheduler.workers.get(name)) is None:
            return
        seconds = self.config.serving.health_timeout

        async def reach() -> None:
            try:
                async with asyncio.timeout(seconds):
                    await worker.engine.check_health()
            except (EngineError, DeadlineError, TimeoutError) as error:
                if self.scheduler.workers.get(name) is worker:
                    self.scheduler.suspend(name)
                    await asyncio.sleep(_REACH_SECONDS)
                    why = str(error) or f"{name} did not answer within {seconds:g} s"
                    self._report_failure(name, why)
            else:
                if self.scheduler.workers.get(name) is worker:
                    self.scheduler.restore(name)

        task = asyncio.create_task(reach())
        self._reaching.add(task)
        task.add_done_callback(self._reaching.discard)

    def remove(self, name: str) -> None:
        if name in self.scheduler.workers:
            worker = self.scheduler.remove(name)
            if isinstance(worker.engine, WorkerHandle):
                worker.engine.fail(f"{name} is lost")

    async def wake(self) -> None:
        """End a `report` that waits: the driver has messages."""
        self.urgent.set()

    async def report(self, messages: Sequence[Message] = ()) -> Report:
        """Return the news at the next urgent event, or after `REPORT_SECONDS`.

        Ray's asynchronous actors may begin calls in another order than they were made, so all
        messages of the driver come by this one.
        """
        for method, arguments in messages:
            getattr(self if hasattr(self, method) else self.scheduler, method)(*arguments)
        with suppress(TimeoutError):
            async with asyncio.timeout(REPORT_SECONDS):
                await self.urgent.wait()
        self.urgent.clear()
        moved, self._moved = self._moved, last_progress()
        events, self._events = self._events, Counter(self.scheduler.events)
        workers = self.scheduler.workers
        report = Report(
            self._moved != moved,
            {name: worker.load for name, worker in workers.items()},
            self._events - events,
            *(self.failures, self.excused),
        )
        self.failures, self.excused = [], []
        if self._server is not None:
            requests, self._requests = self._requests, Counter(self._server.requests)
            report.requests = self._requests - requests
            store = self._server.sessions
            report.sessions, store.changes = store.changes or {}, {}
        for worker, before in list(self._counted.items()):
            new = Counter({**worker.failed_turns, "turns": worker.turns, "tokens": worker.tokens})
            known = report.counts.get(worker.name, Counter())  # of a worker before it
            report.counts[worker.name] = known + (new - before)
            if worker.running or workers.get(worker.name) is worker:
                self._counted[worker] = new
            else:
                del self._counted[worker]
        return report


async def _free_port(host: str, port: int) -> int:
    """Return the port once it is free; 0 if another program has taken it."""
    for _ in range(10 if port else 0):
        try:
            listen(host, port).close()
            return port
        except InputError as error:
            why = error
            await asyncio.sleep(_PORT_SECONDS / 10)
    if port:
        logger.warning("the address of lost sessions is given up, for another port: %s", why)
    return 0
