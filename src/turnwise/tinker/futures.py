"""Requests that take a while: their results by request id, and each model's requests in order.

Ids are functions of the request, so a client that sends one again, because its connection broke,
gets the result of the first and runs nothing twice. A model's requests run in the order of their
positions, in whatever order they arrive: those after a gap wait until it is filled, or fail once no
client would still fill it. A result is kept until it was sent, or its session ends; a client with
too much in progress has to wait, so what all of them leave here is limited.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

from turnwise.core.json_types import JsonObject
from turnwise.errors import (
    InputError,
    TrajectoryError,
    TurnwiseError,
    ordinary_error,
    text_of,
    visible,
)

logger = logging.getLogger(__name__)

WAIT_SECONDS = 20.0
"""Time that a request for a result waits for it; clients give up after 45 s and ask again."""
GAP_SECONDS = 360.0
"""Time that requests wait for one before them; clients try to send one for 5 minutes."""
_MOST = 2 * 2**30
"""Bytes of requests in progress and results that were not sent. A client with more than its part,
an equal one and at most a quarter, has to wait."""
_MOST_SENT = 128 * 2**20
"""Bytes of results that were sent but may not have arrived; the oldest are dropped."""
SMALLEST = 4096
"""Bytes that every request counts, for its tasks and names."""


class Missing(InputError):
    """Something that does not exist for this client, or does not any more."""


class Gone(InputError):
    """A result that is not kept, or a session that has ended; a client may begin again."""


class Busy(TurnwiseError):
    """A request for which there is no room now: its client waits, and sends it again."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The result of a request: plain values, or a message for which the client asks."""

    tree: JsonObject = field(default_factory=dict)
    message: bytes | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """The error of a request, in the protocol's form."""

    error: str
    category: Literal["user", "server", "unknown"]
    """Whether the request is wrong, or the server failed, or nobody knows."""

    @classmethod
    def of(cls, error: Exception) -> "Failure":
        if isinstance(error, InputError | TrajectoryError):
            return cls(visible(str(error)), "user")
        if isinstance(error, TurnwiseError):
            return cls(visible(str(error)), "server")
        logger.error("a request of a Tinker client failed", exc_info=error)
        return cls(f"the server has a fault: {visible(text_of(error))}", "unknown")


Outcome = Reply | Failure
Work = Callable[[], Awaitable[Reply]]


@dataclass(slots=True, eq=False)
class _Entry:
    owner: str
    size: int
    """Bytes of the request, and once it has ended of its result."""
    outcome: asyncio.Future[Outcome]
    task: asyncio.Task[None] | None = None


