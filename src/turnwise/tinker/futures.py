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
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
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
    session: str
    """Id of the session, with which that of the request begins."""
    size: int
    """Bytes of the request, and once it has ended of its result."""
    task: "asyncio.Task[Outcome]" = field(init=False)


class Futures:
    """The requests in progress, and the results that are kept."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._sent: dict[str, int] = {}
        """Sizes of the results that were sent, the oldest first; all else counts in `_held`."""
        self._sent_size = 0
        self._held = Counter[str]()
        """Bytes by sessions."""

    def begin(self, request_id: str, owner: str, work: Work, size: int = 0) -> None:
        """Run a request of some bytes, unless it runs or has run already.

        Raises:
            Busy: when its client has too much in progress.
        """
        if request_id in self._entries:
            return
        session = request_id.partition(":")[0]
        held = self._held[session]
        if held > _MOST // max(4, len(self._held)):
            raise Busy(
                f"{held >> 20:,} MB of this session's requests are in progress, or have results "
                "that were not fetched: wait for some of them"
            )
        entry = self._entries[request_id] = _Entry(owner, session, SMALLEST + size)
        self._held[session] += entry.size
        entry.task = asyncio.create_task(self._run(request_id, entry, work))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    async def _run(self, request_id: str, entry: _Entry, work: Work) -> Outcome:
        found: Reply | BaseException
        try:
            found = await work()
        except (Exception, asyncio.CancelledError) as error:
            found = error
        if self._entries.get(request_id) is not entry:  # it was dropped meanwhile
            return Failure("the request was dropped", "unknown")
        outcome = found if isinstance(found, Reply) else Failure.of(ordinary_error(found))
        size = SMALLEST + len(outcome.message or b"") if isinstance(outcome, Reply) else SMALLEST
        self._held[entry.session] += size - entry.size
        entry.size = size
        return outcome

    async def retrieve(self, request_id: str, owner: str, seconds: float) -> Outcome | None:
        """Return a request's outcome; None if it has none within `seconds`.

        Raises:
            Gone: when there is no such request of this owner, or its result is not kept any more.
        """
        entry, done = self._entries.get(request_id), set[object]()
        if entry is not None and entry.owner == owner:
            done |= (await asyncio.wait([entry.task], timeout=seconds))[0]
        if entry is None or entry.owner != owner or self._entries.get(request_id) is not entry:
            raise Gone(f"there is no result of a request {visible(request_id)[:100]}")
        if not done:
            return None
        if request_id not in self._sent:
            self._release(entry)
            self._sent[request_id] = entry.size
            self._sent_size += entry.size
            while self._sent_size > _MOST_SENT and len(self._sent) > 1:
                self._drop(next(iter(self._sent)))
        return entry.task.result()

    def cancel(self, request_id: str, owner: str) -> None:
        """End and drop a sample for which nobody waits; others of a model wait for its passes."""
        entry = self._entries.get(request_id)
        if entry is not None and entry.owner == owner and ":sample:" in request_id:
            self._drop(request_id)

    def forget(self, beginning: str) -> None:
        """End and drop the requests whose ids begin in this way, those of a session."""
        for name in [each for each in self._entries if each.startswith(beginning)]:
            self._drop(name)

    def _drop(self, request_id: str) -> None:
        entry = self._entries.pop(request_id)
        if (size := self._sent.pop(request_id, None)) is None:
            self._release(entry)
        else:
            self._sent_size -= size
        entry.task.cancel()  # no effect on one that has ended

    def _release(self, entry: _Entry) -> None:
        self._held[entry.session] -= entry.size
        if self._held[entry.session] <= 0:
            del self._held[entry.session]


class Turns:
    """The requests of one model, which run one after the other, by their positions from 1."""

    def __init__(self) -> None:
        self.next = 1
        """Position of the request that runs, or that is waited for."""
        self._here = set[int]()
        self._moved = asyncio.Event()
        self._lost = ""

    @asynccontextmanager
    async def turn(self, position: int) -> AsyncIterator[None]:
        """Run a block once those of all positions before have ended.

        Raises:
            InputError: when a request before this one did not come in time.
        """
        self._here.add(position)
        try:
            while position > self.next:
                seconds = None if self.next in self._here else GAP_SECONDS
                try:
                    await asyncio.wait_for(self._moved.wait(), seconds)
                except TimeoutError:
                    gap = position > self.next and self.next not in self._here
                    if gap:  # all that wait fail, and later ones run
                        self._lost = (
                            f"the request {self.next} of this model, before this one, did not "
                            f"arrive within {GAP_SECONDS:.0f} s: go on from a saved state"
                        )
                        self._go_on(max(self._here) + 1)
            if position < self.next:
                raise InputError(self._lost)
            yield
        finally:
            self._here.discard(position)
            if position == self.next:
                self._go_on(position + 1)

    def _go_on(self, position: int) -> None:
        self.next = position
        self._moved.set()
        self._moved = asyncio.Event()
