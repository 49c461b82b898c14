"""The processes that serve clients' sessions (`serving.session_processes`), seen from the driver.

One process answers a few hundred requests a second, however many engines there are. So the server
can hand the sessions that clients open (`POST /sessions`) to further processes: the session's base
URL is the address of one of them, which then talks to the engines directly. Requests that reach the
server itself under such a session's name are forwarded (`forward`).
"""

import asyncio
import logging
from collections import Counter, OrderedDict
from contextlib import suppress

from yarl import URL

from turnwise.config import Config
from turnwise.core.actor import ActorHandle, this_node
from turnwise.core.json_types import JsonObject
from turnwise.errors import EngineError, InputError, TurnwiseError
from turnwise.serving.openai.session_process import SessionProcess
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

    Example:
        processes = SessionProcesses(config, manager.scheduler)
        await processes.start()
        opened = await processes.open(None, training=False, group="")
        await processes.stop()
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
        self.base_urls: dict[str, str] = {}
        """Base URLs of the processes, by their names."""
        self._class = process_class
        self._owners: OrderedDict[str, Process] = OrderedDict()
        """Processes of the sessions that were opened, the oldest first."""

    def create(self, process: Process) -> ActorHandle:
        # An address that other nodes cannot reach must be on this one.
        everywhere = self.config.serving.host in ("0.0.0.0", "::")
        return ActorHandle.create(
            self._class,
            self.config,
            name=process.name,
            config=self.config,
            log=process.name,
            placement="SPREAD" if everywhere else this_node(),
            max_concurrency=_MAX_CALLS,
            failure=EngineError,
        )

    async def start_actor(self, process: Process, actor: ActorHandle) -> None:
        port = URL(self.base_urls.get(process.name, "http://localhost:0")).port
        lost = [name for name, owner in self._owners.items() if owner is process]
        seconds = self.config.engine.start_timeout
        self.base_urls[process.name] = await actor.call(
            "start", port, lost, what="start", seconds=seconds
        )
        process.busy = 0

    def take(self, process: Process, report: Report) -> None:
        super().take(process, report)
        self.requests.update(report.requests)
        process.busy = report.sessions
        if report.progressed:
            process.restarts = 0

    async def open(self, name: str | None, *, training: bool, group: str) -> JsonObject | None:
        """Open a session in the process with the fewest; describe it, with its URLs.

        Returns:
            None if no process answers.

        Raises:
            InputError: when a session of that name is open.
        """
        tried: set[Process] = set()
        while left := [process for process in self.up if process not in tried]:
            owner = self._owners.get(name or "")
            process = owner if owner in left else min(left, key=lambda each: each.busy)
            tried.add(process)
            assert process.actor is not None
            process.busy += 1
            try:
                opened: JsonObject = await process.actor.call(
                    *("open", name, training, group), what="open a session", seconds=_OPEN_SECONDS
                )
            except InputError:
                raise
            except TurnwiseError as error:
                logger.warning("a session is opened elsewhere: %s", error)
                continue
            self._owners[opened["id"]] = process
            if len(self._owners) > self.config.serving.known_sessions:
                self._owners.popitem(last=False)
            return opened
        return None

    def url_of(self, name: str) -> str | None:
        """Return the base URL of the process that has a session; None if none has it."""
        owner = self._owners.get(name)
        return None if owner is None else self.base_urls[owner.name]

    @property
    def count(self) -> int:
        """Number of open sessions in all processes."""
        return sum(process.busy for process in self.processes)

    async def list_sessions(self) -> list[JsonObject]:
        """Return summaries of all processes' sessions; a process that does not answer is left
        out."""

        async def of(actor: ActorHandle) -> list[JsonObject]:
            with suppress(TurnwiseError):
                what = "list its sessions"
                listed: list[JsonObject] = await actor.call(
                    "list_sessions", what=what, seconds=_LIST_SECONDS
                )
                return listed
            return []

        actors = [process.actor for process in self.up if process.actor is not None]
        return [each for listed in await asyncio.gather(*map(of, actors)) for each in listed]
