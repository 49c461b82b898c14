"""An actor that samples from the driver's engines with a scheduler of its own: it runs groups, or
answers HTTP requests of sessions. `front_processes` has the driver's side.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import ray
from ray.actor import ActorHandle as RayActor

from turnwise.chat.session_store import Place, SessionStore
from turnwise.config import Config, SamplingConfig
from turnwise.core import logs
from turnwise.core.admission import Admission, Limits, Priority, Use
from turnwise.core.aio import set_within
from turnwise.core.json_types import JsonObject
from turnwise.core.optional import Foreign
from turnwise.core.watchdog import last_progress
from turnwise.engine.protocol import Engine
from turnwise.errors import (
    DeadlineError,
    EngineError,
    InputError,
)
from turnwise.serving.openai.address import listen
from turnwise.serving.routing import Supervisor, Worker
from turnwise.serving.scheduler import Scheduler
from turnwise.serving.worker_handle import WorkerHandle

logger = logging.getLogger(__name__)

Order = tuple[str, tuple[object, ...]]
"""A call that the driver orders: the name of a method of a `FrontProcess` or of its scheduler, and
the arguments."""
_OWN_ORDERS = frozenset({"add", "restore", "remove", "limit"})
"""Orders that are methods of the process; all other orders are methods of its scheduler."""
REPORT_SECONDS = 0.25  # time between two reports of a process that has nothing urgent
LOST = "was lost when its process died"  # follows "the session NAME" in errors
_REACH_SECONDS = 1.0  # time between two attempts to reach a worker that is alive
_PORT_SECONDS = 3.0  # time in which the port of a process that died becomes free

RunWithSampling = Callable[[Foreign, SamplingConfig, str, Priority], Awaitable[object]]
"""Runs the group of a problem, with a sampling configuration, under a unique tag."""


class GroupRunner(NamedTuple):
    """The runner of groups in a process, and its admissions, which limit the trajectories in
    progress."""

    run: RunWithSampling
    admissions: Mapping[str, Admission]
    """Admissions by the names under which the driver divides their limits among processes."""


class SessionServer(Protocol):
    """The HTTP server of a process: `openai.server.OpenAIServer`."""

    sessions: SessionStore
    requests: Counter[str]

    async def start(self) -> str:
        """Listen, and return the base URL."""

    async def stop(self) -> None: ...

    def urls(self, session_id: str) -> JsonObject:
        """Return the base URLs of a session."""


MakeServer = Callable[[Config, Scheduler, int], Awaitable[SessionServer]]
"""Makes the server for a port."""
OpenRunner = Callable[[Config, Scheduler], AbstractAsyncContextManager[GroupRunner]]
"""Makes a runner of groups, and the server of its agents; see `rollouts.processes`."""


@dataclass(slots=True)
class Report:
    """News of a process since its last report."""

    progressed: bool = False  # whether a wait ended or tokens arrived
    loads: dict[str, float] = field(default_factory=dict)
    """Load from this process on each worker, by name; workers without load are left out."""
    events: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[str, str]] = field(default_factory=list)
    """Workers on which a request failed, with the reasons; each worker waits for `restore` or
    `remove`."""
    excused: list[str] = field(default_factory=list)  # workers whose death a single request caused
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    """Counts of each worker that did anything: turns, tokens, and its failed turns by outcome."""
    sessions: dict[str, str] = field(default_factory=dict)
    """For each client session that began or ended, by name: the reason of its end, or "" if it
    began."""
    requests: Counter[str] = field(default_factory=Counter)
    uses: dict[str, Use] = field(default_factory=dict)
    """Use of each of the runner's admissions, by name."""


