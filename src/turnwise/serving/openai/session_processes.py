"""The processes that serve clients' sessions (`serving.session_processes`), seen from the driver.

One process answers a few hundred requests a second, however many engines there are. So the server
can hand the sessions that clients open (`POST /sessions`) to further processes: the session's base
URL is the address of one of them, which then talks to the engines directly. Requests that reach the
server itself under such a session's name are forwarded (`forward`).
"""

import asyncio
import logging
from collections import Counter
from contextlib import suppress

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from yarl import URL

from turnwise.chat.session_store import REMEMBERED_NAMES, Place, SessionStore
from turnwise.config import Config
from turnwise.core.actor import ActorHandle, on_node
from turnwise.core.aio import together
from turnwise.core.json_types import JsonObject
from turnwise.errors import DeadlineError, EngineError, InputError, TurnwiseError
from turnwise.serving.openai.address import EVERYWHERE
from turnwise.serving.openai.session_process import LOST, SessionProcess
from turnwise.serving.scheduler import Scheduler
from turnwise.serving.scheduler_process import Report
from turnwise.serving.scheduler_processes import Process, SchedulerProcesses

logger = logging.getLogger(__name__)

_MAX_CALLS = 1 << 10
_OPEN_SECONDS = 10.0
_LIST_SECONDS = 2.0


class SessionProcesses(SchedulerProcesses):
    """The processes that serve sessions, and which one has each session.

    A process that dies is restarted at the same address. Its sessions are lost: requests to them
    are answered with 410.

    Args:
        scheduler: Scheduler of the engines.
        process_class: Class of the actors.
    """

    def __init__(
        self,
        config: Config,
        scheduler: Scheduler,
        process_class: type[SessionProcess] = SessionProcess,
    ) -> None:
        count = config.serving.session_processes
        super().__init__(config, scheduler, [f"sessions-{index}" for index in range(count)])
        self.requests: Counter[str] = Counter()
        """Counts of all processes' requests, by status or event."""
        self.store = SessionStore.from_config(config)
        """The sessions of the server itself, which refuses the names of ended sessions."""
        self._class = process_class
        self._places: dict[str, tuple[str, str]] = {}
        """Base URLs and nodes of the processes, by their names, also of those that are down."""
        self._owners: dict[str, Process] = {}
        """Processes of the open sessions, by name."""
        self._opening: set[str] = set()
        """Names of sessions that are being opened."""
        self._lost: dict[str, list[str]] = {}
        """Names of lost sessions, by the name of their process."""

    @property
    def base_urls(self) -> dict[str, str]:
        """Base URLs of the processes that are up, by their names."""
        return {process.name: self._places[process.name][0] for process in self.up}

    @property
    def count(self) -> int:
        """Number of open sessions in all processes."""
        return len(self._owners)

    def create(self, process: Process) -> ActorHandle:
        placement: NodeAffinitySchedulingStrategy | str = "SPREAD"
        if self.config.serving.host not in EVERYWHERE:
            placement = on_node()  # other nodes cannot listen at this address
        elif process.name in self._places:
            placement = on_node(self._places[process.name][1], soft=True)
        return ActorHandle.create(
            self._class,
            self.config,
            name=process.name,
            config=self.config,
            log=process.name,
            placement=placement,
            max_concurrency=_MAX_CALLS,
            failure=EngineError,
        )

    async def start_actor(self, process: Process, actor: ActorHandle) -> None:
        base_url, _ = self._places.get(process.name, ("http://localhost:0", ""))
        self._places[process.name] = await actor.call(
            *("start", URL(base_url).port, self._lost.get(process.name, [])),
            what="start",
            seconds=self.config.engine.start_timeout,
        )

    def take(self, process: Process, report: Report) -> None:
        super().take(process, report)
        self.requests.update(report.requests)
        for name, why in report.sessions.items():
            if not why:
                self._give(name, process)
            elif self._owners.get(name) is process:
                self._take_away(name)
                self.store.refuse([name], why)
        if report.progressed:
            process.restarts = 0

    def forget(self, process: Process) -> None:
        super().forget(process)
        names = [name for name, owner in self._owners.items() if owner is process]
        for name in names:
            self._take_away(name)
        self.store.refuse(names, LOST)
        known = self._lost.setdefault(process.name, [])
        known += names
        del known[:-REMEMBERED_NAMES]

    async def open(self, name: str | None, *, training: bool, group: str) -> JsonObject | None:
        """Open a session in the process with the fewest; describe it, with its URLs.

        Returns:
            None if no process is up.

        Raises:
            InputError: when a session of that name is open, or is being opened.
            DeadlineError: when a process does not answer, which may have opened it.
        """
        if name is not None and name in self._opening:
            raise InputError(f"the session {name} is being opened")
        names, dead = {name} if name is not None else set[str](), set[Process]()
        self._opening |= names
        try:
            while up := [process for process in self.up if process not in dead]:
                process = self._owners.get(name or "") or min(up, key=lambda each: each.busy)
                try:
                    return await self._open_in(process, name, training, group)
                except DeadlineError:
                    if name is not None:  # it may be open there
                        raise
                except EngineError as error:
                    logger.warning("a session is opened in another process: %s", error)
                dead.add(process)
            return None
        finally:
            self._opening -= names

    async def _open_in(
        self, process: Process, name: str | None, training: bool, group: str
    ) -> JsonObject:
        """Open a session in a process; raise `EngineError` if the process is dead."""
        assert process.actor is not None
        lost = process.lost
        process.busy += 1
        try:
            opened: JsonObject = await process.actor.call(
                *("open", name, training, group), what="open a session", seconds=_OPEN_SECONDS
            )
        finally:
            process.busy -= 1
        if lost.done():
            raise EngineError(f"{process.name} died")
        self._give(opened["id"], process)
        return opened

    def _give(self, name: str, process: Process) -> None:
        self._take_away(name)
        self._owners[name] = process
        process.busy += 1

    def _take_away(self, name: str) -> None:
        if (owner := self._owners.pop(name, None)) is not None:
            owner.busy -= 1

    def place_of(self, name: str) -> tuple[str, "asyncio.Future[str]"] | None:
        """Return the base URL of the process that has a session, and what is set when it is lost;
        None if none has it."""
        owner = self._owners.get(name)
        return None if owner is None else (self._places[owner.name][0], owner.lost)

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