class Futures:
    """The requests in progress, and the results that are kept."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._sent: dict[str, int] = {}
        """Sizes of the results that were sent, the oldest first; all else counts in `_held`."""
        self._sent_size = 0
        self._held = Counter[str]()
        """Bytes by sessions, with whose ids those of requests begin."""

    def begin(self, request_id: str, owner: str, work: Work, size: int = 0) -> None:
        """Run a request of some bytes, unless it runs or has run already."""
        if request_id not in self._entries:
            entry = self.promise(request_id, owner, size)
            entry.task = asyncio.create_task(self.run(request_id, work))

    def promise(self, request_id: str, owner: str, size: int = 0) -> _Entry:
        """Add a request of some bytes that `Turns` run later.

        Raises:
            Busy: when its client has too much in progress.
        """
        held = self._held[session_of(request_id)]
        if held > _MOST // max(4, len(self._held)):
            raise Busy(
                f"{held >> 20:,} MB of this session's requests are in progress, or have results "
                "that were not fetched: wait for some of them"
            )
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        entry = self._entries[request_id] = _Entry(owner, SMALLEST + size, outcome)
        self._held[session_of(request_id)] += entry.size
        return entry

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    async def run(self, request_id: str, work: Work) -> None:
        """Run a promised request to its end; raises nothing."""
        if (entry := self._entries.get(request_id)) is None:
            return
        found: Reply | BaseException
        try:
            found = await work()
        except (Exception, asyncio.CancelledError) as error:
            found = error
        if entry.outcome.done():  # it was dropped meanwhile
            return
        outcome = found if isinstance(found, Reply) else Failure.of(ordinary_error(found))
        entry.outcome.set_result(outcome)
        size = SMALLEST + len(outcome.message or b"") if isinstance(outcome, Reply) else SMALLEST
        self._held[session_of(request_id)] += size - entry.size
        entry.size = size

    async def retrieve(self, request_id: str, owner: str, seconds: float) -> Outcome | None:
        """Return a request's outcome; None if it has none within `seconds`.

        Raises:
            Gone: when there is no such request of this owner, or its result is not kept any more.
        """
        gone = Gone(f"there is no result of a request {visible(request_id)[:100]}")
        entry = self._entries.get(request_id)
        if entry is None or entry.owner != owner:
            raise gone
        done, _ = await asyncio.wait([entry.outcome], timeout=seconds)
        if not done:
            return None
        if entry.outcome.cancelled():
            raise gone
        if request_id in self._entries and request_id not in self._sent:
            self._release(request_id, entry)
            self._sent[request_id] = entry.size
            self._sent_size += entry.size
            while self._sent_size > _MOST_SENT and len(self._sent) > 1:
                self._drop(next(iter(self._sent)))
        return entry.outcome.result()

    def cancel(self, request_id: str, owner: str) -> None:
        """End and drop a request for which nobody waits, such as a sample."""
        entry = self._entries.get(request_id)
        if entry is not None and entry.owner == owner and entry.task is not None:
            self._drop(request_id)

    def forget(self, beginning: str) -> None:
        """End and drop the requests whose ids begin in this way, those of a session."""
        for name in [each for each in self._entries if each.startswith(beginning)]:
            self._drop(name)

    def _drop(self, request_id: str) -> None:
        entry = self._entries.pop(request_id)
        if (size := self._sent.pop(request_id, None)) is None:
            self._release(request_id, entry)
        else:
            self._sent_size -= size
        entry.outcome.cancel()  # no effect on one that has ended
        if entry.task is not None:
            entry.task.cancel()

    def _release(self, request_id: str, entry: _Entry) -> None:
        session = session_of(request_id)
        self._held[session] -= entry.size
        if self._held[session] <= 0:
            del self._held[session]


def session_of(request_id: str) -> str:
    """Return the id of the session with which that of a request begins."""
    return request_id.partition(":")[0]


class Turns:
    """The requests of one model, which run one after the other, by their positions from 1."""

    def __init__(self) -> None:
        self.next = 1
        """Position of the request that runs, or that is waited for."""
        self.lost = 0
        """Position of a request that never came, while those that waited for it fail; else 0."""
        self._waiting: dict[int, Callable[[], Awaitable[None]]] = {}
        self._come = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def add(self, position: int, run: Callable[[], Awaitable[None]]) -> None:
        """Add a request, whose `run` raises nothing. One of a position that was taken is dropped:
        the client sent it twice."""
        if position < self.next or position in self._waiting:
            return
        self._waiting[position] = run
        self._come.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while self._waiting:
            try:
                async with asyncio.timeout(GAP_SECONDS):
                    while self.next not in self._waiting:
                        self._come.clear()
                        await self._come.wait()
            except TimeoutError:
                await self._fail_waiting()
                continue
            await self._waiting[self.next]()
            self._waiting.pop(self.next, None)
            self.next += 1

    async def _fail_waiting(self) -> None:
        """Let the requests after a gap fail, and go on behind them."""
        waiting, self._waiting = sorted(self._waiting.items()), {}
        self.lost, self.next = self.next, waiting[-1][0] + 1
        for _, run in waiting:
            await run()
        self.lost = 0

    def check(self) -> None:
        """Raise an `InputError` while requests fail because one before them never came."""
        if self.lost:
            raise InputError(
                f"the request {self.lost} of this model, before this one, did not arrive within "
                f"{GAP_SECONDS:.0f} s: go on from a saved state"
            )

    def close(self) -> None:
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()