class FrontProcess:
    """An actor's class: a scheduler, and a runner of groups or a server."""

    def __init__(
        self,
        config: Config,
        open_runner: OpenRunner | None = None,
        make_server: MakeServer | None = None,
    ) -> None:
        self.config = config
        seconds = config.engine.start_timeout + config.engine.request_timeout
        self.scheduler = Scheduler(config.serving, seconds)
        self._open_runner, self._make_server = open_runner, make_server
        self._runner: GroupRunner | None = None
        self._stack = AsyncExitStack()
        self._server: SessionServer | None = None
        self._news = Report()
        self._urgent = asyncio.Event()  # set when something is to be reported at once
        self._counted: dict[Worker, dict[str, int]] = {}
        """Reported counts of each worker, including removed workers whose turns are not over."""
        self._events: Counter[str] = Counter()
        self._requests: Counter[str] = Counter()
        self._moved = 0.0
        self._reaching: set[asyncio.Task[None]] = set()

    async def start(self, port: int, lost: Sequence[str]) -> tuple[str, str]:
        """Make the runner, or start the server at `port`, once that port is free; return the base
        URL and the id of the node. Requests to `lost`, the sessions of a previous process, are
        refused.
        """
        logs.redirect_output()
        base_url = ""
        if self._open_runner is not None:
            await self.open_runner(self._open_runner)
        if self._make_server is not None:
            port = await _free_port(self.config.serving.host, port)
            server = await self._make_server(self.config, self.scheduler, port)
            base_url = await self.serve(server, lost)
        return base_url, ray.get_runtime_context().get_node_id()

    async def open_runner(self, make: OpenRunner) -> None:
        opening = make(self.config, self.scheduler)
        self._runner = await self._stack.enter_async_context(opening)
        for admission in self._runner.admissions.values():
            admission.limits = Limits(0, 0, 0)  # until the driver sends limits
            admission.on_wait = self._urgent.set

    async def serve(self, server: SessionServer, lost: Sequence[str]) -> str:
        self._server = server
        self._stack.push_async_callback(server.stop)
        server.sessions.refuse(lost, LOST)
        server.sessions.changes = {}
        return await server.start()

    async def run_group(
        self, problem: Foreign, sampling: SamplingConfig, tag: str, priority: Priority
    ) -> object:
        assert self._runner is not None
        return await self._runner.run(problem, sampling, tag, priority)

    async def open(self, name: str | None, training: bool, group: str) -> JsonObject:
        assert self._server is not None
        session = self._server.sessions.open(name, training=training, group=group)
        return {**session.describe(), **self._server.urls(session.id)}

    async def list_sessions(
        self, after: Place | None, limit: int
    ) -> list[tuple[Place, JsonObject]]:
        """Return a page of the sessions of clients; see `SessionStore.page`."""
        assert self._server is not None
        return self._server.sessions.page(after, limit)

    async def stop(self) -> bool:
        """End the server or the runner, and return True; the owner kills the actor."""
        await self._stack.aclose()
        return True

    # Orders of the driver, in addition to the scheduler's own methods; see `Listener`.

    def limit(self, name: str, limits: Limits) -> None:
        assert self._runner is not None
        self._runner.admissions[name].limits = limits

    def add(self, name: str, worker: RayActor) -> None:
        self.remove(name)

        def excuse_death() -> None:
            self._news.excused.append(name)
            self._urgent.set()

        supervisor = Supervisor(partial(self._report_failure, name), excuse_death)
        added = self.scheduler.add(name, self._attach(name, worker), supervisor)
        self._counted[added] = {"turns": 0, "tokens": 0}

    def _attach(self, name: str, worker: RayActor) -> Engine:
        return WorkerHandle.attach(worker, name, self.config.engine.request_timeout)

    def _report_failure(self, name: str, why: str) -> None:
        self._news.failures.append((name, why))
        self._urgent.set()

    def restore(self, name: str) -> None:
        """Use a worker again if this process can reach it; otherwise report a failure.

        For a worker that is alive but cannot be reached from here, this repeats: the report makes
        the supervisor check the worker, then the driver's scheduler restores the worker, which
        calls this method again.
        """
        if (worker := self.scheduler.workers.get(name)) is None:
            return
        seconds = self.config.serving.health_timeout

        async def reach() -> None:
            why = ""
            try:
                async with asyncio.timeout(seconds):
                    await worker.engine.check_health()
            except (EngineError, DeadlineError, TimeoutError) as error:
                why = str(error) or f"{name} did not answer within {seconds:g} s"
            if self.scheduler.workers.get(name) is not worker:
                return
            if not why:
                self.scheduler.restore(name)
                return
            self.scheduler.suspend(name)
            await asyncio.sleep(_REACH_SECONDS)
            self._report_failure(name, why)

        task = asyncio.create_task(reach())
        self._reaching.add(task)
        task.add_done_callback(self._reaching.discard)

    def remove(self, name: str, lost: bool = True) -> None:
        if name in self.scheduler.workers:
            worker = self.scheduler.remove(name, lost=lost)
            if lost and isinstance(worker.engine, WorkerHandle):
                worker.engine.fail(f"{name} is lost")

    async def wake(self) -> None:
        """End a waiting `report`, because the driver has orders."""
        self._urgent.set()

    async def report(self, orders: Sequence[Order] = ()) -> Report:
        """Return the news at the next urgent event, or after `REPORT_SECONDS`.

        Ray's asynchronous actors may begin calls in a different order than the calls were made, so
        all orders of the driver are arguments of this call.
        """
        for method, arguments in orders:
            getattr(self if method in _OWN_ORDERS else self.scheduler, method)(*arguments)
        await set_within(self._urgent, REPORT_SECONDS)
        self._urgent.clear()
        report, self._news = self._news, Report()
        moved, self._moved = self._moved, last_progress()
        report.progressed = self._moved != moved
        events, self._events = self._events, Counter(self.scheduler.events)
        report.events = self._events - events
        if self._runner is not None:
            report.uses = {name: one.use for name, one in self._runner.admissions.items()}
        workers = self.scheduler.workers
        report.loads = {name: worker.load for name, worker in workers.items() if worker.load}
        if self._server is not None:
            requests, self._requests = self._requests, Counter(self._server.requests)
            report.requests = self._requests - requests
            store = self._server.sessions
            report.sessions, store.changes = store.changes or {}, {}
        for worker, before in list(self._counted.items()):
            new = {"turns": worker.turns, "tokens": worker.tokens, **worker.failed_turns}
            if new != before:
                known = report.counts.get(worker.name, Counter())  # of its predecessor
                report.counts[worker.name] = known + (Counter(new) - Counter(before))
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
        logger.warning("the port of the lost sessions is taken, and another one is used: %s", why)
    return 0
