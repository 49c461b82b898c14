"""Processes that sample from the driver's engines, each with a scheduler of its own.

One event loop can sample only about a thousand turns a second, and answer only a few hundred
requests, so a large run divides them among processes. Only the driver starts, checks and restarts
engines. Each process begins its sessions on its own share of the engines, and balances these
engines' loads as a single scheduler does. Choosing among all engines would be worse, because the
known loads are a moment old, so all processes would choose the same engines (`python -m
benchmarks.scale`).
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from turnwise.chat.session_store import REMEMBERED_NAMES, Place, SessionStore
from turnwise.config import Config
from turnwise.core.actor import ActorHandle, on_node
from turnwise.core.admission import Limits, Use
from turnwise.core.aio import is_cancelled, together
from turnwise.core.json_types import JsonObject
from turnwise.core.watchdog import made_progress
from turnwise.errors import (
    DeadlineError,
    EngineError,
    InputError,
    StepError,
    TurnwiseError,
    text_of,
)
from turnwise.serving.front_process import (
    LOST,
    REPORT_SECONDS,
    FrontProcess,
    MakeServer,
    OpenRunner,
    Order,
    Report,
)
from turnwise.serving.openai.address import EVERYWHERE
from turnwise.serving.routing import Worker
from turnwise.serving.scheduler import Scheduler

logger = logging.getLogger(__name__)

_MAX_CALLS = 1 << 14
"""Maximum number of calls at once in an actor: groups in flight, or sessions being opened."""
_OPEN_SECONDS = 10.0
_LIST_SECONDS = 2.0


@dataclass(slots=True, eq=False)
class Process:
    """One `FrontProcess` as its owner sees it, across restarts."""

    name: str
    actor: ActorHandle | None = None
    base_url: str = ""  # base URL of its server, also while it is down
    node: str = ""
    lost: "asyncio.Future[str]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """Set to the reason when the actor has died or hangs."""
    lost_sessions: list[str] = field(default_factory=list)
    """Names of the sessions that were lost when the process died."""
    busy: int = 0  # number of groups in flight, or of open sessions
    restarts: int = 0  # restarts since the process last finished anything
    given_up: bool = False
    suspects: set[str] = field(default_factory=set)
    """Workers on which a request failed and that have not been restored or removed since."""
    loads: dict[str, float] = field(default_factory=dict)
    uses: dict[str, Use] = field(default_factory=dict)
    """Use of each of the process's admissions (limits on trajectories in progress), by name, as of
    its last report."""
    limits: dict[str, Limits] = field(default_factory=dict)
    """Limits that were last sent to the process for its admissions, by name."""
    orders: list[Order] = field(default_factory=list)
    """Orders that the next call of `report` passes to the actor."""
    watching: "asyncio.Task[None] | None" = None


class FrontProcesses:
    """Owns the actors, and knows which process has each session.

    A process that dies is restarted at the same address. Its sessions are lost: requests to them
    are answered with 410. There is one process for each of `names`, by default
    `serving.session_processes` of them.
    """

    def __init__(
        self,
        config: Config,
        scheduler: Scheduler,
        process_class: type[FrontProcess] = FrontProcess,
        *,
        names: Sequence[str] | None = None,
        open_runner: OpenRunner | None = None,
        make_server: MakeServer | None = None,
    ) -> None:
        self.config = config.with_api_key()
        if names is None:
            names = [f"sessions-{index}" for index in range(config.serving.session_processes)]
        self.processes = [Process(name) for name in names]
        self.failure = ""  # reason why no process is left; "" while one is left
        self.changed = asyncio.Event()  # set when a process is up, or no process is left
        self.requests: Counter[str] = Counter()
        self.store = SessionStore.of(config.sampling, config.serving)
        self._scheduler = scheduler
        self._class = process_class
        self._open_runner, self._make_server = open_runner, make_server
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
        self._scheduler.subscribe(self.follow)
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
            *(self.config, self._open_runner, self._make_server),
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
        `serving.max_restarts` times; after that, give it up.

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
                        # The pause grows, because the needed resources may still be taken.
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
        """End a lost process and its sessions."""
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
        self._scheduler.add_remote_load(changes)

    def _tell(self, process: Process, method: str, *arguments: object) -> None:
        if process.actor is not None:
            if not process.orders:  # otherwise earlier orders have woken it
                process.actor.actor.wake.remote()
            process.orders.append((method, arguments))

    def _assign(self) -> None:
        up, names = self.up, [*self._scheduler.workers]
        for place, process in enumerate(up):
            few = [names[place % len(names)]] if names else []
            self._tell(process, "prefer", names[place :: len(up)] or few)

    def follow(self, change: str, name: str, *more: object) -> None:
        """Pass on a change of the scheduler's workers to all processes; see `Listener`."""
        if change == "occupancy":  # it changes limits, which processes get separately
            return
        if change == "add":
            self._workers[name] = self._scheduler.workers[name]
            more = (getattr(more[0], "actor", None),)
        for process in self.processes:
            if change == "restore" and name not in process.suspects:
                continue
            process.suspects.discard(name)
            if change in ("add", "remove"):  # a late report may be about its predecessor
                process.loads.pop(name, None)
            self._tell(process, change, name, *more)
        if change in ("add", "remove"):
            self._assign()

    async def open(self, name: str | None, *, training: bool, group: str) -> JsonObject | None:
        """Open a session in the process with the fewest open sessions, and return its description;
        None if no process can open it.

        Raises InputError when a session of that name is open or being opened, and DeadlineError
        when a process that may have opened it does not answer.
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
        """Return the base URL of the process that has a session; None if no process has it."""
        owner = self._owners.get(name)
        return None if owner is None else owner.base_url

    async def list_sessions(
        self, after: Place | None, limit: int
    ) -> list[tuple[Place, JsonObject]]:
        """Return a page of each process's sessions (see `SessionStore.page`); a process that does
        not answer is left out."""

        async def of(actor: ActorHandle) -> list[tuple[Place, JsonObject]]:
            with suppress(TurnwiseError):
                listed: list[tuple[Place, JsonObject]] = await actor.call(
                    *("list_sessions", after, limit),
                    what="list its sessions",
                    seconds=_LIST_SECONDS,
                )
                return listed
            return []

        actors = [process.actor for process in self.up if process.actor is not None]
        return [each for listed in await together(map(of, actors)) for each in listed]

    async def stop(self) -> None:
        with suppress(ValueError):
            self._scheduler.unsubscribe(self.follow)
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
