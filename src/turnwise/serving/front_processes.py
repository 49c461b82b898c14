"""Processes that sample from the driver's engines, each with a scheduler of its own.

One event loop samples about a thousand turns a second, and answers a few hundred requests. The
driver remains the only one that starts, checks and restarts engines. Each process has some of them
for the sessions that it begins, and balances them as one scheduler does. Choosing among all engines
by loads that are a moment old would be worse: all processes would choose the same ones (`python -m
benchmarks.scale`).
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import ray
from ray.actor import ActorHandle as RayActor
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from turnwise.chat.session_store import REMEMBERED_NAMES, Place, SessionStore
from turnwise.config import Config, SamplingConfig
from turnwise.core import logs
from turnwise.core.actor import ActorHandle, on_node
from turnwise.core.aio import is_cancelled, set_within, together
from turnwise.core.json_types import JsonObject
from turnwise.core.optional import Foreign
from turnwise.core.watchdog import last_progress, made_progress
from turnwise.engine.protocol import Engine
from turnwise.errors import (
    DeadlineError,
    EngineError,
    InputError,
    StepError,
    TurnwiseError,
    text_of,
)
from turnwise.serving.openai import import_server
from turnwise.serving.openai.address import EVERYWHERE, listen, with_api_key
from turnwise.serving.routing import Supervisor, Worker
from turnwise.serving.scheduler import Scheduler
from turnwise.serving.worker_handle import WorkerHandle

if TYPE_CHECKING:
    from turnwise.serving.openai import OpenAIServer

logger = logging.getLogger(__name__)

Order = tuple[str, tuple[object, ...]]
"""A method of a `FrontProcess`, or of its scheduler, that the driver calls, and its arguments."""
_OWN_ORDERS = frozenset({"add", "restore", "remove"})  # methods of the process; others: scheduler's
REPORT_SECONDS = 0.25  # time between two reports of a process that has nothing urgent
LOST = "was lost when its process died"  # end of a session, after "the session NAME"
_REACH_SECONDS = 1.0  # time between two attempts to reach a worker that is alive
_PORT_SECONDS = 3.0  # time in which the port of a process that died becomes free
_MAX_CALLS = 1 << 14
"""Largest number of calls at once in an actor: groups in flight, or sessions being opened."""
_OPEN_SECONDS = 10.0
_LIST_SECONDS = 2.0

RunWithSampling = Callable[[Foreign, SamplingConfig, str, bool], Awaitable[object]]
"""Runs the group of a problem, by a sampling configuration, under a unique tag; if the last is
true, after all others that wait."""
OpenRunner = Callable[[Config, Scheduler], AbstractAsyncContextManager[RunWithSampling]]
"""Makes a runner of groups, and what serves its agents; see `rollouts.processes`."""


@dataclass(slots=True)
class Report:
    """News of a process since its last report."""

    progressed: bool = False  # whether a wait ended or tokens arrived
    loads: dict[str, float] = field(default_factory=dict)
    """Loads by the process of the workers that have any."""
    events: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[str, str]] = field(default_factory=list)
    """Workers on which a request failed, and why: each waits for `restore` or `remove`."""
    excused: list[str] = field(default_factory=list)  # workers whose death a single request caused
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    """Counts of each worker that did anything: turns, tokens, and its failed turns by outcome."""
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
        self._run_group: RunWithSampling | None = None
        self._stack = AsyncExitStack()
        self._server: OpenAIServer | None = None
        self._news = Report()
        self._urgent = asyncio.Event()  # set when something is to be reported at once
        self._counted: dict[Worker, dict[str, int]] = {}
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

    async def run_group(
        self, problem: Foreign, sampling: SamplingConfig, tag: str, last: bool
    ) -> object:
        assert self._run_group is not None
        return await self._run_group(problem, sampling, tag, last)

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
            self._news.excused.append(name)
            self._urgent.set()

        supervisor = Supervisor(partial(self._report_failure, name), excuse_death)
        added = self.scheduler.add(name, self._attach(name, worker), supervisor)
        self._counted[added] = {"turns": 0, "tokens": 0}

    def _attach(self, name: str, worker: RayActor) -> Engine:
        return WorkerHandle.attach(worker, name, self.config)

    def _report_failure(self, name: str, why: str) -> None:
        self._news.failures.append((name, why))
        self._urgent.set()

    def restore(self, name: str) -> None:
        """Use a worker again, once this process can reach it; report it as long as it cannot.

        A worker that lives but cannot be reached from here goes through a loop: the report makes
        the supervisor check it, then the driver's scheduler restores it, which calls this again.
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
        """End a `report` that waits: the driver has orders."""
        self._urgent.set()

    async def report(self, orders: Sequence[Order] = ()) -> Report:
        """Return the news at the next urgent event, or after `REPORT_SECONDS`.

        Ray's asynchronous actors may begin calls in another order than they were made, so all
        orders of the driver come by this one.
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
                known = report.counts.get(worker.name, Counter())  # of a worker before it
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
        logger.warning("the address of lost sessions is given up, for another port: %s", why)
    return 0


@dataclass(slots=True, eq=False)
class Process:
    """One actor as its owner sees it, across restarts."""

    name: str
    actor: ActorHandle | None = None
    base_url: str = ""  # base URL of its server, also while it is down
    node: str = ""
    lost: "asyncio.Future[str]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """Set to the reason when the actor died or hangs."""
    lost_sessions: list[str] = field(default_factory=list)
    """Names of the sessions that died with it."""
    busy: int = 0  # number of groups in flight, or of open sessions
    restarts: int = 0  # restarts since it last finished anything
    given_up: bool = False
    suspects: set[str] = field(default_factory=set)
    """Workers on which a request failed, and which were not restored or removed since."""
    loads: dict[str, float] = field(default_factory=dict)
    orders: list[Order] = field(default_factory=list)
    """Orders that go to the actor with the request for its next report."""
    watching: "asyncio.Task[None] | None" = None


class FrontProcesses:
    """The owner of such actors, which knows who has each session.

    A process that dies is restarted at the same address. Its sessions are lost: requests to them
    are answered with 410. By default, of `names`, there are `serving.session_processes`.
    """

    def __init__(
        self,
        config: Config,
        scheduler: Scheduler,
        process_class: type[FrontProcess] = FrontProcess,
        *,
        names: Sequence[str] | None = None,
        open_runner: OpenRunner | None = None,
    ) -> None:
        self.config = with_api_key(config)
        if names is None:
            names = [f"sessions-{index}" for index in range(config.serving.session_processes)]
        self.processes = [Process(name) for name in names]
        self.failure = ""  # reason why no process is left; "" while one is
        self.changed = asyncio.Event()  # set when a process is up, or no process is left
        self.requests: Counter[str] = Counter()
        self.store = SessionStore.from_config(config)
        self._scheduler = scheduler
        self._class = process_class
        self._open_runner = open_runner
        self._workers: dict[str, Worker] = {}  # the last worker of each name, removed or not
        self._owners: dict[str, Process] = {}  # processes of the open sessions, by name
        self._opening: set[str] = set()

    @property
    def up(self) -> list[Process]:
        return [process for process in self.processes if process.actor is not None]

    @property
    def base_urls(self) -> dict[str, str]:
        """Base URLs of the processes that are up, by their names."""
        return {process.name: process.base_url for process in self.up}

    @property
    def count(self) -> int:
        return len(self._owners)

    async def start(self) -> None:
        """Start all processes; if one fails or does not start in time, end them all."""
        self._scheduler.lead(self.follow)
        try:
            await together(map(self._start, self.processes))
        except BaseException:
            await self.stop()
            raise

    def create(self, process: Process) -> ActorHandle:
        """Start the actor of a process, without waiting for it."""
        placement: NodeAffinitySchedulingStrategy | str = "SPREAD"
        if self._open_runner is None and self.config.serving.host not in EVERYWHERE:
            placement = on_node()  # other nodes cannot listen at this address
        elif process.base_url:
            placement = on_node(process.node, soft=True)
        return ActorHandle.create(
            self._class,
            *(self.config, self._open_runner),
            name=process.name,
            config=self.config,
            log=process.name,
            placement=placement,
            max_concurrency=_MAX_CALLS,
            failure=EngineError if self._open_runner is None else StepError,
        )

    async def _start(self, process: Process) -> None:
        actor = self.create(process)
        try:
            port = urlsplit(process.base_url).port or 0
            process.base_url, process.node = await actor.call(
                *("start", port, process.lost_sessions),
                what="start",
                seconds=self.config.engine.start_timeout,
            )
            process.lost = asyncio.get_running_loop().create_future()
            process.actor, process.orders = actor, []
            for worker in self._scheduler.workers.values():
                self._tell(process, "add", worker.name, getattr(worker.engine, "actor", None))
            self._assign()
        except BaseException:
            process.actor = None
            actor.kill()
            raise
        if process.watching is None:
            process.watching = asyncio.create_task(self._watch(process))
        self.changed.set()

    async def _watch(self, process: Process) -> None:
        """Receive a process's reports; when it dies or hangs, start it again, up to
        `serving.max_restarts` times, or give it up.

        Any failure here (Ray, a lack of threads, a bug) counts as an attempt, because groups that
        wait for a process must not wait for ever.
        """
        seconds = REPORT_SECONDS + self.config.serving.health_timeout
        actor, limit, why = process.actor, self.config.serving.max_restarts, ""
        try:
            while actor is not None or process.restarts < limit:
                try:
                    if actor is None:
                        process.restarts += 1
                        # Seconds; what it needs may still be taken.
                        await asyncio.sleep(process.restarts - 1)
                        await self._start(process)
                        actor = process.actor
                    else:
                        orders, process.orders = process.orders, []
                        what = "report its health"
                        report = await actor.call("report", orders, what=what, seconds=seconds)
                        self._take(process, report)
                except Exception as error:
                    why = text_of(error)
                    if actor is None:
                        unexpected = not isinstance(error, TurnwiseError)
                        logger.info("%s does not start", process.name, exc_info=unexpected)
                    else:
                        self._lose(process, actor, why)
                        actor = None
            why = f"{process.name} was restarted {limit} times; the last: {why}"
        finally:
            if actor is None and not is_cancelled():
                logger.error(why)
                process.given_up = True
                if all(one.given_up for one in self.processes):
                    self.failure = why
                self.changed.set()

    def _lose(self, process: Process, actor: ActorHandle, why: str) -> None:
        """End what is left of a process, and its sessions."""
        process.actor = None
        if not process.lost.done():
            process.lost.set_result(why)
        try:
            actor.kill()
            self._note_loads(process, {})
            names = [name for name, owner in self._owners.items() if owner is process]
            for name in names:
                self._take_away(name)
            self.store.refuse(names, LOST)
            process.lost_sessions += names
            del process.lost_sessions[:-REMEMBERED_NAMES]
            self._assign()
        except Exception:
            logger.exception("%s could not be ended", process.name)
        logger.warning("%s is restarted: %s", process.name, why)

    def _take(self, process: Process, report: Report) -> None:
        """Add what a process reports to the driver's counts."""
        if report.progressed:
            made_progress()
            if self._open_runner is None:
                process.restarts = 0
        self._note_loads(process, report.loads)
        self._scheduler.events.update(report.events)
        for name, counts in report.counts.items():
            if (worker := self._workers.get(name)) is not None:
                worker.turns += counts.pop("turns", 0)
                worker.tokens += counts.pop("tokens", 0)
                worker.failed_turns.update(counts)
        for name in report.excused:
            if (worker := self._workers.get(name)) is not None and worker.supervisor is not None:
                worker.supervisor.excuse_death()
        for name, why in report.failures:
            process.suspects.add(name)
            worker = self._scheduler.workers.get(name)
            if worker is not None and worker.supervisor is not None:
                worker.supervisor.report_failure(why)
        self.requests.update(report.requests)
        for name, why in report.sessions.items():
            if not why:
                self._give(name, process)
            elif self._owners.get(name) is process:
                self._take_away(name)
                self.store.refuse([name], why)

    def _note_loads(self, process: Process, loads: dict[str, float]) -> None:
        before, process.loads = process.loads, loads
        names = before.keys() | loads.keys()
        changes = {name: loads.get(name, 0.0) - before.get(name, 0.0) for name in names}
        self._scheduler.note_elsewhere(changes)

    def _tell(self, process: Process, method: str, *arguments: object) -> None:
        if process.actor is not None:
            if not process.orders:  # else it has been woken for those before
                process.actor.actor.wake.remote()
            process.orders.append((method, arguments))

    def _assign(self) -> None:
        up, names = self.up, [*self._scheduler.workers]
        for place, process in enumerate(up):
            few = [names[place % len(names)]] if names else []
            self._tell(process, "prefer", names[place :: len(up)] or few)

    def follow(self, change: str, name: str, *more: object) -> None:
        """Pass on a change of the scheduler's workers to all processes; see `Follower`."""
        if change == "add":
            self._workers[name] = self._scheduler.workers[name]
            more = (getattr(more[0], "actor", None),)
        for process in self.processes:
            if change == "restore" and name not in process.suspects:
                continue
            process.suspects.discard(name)
            if change in ("add", "remove"):  # a report that was on its way may name one before it
                process.loads.pop(name, None)
            self._tell(process, change, name, *more)
        if change in ("add", "remove"):
            self._assign()

    async def open(self, name: str | None, *, training: bool, group: str) -> JsonObject | None:
        """Open a session in the process with the fewest, and describe it; None if none is up.

        InputError when one of that name is open, or is being opened; DeadlineError when a process
        does not answer, which may have opened it.
        """
        if name in self._opening:
            raise InputError(f"the session {name} is being opened")
        names = {name} if name is not None else set[str]()
        owner, free = self._owners.get(name or ""), sorted(self.up, key=lambda each: each.busy)
        self._opening |= names
        try:
            for process in free if owner is None else [owner, *free]:
                if (actor := process.actor) is None:  # it died meanwhile
                    continue
                lost = process.lost
                process.busy += 1
                try:
                    opened: JsonObject = await actor.call(
                        *("open", name, training, group),
                        what="open a session",
                        seconds=_OPEN_SECONDS,
                    )
                    if lost.done():
                        raise EngineError(f"{process.name} died")
                    self._give(opened["id"], process)
                    return opened
                except DeadlineError:
                    if name is not None:  # it may be open there
                        raise
                except EngineError as error:
                    logger.warning("a session is opened in another process: %s", error)
                finally:
                    process.busy -= 1
            return None
        finally:
            self._opening -= names

    def _give(self, name: str, process: Process) -> None:
        self._take_away(name)
        self._owners[name] = process
        process.busy += 1

    def _take_away(self, name: str) -> None:
        if (owner := self._owners.pop(name, None)) is not None:
            owner.busy -= 1

    def base_url_of(self, name: str) -> str | None:
        """Return the base URL of the process that has a session; None if none has it."""
        owner = self._owners.get(name)
        return None if owner is None else owner.base_url

    async def list_sessions(self, after: Place | None, most: int) -> list[tuple[Place, JsonObject]]:
        """Return a page of each process's sessions (see `SessionStore.page`); a process that does
        not answer is left out."""

        async def of(actor: ActorHandle) -> list[tuple[Place, JsonObject]]:
            with suppress(TurnwiseError):
                listed: list[tuple[Place, JsonObject]] = await actor.call(
                    *("list_sessions", after, most), what="list its sessions", seconds=_LIST_SECONDS
                )
                return listed
            return []

        actors = [process.actor for process in self.up if process.actor is not None]
        return [each for listed in await together(map(of, actors)) for each in listed]

    async def stop(self) -> None:
        with suppress(ValueError):
            self._scheduler.leave(self.follow)
        actors = [p.actor for p in self.processes if p.actor is not None]
        for process in self.processes:
            process.actor = None
            if process.watching is not None:
                process.watching.cancel()
                process.watching = None

        async def stop(actor: ActorHandle) -> None:
            with suppress(TurnwiseError):
                await actor.call("stop", what="stop", seconds=5.0)
            actor.kill()

        await asyncio.gather(*map(stop, actors))
